"""Supervised fine-tuning: loss and gradients against transformers, packed against separate, whole runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.cli_runner import CliRunner
from support.tiny_llama import save_chat_llama
from support.tiny_runs import read_metrics, run_digest, write_texts

import cutaway as ct
from cutaway.errors import CutawayError, InputError
from cutaway.tokenizer import Tokenizer, byte_tokenizer
from cutaway.train.data.chat_dataset import PackedChatDataset, PaddedChatDataset
from cutaway.train.logging.callbacks import Callback
from cutaway.train.objectives.objective import Objective, sft
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume, train
from cutaway.train.trainer.train_step import build_micro_batch
from cutaway.train.trainer.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("skip_preflight")
IGNORED = -100


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a chat template, saved by transformers."""
    return save_chat_llama(tmp_path_factory.mktemp("llama"))


def answer(a: int, b: int) -> str:
    return f"{a + b}." if a % 3 else f"It is {a + b}, I think."


def chat_rows(count: int) -> list[dict[str, Any]]:
    pairs = [(n, n * n % 17) for n in range(count)]
    turns = [
        [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": answer(a, b)}] for a, b in pairs
    ]
    return [{"messages": turn + (turns[i - 1] if i % 4 == 0 else [])} for i, turn in enumerate(turns)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chat.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in chat_rows(40)))
    return path


def recipe(llama: Path, chats: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"checkpoint": str(llama)},
        "data": {"sources": [{"path": str(chats)}], "seq_len": 120, "validation_split": 0.2},
        "objective": {"kind": "sft"},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.0},
        "schedule": {"warmup_ratio": 0.1},
        "training": {"max_steps": 8, "batch_size": 4},
        "eval": {"interval": 4, "num_sequences": 8},
        "checkpoint": {"interval": 3},
    }
    return {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}


