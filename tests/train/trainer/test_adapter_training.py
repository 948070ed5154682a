"""Training of adapters: equal to PEFT step by step, resumed bit for bit, exported without the base model."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from support.cli_runner import CliRunner
from support.tiny_llama import save_tiny_llama
from support.tiny_runs import read_metrics, state_digest, write_texts
from torch.nn import functional as F

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.families.peft_format import save_adapter
from cutaway.generate.engine.output import Completion
from cutaway.tokenizer import byte_tokenizer
from cutaway.train.optim.lr_scheduler import lr_factor
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume, train
from cutaway.train.trainer.train_step import metrics_to_python

pytestmark = pytest.mark.usefixtures("skip_preflight")
STEPS, LR = 50, 3e-3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A random Llama with a byte tokenizer, in transformers' format."""
    return save_tiny_llama(tmp_path / "base", hidden_size=64, intermediate_size=96)


def adapter_recipe(base: Path, tmp_path: Path, adapter: dict[str, Any], **model: Any) -> dict[str, Any]:
    texts = tmp_path / "texts"
    return {
        "model": {"checkpoint": str(base), "adapter": adapter, **model},
        "data": {
            "sources": [{"path": str(texts if texts.exists() else write_texts(texts))}],
            "seq_len": 32,
            "validation_split": 0.2,
            "document_mask": False,
        },
        "optimizer": {"lr": LR, "weight_decay": 0.1},
        "schedule": {"warmup_steps": 5},
        "training": {"max_steps": STEPS, "batch_size": 4, "seed": 3},
        "eval": {"interval": 5, "num_sequences": 4},
        "checkpoint": {"interval": 4},
    }


@pytest.mark.parametrize(
    "adapter",
    [
        {"rank": 4, "alpha": 8},
        {"rank": 4, "alpha": 8, "use_rslora": True, "targets": ["attn.q", "attn.v"]},
        {"rank": 4, "alpha": 8, "use_dora": True, "targets": ["attn.*", "ffn.down"]},
    ],
    ids=["lora", "rslora", "dora"],
)
def test_equals_peft(adapter: dict[str, Any], base: Path, tmp_path: Path) -> None:
    """Fifty steps in fp32: losses within 1e-5 at every step."""
    trainer = prepare_trainer(load_recipe(adapter_recipe(base, tmp_path, adapter)), tmp_path / "run", device="cpu")
    save_adapter(trainer.model, tmp_path / "initial")
    reference = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(base), tmp_path / "initial", is_trainable=True
    ).train()
    trainer.model.train()
    named = [(name, p) for name, p in reference.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for name, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: lr_factor(trainer.recipe.schedule, n, STEPS))
    losses = []
    for step in range(STEPS):
        batch = trainer.data.train.get_batch(step * 4, 4)
        metrics = metrics_to_python(trainer.train_step(step))
        logits = reference(batch.tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5), step
    assert losses[-1] < 0.95 * losses[0], "the loss does not decrease, so the comparison is not meaningful"


def first_text(completions: list[Completion]) -> str:
    return completions[0].text or ""


