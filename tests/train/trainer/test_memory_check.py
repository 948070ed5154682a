"""Memory check: estimates equal measured peaks of adapter training; a refusal names settings that fit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_runs import write_texts

import cutaway as ct
from cutaway.errors import InputError
from cutaway.model.adapters.quantized_linear import quantize_linears
from cutaway.tokenizer import byte_tokenizer
from cutaway.train.checkpoint import pretrained_checkpoint
from cutaway.train.logging.callbacks import Callback
from cutaway.train.logging.throughput import flops_per_step
from cutaway.train.objectives import causal_lm
from cutaway.train.optim.adamw_8bit import quantize_8bit
from cutaway.train.optim.optimizer import build_optimizer
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer import launch
from cutaway.train.trainer.dry_run import MemoryCommTracker
from cutaway.train.trainer.launch import prepare_trainer
from cutaway.train.trainer.memory_check import LAYERS_KEY, expected_memory
from cutaway.train.trainer.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("skip_preflight")
CPU = torch.device("cpu")
MODEL = {
    "vocab_size": 600,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)).save_pretrained(tmp_path / "base")
    byte_tokenizer().save(tmp_path / "base")
    return tmp_path / "base"


def build_recipe(base: Path, *, batch_size: int = 8, seq_len: int = 256, **sections: Any) -> Any:
    texts = base.parent / "texts"
    recipe: dict[str, Any] = {
        "model": {"checkpoint": str(base), **sections.pop("model", {})},
        "data": {"sources": [{"path": str(texts if texts.exists() else write_texts(texts))}], "seq_len": seq_len},
        "training": {"batch_size": batch_size, "max_steps": 2, **sections.pop("training", {})},
        "eval": {"general_text": ""},
        **sections,
    }
    return load_recipe(recipe)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("quantization", "precision", "checkpointing", "state_dtype", "adapter"),
    [
        ("none", "fp32", "none", "fp32", {"rank": 8}),
        ("none", "bf16", "full", "int8", {"rank": 8}),
        ("nf4", "fp32", "none", "fp32", {"rank": 8, "targets": ["attn.q", "attn.v"]}),
        ("int8", "fp32", "full", "fp32", {"rank": 8}),
        ("none", "fp32", "none", "fp32", {"rank": 4, "use_dora": True, "targets": ["attn.*"]}),
    ],
)
def test_peak_memory_of_adapter_training(
    base: Path, quantization: str, precision: str, checkpointing: Any, state_dtype: str, adapter: dict[str, Any]
) -> None:
    recipe = build_recipe(
        base,
        batch_size=4,
        model={"adapter": adapter, "quantization": quantization},
        training={"precision": precision, "activation_checkpointing": checkpointing},
        optimizer={"state_dtype": state_dtype},
    )
    config = ct.config(base)
    for signed in (True, False):  # the tables of codes are constants of the process
        quantize_8bit(torch.zeros(256), signed=signed)
    with MemoryCommTracker() as tracker:
        model = ct.build(config, seed=0, dtype=torch.bfloat16 if precision == "bf16" else torch.float32).train()
        if quantization != "none":
            quantize_linears(model, quantization)  # type: ignore[arg-type]
        model.use_activation_checkpointing(checkpointing).add_adapter(adapter, seed=0)
        module = TrainingModule(model, recipe.objective, recipe.training.precision)
        optimizer = build_optimizer(recipe.optimizer, model)
        tokens = torch.ones((4, 257), dtype=torch.long)
        document_ids = (torch.arange(257) > 20).long().expand_as(tokens)
        for _ in range(2):
            tracker.reset_peak()
            optimizer.zero_grad()
            module(causal_lm(tokens, document_ids)).loss.backward()
            peak = tracker.peak_bytes
            optimizer.step()
    estimate, lower_bound = expected_memory(recipe, config, CPU)
    assert estimate == pytest.approx(peak, rel=0.05)
    assert lower_bound == pytest.approx(tracker.live_bytes, rel=0.02)


def refusal(recipe: Any, tmp_path: Path) -> str:
    with pytest.raises(InputError) as error:
        prepare_trainer(recipe, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("available", "expected", "changes"),
    [
        (0.7, {"training.grad_accum_steps"}, {}),
        (0.15, {"training.grad_accum_steps", "training.activation_checkpointing"}, {}),
        (0.7, {"training.activation_checkpointing", LAYERS_KEY}, {"batch_size": 1, "seq_len": 2048}),
    ],
)
def test_refusal_names_settings_that_fit(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: float, expected: set[str], changes: Any
) -> None:
    recipe = build_recipe(base, model={"adapter": {"rank": 8}}, **changes)
    config = ct.config(base)
    free = int(available * expected_memory(recipe, config, CPU)[0])
    monkeypatch.setattr(launch, "free_memory", lambda device: free)
    message = refusal(recipe, tmp_path)
    assert message.startswith("a training step takes")
    overrides = re.findall(r"([a-z_.]+) = ('\w+'|\d+|\{[^}]*\})", message.partition("set ")[2])
    assert {key for key, _ in overrides} == expected
    settings = [f"{key}={value}" for key, value in overrides]
    changed = load_recipe(recipe, settings)
    estimate = expected_memory(changed, config, CPU)[0]
    assert estimate <= free
    assert message.endswith(f": {estimate / 2**30:.3g} GiB")
    if changed.data.seq_len == 256:  # the texts are too short for longer sequences
        prepare_trainer(changed, tmp_path / "run", device="cpu")  # no error


def test_full_fine_tuning_that_cannot_fit_proposes_an_adapter(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = build_recipe(base, batch_size=1)
    lower_bound = expected_memory(recipe, ct.config(base), CPU)[1]
    monkeypatch.setattr(launch, "free_memory", lambda device: lower_bound // 2)
    message = refusal(recipe, tmp_path)
    assert message.startswith("weights, gradients and optimizer state take")
    assert "model.adapter = { rank = 16 }" in message
    monkeypatch.setattr(launch, "free_memory", lambda device: lower_bound // 100)
    assert "use a smaller model or another device: no settings of the recipe fit" in refusal(recipe, tmp_path)


def test_check_precedes_loading_of_weights(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(pretrained_checkpoint, "load", fail)
    monkeypatch.setattr(launch, "free_memory", lambda device: 1000)
    for model in ({}, {"adapter": {"rank": 8}}, {"adapter": {"rank": 8}, "quantization": "nf4"}):
        assert "are free" in refusal(build_recipe(base, model=model), tmp_path)


def test_load_config_equals_the_config_of_the_loaded_model(base: Path, tmp_path: Path) -> None:
    from cutaway.families.load import load_config
    from cutaway.families.save import save

    checkpoint = ct.load(base)
    ct.save(checkpoint, tmp_path / "model.gguf")
    save(checkpoint, tmp_path / "native", family="cutaway")
    for source in (base, tmp_path / "model.gguf", tmp_path / "native", "tiny-english"):
        assert load_config(source) == ct.load(source).config


def test_records_are_as_long_as_the_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """data.seq_len is a limit: records that are shorter need less memory."""
    data = tmp_path / "chat.jsonl"
    rows = [{"prompt": f"{number} and", "completion": " so on"} for number in range(20)]
    data.write_text("\n".join(map(json.dumps, rows)))
    recipe = {
        "model": {"checkpoint": "tiny-english"},
        "data": {"sources": [{"path": str(data)}], "seq_len": 512},
        "objective": {"kind": "sft"},
        "training": {"batch_size": 8, "max_steps": 1, "preflight": False},
    }
    monkeypatch.setattr(launch, "free_memory", lambda device: 250_000_000)
    messages: list[str] = []
    prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu", callback=Callback(on_message=messages.append))
    assert any(message.startswith("estimated memory per step") for message in messages)
    long_rows = [{"prompt": f"{number}", "completion": " word" * 600} for number in range(20)]
    data.write_text("\n".join(map(json.dumps, long_rows)))
    with pytest.raises(InputError, match=r"a training step takes .* set training.grad_accum_steps"):
        prepare_trainer(load_recipe(recipe), tmp_path / "long", device="cpu")


@pytest.mark.parametrize(
    ("objective", "row", "count"),
    [
        ({"kind": "dpo"}, {"prompt": "a", "chosen": " b", "rejected": " c"}, 2),
        ({"kind": "embedding"}, {"anchor": "a", "positive": "b", "negative": "c"}, 3),
        ({"kind": "multiple-choice"}, {"question": "a", "choices": ["b", "c", "d", "e"], "answer": 0}, 4),
        ({"kind": "grpo", "reward": "exact_match", "num_generations": 6, "max_new_tokens": 4}, {"prompt": "a"}, 6),
    ],
)
def test_all_sequences_of_a_row_are_counted(
    objective: dict[str, Any], row: dict[str, Any], count: int, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row | {"answer": row.get("answer", str(n)), "id": n}) for n in range(8)))
    base = "tiny-english-encoder" if objective["kind"] in ("embedding", "multiple-choice") else "tiny-english"
    recipe = {
        "model": {"checkpoint": base},
        "data": {"sources": [{"path": str(data)}], "seq_len": 64},
        "objective": objective,
        "training": {"batch_size": 2, "max_steps": 1, "preflight": False},
    }
    messages: list[str] = []
    trainer = prepare_trainer(
        load_recipe(recipe), tmp_path / "run", device="cpu", callback=Callback(on_message=messages.append)
    )
    assert trainer.data.sequences_per_row == count
    shortened = load_recipe(recipe, [f"data.seq_len={trainer.data.max_len}"])
    estimate = expected_memory(shortened, trainer.model.config, CPU, sequences_per_row=count)[0]
    assert estimate > expected_memory(shortened, trainer.model.config, CPU)[0]
    assert any(message.startswith(f"estimated memory per step: {estimate / 2**30:.2g} GiB") for message in messages)
    assert flops_per_step(trainer.recipe, trainer.model.config) is None  # the lengths of records vary