def loss_and_gradients(module: TrainingModule, objectives: list[Objective]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over all targets of several batches, and its gradient."""
    module.zero_grad()
    weight = sum(float(objective.weights.sum()) for objective in objectives)
    total = 0.0
    for objective in objectives:
        loss = module(objective).loss / weight
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_equal_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        scale = float(theirs[name].abs().max())
        assert float((gradient - theirs[name]).abs().max()) <= 1e-4 * max(scale, 1e-3), name


def test_loss_and_gradients_equal_transformers_with_ignored_labels(llama: Path, chats: Path, tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(recipe(llama, chats)), tmp_path / "run", device="cpu")
    objective = build_micro_batch(trainer.objective_fn, trainer.data.train, 0, 8)
    loss, _ = loss_and_gradients(trainer.training_module, [objective])
    batch = trainer.data.train.get_batch(0, 8)
    lengths = torch.tensor([len(row[0]) for row in trainer.data.train.get_rows(range(8))])
    attention_mask = (torch.arange(batch.tokens.shape[1]) < lengths[:, None]).long()
    theirs = transformers.LlamaForCausalLM.from_pretrained(llama, attn_implementation="eager")
    labels = torch.where(batch.is_target, batch.tokens, IGNORED)
    expected = theirs(input_ids=batch.tokens, attention_mask=attention_mask, labels=labels).loss
    expected.backward()
    assert abs(loss - float(expected)) <= 1e-5
    # The gradients are converted to the names and shapes of transformers as if they were weights.
    model = trainer.model
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    saved = ct.save(trainer.run_directory.build_checkpoint(model), tmp_path / "gradients")
    ours = transformers.LlamaForCausalLM.from_pretrained(saved).state_dict()
    assert_equal_gradients(ours, {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_packed_equals_separate(train_on: str, llama: Path, chats: Path, tmp_path: Path) -> None:
    """Losses and gradients of packed sequences, of a padded batch, and of each conversation alone."""
    options = recipe(llama, chats, objective={"train_on": train_on})
    trainer = prepare_trainer(load_recipe(options), tmp_path / "run", device="cpu")
    dataset = trainer.data.train
    assert isinstance(dataset, PaddedChatDataset)
    packed = PackedChatDataset(dataset.rows, 0, max_tokens=121, pad_id=0)
    assert packed.num_sequences < len(dataset.rows) / 2
    module = trainer.training_module
    batches = {
        "packed": [sft(*packed.get_batch(0, packed.num_sequences))],
        "padded": [sft(*dataset.get_batch(0, dataset.num_sequences))],
        "alone": [sft(*dataset.get_batch(i, 1)) for i in range(dataset.num_sequences)],
    }
    results = {name: loss_and_gradients(module, objectives) for name, objectives in batches.items()}
    for name in ("packed", "padded"):
        assert abs(results[name][0] - results["alone"][0]) <= 1e-5
        assert_equal_gradients(results[name][1], results["alone"][1])
    # Without document mask, conversations see each other, but the targets are the same.
    mixed = sft(*packed.get_batch(0, packed.num_sequences), document_mask=False)
    assert mixed.weights.sum() == batches["packed"][0].weights.sum()
    assert abs(loss_and_gradients(module, [mixed])[0] - results["alone"][0]) > 1e-4


@pytest.mark.sample(1)
@pytest.mark.parametrize("packing", [False, True])
def test_run_resumes_bit_exactly_and_learns(packing: bool, llama: Path, chats: Path, tmp_path: Path) -> None:
    options = recipe(llama, chats, objective={"packing": packing}, training={"num_epochs": 4, "batch_size": 4})
    del options["training"]["max_steps"]
    whole = train(options, tmp_path / "whole", device="cpu")
    trainer = prepare_trainer(load_recipe(options), tmp_path / "run", device="cpu")
    assert isinstance(trainer.data.train, PackedChatDataset if packing else PaddedChatDataset)
    assert whole.recipe.training.max_steps == -(-4 * trainer.data.train.num_sequences // 4)
    assert whole.recipe.schedule.warmup_steps == -(-whole.recipe.training.max_steps // 10)
    losses = [row["loss"] for row in read_metrics(whole.directory) if "loss" in row]
    assert losses[-1] < losses[0] * 0.8
    train_step = trainer.train_step

    def stop_at_4(step: int) -> dict[str, Any]:
        if step == 4:
            trainer.stop_requested.set()
        return train_step(step)

    trainer.train_step = stop_at_4  # type: ignore[method-assign]
    trainer.train()
    assert trainer.global_step == 5
    resume(tmp_path / "run", device="cpu")
    assert run_digest(tmp_path / "run") == run_digest(whole.directory)


def test_saved_model_has_the_template_and_stops_at_its_turns(llama: Path, chats: Path, tmp_path: Path) -> None:
    """A base model whose EOS is another token than the one that ends turns."""
    base = ct.load(llama)
    backend = byte_tokenizer().backend
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    Tokenizer(backend, special_tokens_map={"eos_token": "<|endoftext|>"}).save(tmp_path / "tokenizer")
    directory = ct.save(base, tmp_path / "base")
    for file in directory.glob("*tokenizer*"):
        file.unlink()
    (directory / "chat_template.jinja").unlink()
    for file in (tmp_path / "tokenizer").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    messages: list[str] = []
    rows: list[Any] = []
    run = train(
        recipe(directory, chats, training={"max_steps": 2}),
        tmp_path / "run",
        device="cpu",
        callback=Callback(on_message=messages.append, on_data=rows.append),
    )
    assert any("no chat template; using 'chatml'" in message for message in messages)
    [row] = rows
    assert row["examples"][0]["segments"][-2]["target"]
    saved = ct.load(run.model_directory)
    assert saved.tokenizer is not None
    assert "<|im_start|>" in str(saved.tokenizer.chat_template)
    end = saved.tokenizer.token_to_id("<|im_end|>")
    assert end in saved.generation_config["eos_token_id"]
    assert (
        transformers.GenerationConfig.from_pretrained(run.model_directory).eos_token_id
        == saved.generation_config["eos_token_id"]
    )
    peer = transformers.AutoTokenizer.from_pretrained(run.model_directory)
    chat = chat_rows(1)[0]["messages"]
    assert peer.apply_chat_template(chat, tokenize=False) == saved.tokenizer.render_chat(
        chat, add_generation_prompt=False
    )


def test_recipe_sft_is_complete(llama: Path, chats: Path, tmp_path: Path) -> None:
    loaded = load_recipe("sft", ["training.max_steps=2"], [chats], llama)
    assert loaded.training.max_steps == 2
    run = train(loaded, tmp_path / "run", device="cpu")
    assert run.recipe.training.max_steps == 2  # takes precedence over the epochs of the recipe
    by_epochs = load_recipe(load_recipe("sft", [], [chats], llama))
    trainer = prepare_trainer(by_epochs, tmp_path / "epochs", device="cpu")
    assert trainer.recipe.training.max_steps == -(-3 * trainer.data.train.num_sequences // 8)  # type: ignore[attr-defined]


def test_errors_of_users(llama: Path, chats: Path, tmp_path: Path) -> None:
    def start(base: object, data: Path, *overrides: str) -> None:
        prepare_trainer(load_recipe("sft", overrides, [data], str(base)), tmp_path / "run", device="cpu")

    with pytest.raises(InputError, match=r"model\.checkpoint is empty.*--base"):
        start("", chats)
    with pytest.raises(CutawayError, match="requires a model of form decoder"):
        start("tiny-english-encoder", chats)
    with pytest.raises(CutawayError, match=r"objective\.train_on"):
        start(llama, chats, "objective.train_on=user")
    with pytest.raises(InputError, match="not a chat template"):
        start(llama, chats, "data.chat_template=gpt-5")
    with pytest.raises(InputError, match=r"needs <\|eot_id\|>|needs <\|start_header_id\|>"):
        start(llama, chats, "data.chat_template=llama-3")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match="no records"):
        start(llama, tmp_path / "empty.jsonl")
    with pytest.raises(InputError, match="not a file with records"):
        start(llama, write_texts(tmp_path / "texts"))
    with pytest.raises(InputError, match="missing"):
        start(llama, tmp_path / "missing.jsonl")
    assert not (tmp_path / "run").exists()


def test_show_data_prints_targets_and_does_not_train(
    llama: Path, chats: Path, run_cli: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("train", "sft", "--base", llama, "--data", chats, "--show-data")
    output = run_cli(*arguments)
    row = chat_rows(40)[1]["messages"]
    assert f"{row[0]['content']}<|im_end|>\n<|im_start|>assistant\n⟦{row[1]['content']}<|im_end|>⟧" in output
    assert "3 epochs of 39 sequences in batches of 8: 15 steps" in output
    lines = [json.loads(line) for line in run_cli(*arguments, "--json").splitlines()]
    [data] = [line["data"] for line in lines if "data" in line]
    segments = data["examples"][0]["segments"]
    assert next(segment["text"] for segment in segments if segment["target"]).endswith("<|im_end|>")
    assert not (tmp_path / "runs").exists()
    assert "are texts" in run_cli("train", "tiny-python", "--show-data", code=2)
    assert "needs a recipe" in run_cli("train", "--resume", tmp_path, "--show-data", code=2)