def test_run_stores_the_adapter_only(base: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    recipe = adapter_recipe(base, tmp_path, {"rank": 2, "dropout": 0.1})
    run = train(recipe, tmp_path / "run", overrides=["training.max_steps=8"])
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    files = {file.name for file in run.model_directory.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert not any(name.startswith("model") for name in files)
    loaded = ct.load(tmp_path / "run")
    assert loaded.model.active_adapter == "default"
    opened = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(base), run.model_directory
    ).eval()
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(tokens), opened(tokens).logits, atol=1e-5, rtol=1e-5)
        base_logits = ct.load(base).model(tokens)
        assert float((loaded.model(tokens) - base_logits).abs().max()) > 1e-3
        merged = ct.load(ct.save(loaded, tmp_path / "merged"))
        torch.testing.assert_close(merged.model(tokens), loaded.model(tokens), atol=1e-5, rtol=1e-5)
    for options in ({}, {"weight_bits": 8}):
        texts = [ct.generate(each, "3 and ", max_new_tokens=8, **options) for each in (loaded, merged)]  # type: ignore[arg-type]
        assert first_text(texts[0]) == first_text(texts[1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_resumed_run_is_bit_equal(quantization: str, base: Path, tmp_path: Path) -> None:
    recipe = adapter_recipe(base, tmp_path, {"rank": 2, "dropout": 0.1}, quantization=quantization)
    recipe["training"]["max_steps"] = 12
    train(recipe, tmp_path / "whole")
    stopped = prepare_trainer(load_recipe(recipe), tmp_path / "stopped", device="cpu")
    stopped.callback.on_step_end = lambda metrics, _: stopped.stop_requested.set() if metrics["step"] == 6 else None  # type: ignore[method-assign]
    stopped.train()
    assert stopped.global_step == 6
    resume(tmp_path / "stopped")
    assert state_digest(tmp_path / "stopped") == state_digest(tmp_path / "whole")
    losses = [row["loss"] for row in read_metrics(tmp_path / "whole") if "loss" in row]
    assert losses[-1] < losses[0]


def test_resume_needs_the_same_base(base: Path, tmp_path: Path) -> None:
    recipe = adapter_recipe(base, tmp_path, {"rank": 2})
    recipe["training"]["max_steps"] = 4
    train(recipe, tmp_path / "run")
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(base)
    with pytest.raises(CutawayError, match="missing or has changed"):
        resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"adapter": {"rank": 2, "targets": ["query"]}}}, "matches no layer"),
        ({"model": {"adapter": None, "quantization": "nf4"}}, "set model.adapter"),
        ({"model": {"adapter": {"rank": 4096}}}, "smaller dimension"),
        ({"optimizer": {"kind": "muon"}}, "use adamw"),
        ({"model": {"lora": {"rank": 2}}}, "unknown key 'lora'"),
    ],
)
def test_invalid_recipes_are_refused(
    change: dict[str, dict[str, Any]], message: str, base: Path, tmp_path: Path
) -> None:
    recipe = adapter_recipe(base, tmp_path, {"rank": 2})
    for section, values in change.items():
        recipe[section] = {**({} if "kind" in values else recipe[section]), **values}
    with pytest.raises(CutawayError, match=message):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_adapter_directory_names_its_base(base: Path, tmp_path: Path) -> None:
    recipe = adapter_recipe(base, tmp_path, {"rank": 2})
    recipe["training"]["max_steps"] = 2
    run = train(recipe, tmp_path / "run")
    path = run.model_directory / "adapter_config.json"
    config = json.loads(path.read_text())
    assert config["base_model_name_or_path"] == str(base)
    path.write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path / "nowhere")}))
    with pytest.raises(CutawayError, match="nowhere"):
        ct.load(run.model_directory)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("lora", []),
        ("lora", ["objective = { kind = 'causal-lm' }", "data.validation_split=0.2"]),
        ("qlora", []),
        ("qlora", ["model.quantization=int8"]),
    ],
)
def test_shipped_recipes(recipe: str, overrides: list[str], base: Path, tmp_path: Path) -> None:
    """`cutaway train lora|qlora --base SOURCE --data FILE`: conversations or text, base in fp32, NF4 or int8."""
    rows = [{"prompt": f"{a} and {b}", "completion": str(a + b)} for a in range(5) for b in range(5)]
    data = tmp_path / "chat.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    if overrides and "causal" in overrides[0]:
        data = write_texts(tmp_path / "texts")
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    small = ["data.seq_len=32", "training.max_steps=3", "model.adapter.rank=2", "eval.general_text=''"]
    run = train(recipe, tmp_path / "run", base=base, texts=[data], overrides=[*small, *overrides], device="cpu")
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    loaded = ct.load(tmp_path / "run")
    config = loaded.model.adapters["default"]
    assert (config.rank, config.alpha, config.use_dora) == (2, 32.0, False)
    assert {name.rpartition(".")[2] for name in config.targets} == {"q", "k", "v", "o", "gate", "up", "down"}
    tokens = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        assert not torch.equal(loaded.model(tokens), ct.load(base).model(tokens))
    assert run.recipe.optimizer.lr == 2e-4


def test_an_adapter_keeps_its_chat_template(base: Path, tmp_path: Path, run_cli: CliRunner) -> None:
    """With its base, on another base, and written alone, an adapter has the template that it was trained with."""
    rows = [
        {"messages": [{"role": "user", "content": f"a {i}"}, {"role": "assistant", "content": "b"}]} for i in range(9)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = ["training.max_steps=1", "data.seq_len=64", "model.adapter={rank=2}"]
    run = train("lora", tmp_path / "run", overrides=overrides, texts=[tmp_path / "chat.jsonl"], base=base)
    run_cli("convert", run.directory, tmp_path / "alone", "--adapter-only")
    expected = ct.load(run.directory)
    assert expected.tokenizer is not None
    template = expected.tokenizer.chat_template
    assert template
    for checkpoint in (
        ct.load(tmp_path / "alone"),
        ct.load(base, adapters=run.directory),
        ct.load(base, adapters={"a": run.model_directory}),
    ):
        assert checkpoint.tokenizer is not None
        assert checkpoint.tokenizer.chat_template == template
        assert checkpoint.generation_config == expected.generation_config


def test_adapters_of_experts_are_trained_and_saved(tmp_path: Path) -> None:
    """Mixtral's format has one matrix per expert, and so has the adapter."""
    config = ct.config("tiny-moe").replace(vocab_size=259)
    base = ct.save(ct.build(config, seed=0), tmp_path / "base", family="cutaway")
    byte_tokenizer().save(base)
    recipe = adapter_recipe(base, tmp_path, {"rank": 2})
    recipe["training"]["max_steps"] = 2
    run = train(recipe, tmp_path / "run")
    assert any("experts" in name for name in ct.load(run.model_directory).model.adapters["default"].targets)
