"""Runs of DPO, KTO and ORPO: they learn the preference, resume bit for bit, and leave the reference unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.cli_runner import CliRunner
from support.tiny_llama import save_chat_llama
from support.tiny_runs import read_metrics, run_digest, state_digest

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.train.logging.tensorboard import iter_scalars
from cutaway.train.objectives.preference import DPOObjective
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume, train
from cutaway.train.trainer.train_step import build_micro_batch

pytestmark = pytest.mark.usefixtures("skip_preflight")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"kind": "dpo"},
    "ipo": {"kind": "dpo", "loss_type": "ipo"},
    "kto": {"kind": "kto"},
    "orpo": {"kind": "orpo", "beta": 5.0},
}
ADAPTER = {"rank": 4}
ALWAYS = {("dpo", "full"), ("dpo", "lora"), ("kto", "lora"), ("orpo", "full")}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a chat template, saved by transformers."""
    return save_chat_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short answers are preferred to long ones."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = []
    for number in range(40):
        prompt = [{"role": "user", "content": f"{number}+{number % 7}?"}]
        short, long = f"{number + number % 7}.", f"Well, I think it is {number + number % 7}."
        answers = ([{"role": "assistant", "content": text}] for text in (short, long))
        rows.append(dict(zip(("chosen", "rejected"), (prompt + answer for answer in answers), strict=True)))
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def recipe(llama: Path, pairs: Path, kind: str, adapter: dict[str, Any] | None, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"checkpoint": str(llama)} | ({} if adapter is None else {"adapter": adapter}),
        "data": {"sources": [{"path": str(pairs)}], "seq_len": 120, "validation_split": 0.2},
        "objective": OBJECTIVES[kind],
        "optimizer": {"lr": 3e-3, "weight_decay": 0.0},
        "schedule": {"warmup_steps": 1},
        "training": {"max_steps": 8, "batch_size": 4},
        "eval": {"interval": 4, "num_sequences": 8, "general_text": ""},
        "checkpoint": {"interval": 3},
    }
    return {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        pytest.param(kind, adapter, id=f"{kind}-{name}", marks=[] if (kind, name) in ALWAYS else pytest.mark.nightly)
        for kind in OBJECTIVES
        for name, adapter in (("full", None), ("lora", ADAPTER))
    ],
)
def test_learns_the_preference_and_resumes_bit_exactly(
    kind: str, adapter: dict[str, Any] | None, llama: Path, pairs: Path, tmp_path: Path
) -> None:
    options = recipe(llama, pairs, kind, adapter)
    whole = train(options, tmp_path / "whole", device="cpu")
    rows = read_metrics(whole.directory)
    steps, evals = ([row for row in rows if key in row] for key in ("loss", "eval_loss"))
    assert evals[-1]["eval_rewards/margins"] > evals[0]["eval_rewards/margins"]
    assert evals[-1]["eval_loss"] < evals[0]["eval_loss"]
    if kind != "orpo":  # at first, the model is its reference
        assert evals[0]["eval_rewards/margins"] == pytest.approx(0, abs=1e-6)
        assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    if kind in ("dpo", "ipo"):
        assert steps[0]["loss"] == pytest.approx(0.6931472 if kind == "dpo" else 25.0, abs=1e-5)
    if kind != "kto":
        assert evals[-1]["eval_rewards/accuracies"] > evals[0]["eval_rewards/accuracies"]

    trainer = prepare_trainer(load_recipe(options), tmp_path / "run", device="cpu")
    trainer.callback.on_step_end = lambda metrics, _: trainer.stop_requested.set() if metrics["step"] == 5 else None  # type: ignore[method-assign]
    trainer.train()
    assert trainer.global_step == 5
    resume(tmp_path / "run", device="cpu")
    digest = run_digest if adapter is None else state_digest
    assert digest(tmp_path / "run") == digest(whole.directory)
    [completion] = ct.generate(ct.load(whole.directory), [[{"role": "user", "content": "1+1?"}]], max_new_tokens=4)
    assert completion.tokens


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["full", "lora"])
def test_reference_is_the_base_after_training(
    adapter: dict[str, Any] | None, llama: Path, pairs: Path, tmp_path: Path
) -> None:
    trainer = prepare_trainer(load_recipe(recipe(llama, pairs, "dpo", adapter)), tmp_path / "run", device="cpu")
    objective = build_micro_batch(trainer.objective_fn, trainer.data.train, 0, 4)
    assert isinstance(objective, DPOObjective)
    expected = objective.log_probs(ct.load(llama).model).sums
    before = objective.reference_log_probs(objective.reference, trainer.model).sums
    trainer.train()
    after = objective.reference_log_probs(objective.reference, trainer.model).sums
    policy = objective.log_probs(trainer.model).sums
    assert torch.equal(before, after)
    torch.testing.assert_close(before, expected.detach(), rtol=0, atol=1e-4)
    assert float((policy - after).detach().abs().max()) > 0.1


def gradients(options: dict[str, Any], directory: Path, grad_accum_steps: int) -> tuple[float, list[torch.Tensor]]:
    options["training"]["grad_accum_steps"] = grad_accum_steps
    trainer = prepare_trainer(load_recipe(options), directory, device="cpu")
    trainer.model.train()
    for step in range(2):  # in the second step, the model differs from the reference
        metrics = trainer.train_step_runner.run(step)
    parameters = trainer.train_step_runner.optimizer.parameters.values()
    return float(metrics["loss"]), [each.detach().clone() for each in parameters]


@pytest.mark.parametrize("kind", list(OBJECTIVES))
def test_step_does_not_depend_on_micro_batches(kind: str, llama: Path, pairs: Path, tmp_path: Path) -> None:
    optimizer = {"kind": "sgd", "lr": 0.1}
    options = {**recipe(llama, pairs, kind, None), "optimizer": optimizer}
    results = [gradients(options, tmp_path / str(count), count) for count in (1, 3)]
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for one, three in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(three, one, rtol=0, atol=1e-5 * float(one.abs().max()))


def test_dropout_does_not_change_the_reference(llama: Path, pairs: Path, tmp_path: Path) -> None:
    options = recipe(llama, pairs, "kto", {"rank": 4, "dropout": 0.3})
    train(options, tmp_path / "one", device="cpu")
    train(options, tmp_path / "two", device="cpu")
    assert state_digest(tmp_path / "one") == state_digest(tmp_path / "two")


@pytest.mark.parametrize("kind", ["dpo", "kto", "orpo"])
def test_shipped_recipes_are_complete(
    kind: str, llama: Path, pairs: Path, tmp_path: Path, run_cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = run_cli("train", kind, "--base", llama, "--data", pairs, "--show-data")
    names = ("desirable", "undesirable") if kind == "kto" else ("chosen", "rejected")
    for name in names:
        assert f", {name}; targets are in" in output
    assert "user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦4.<|im_end|>⟧" in output
    assert "assistant\n⟦Well, I think it is" in output
    loaded = load_recipe(kind, ["training.max_steps=2"], [pairs], llama)
    assert loaded.purpose == "align"
    run = train(loaded, tmp_path / "run", device="cpu")
    assert (run.model_directory / "adapter_config.json").exists()


def test_loggers_get_the_metrics() -> None:
    step = {"step": 1, "loss": 0.5, "lr": 0.1, "rewards/margins": 0.2, "kl": 0.3, "verdict": 0}
    evaluation = {"step": 1, "eval_loss": 0.4, "eval_rewards/margins": 0.1, "eval_nll_loss": 2.0}
    assert dict(iter_scalars(step)) == {
        "train/loss": 0.5,
        "train/lr": 0.1,
        "train/rewards/margins": 0.2,
        "train/kl": 0.3,
    }
    assert dict(iter_scalars(evaluation)) == {
        "eval/loss": 0.4,
        "eval/rewards/margins": 0.1,
        "eval/nll_loss": 2.0,
    }


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["full", "lora"])
def test_bf16_policy_equals_its_reference_at_first(
    adapter: dict[str, Any] | None, llama: Path, pairs: Path, tmp_path: Path
) -> None:
    options = recipe(llama, pairs, "dpo", adapter, training={"precision": "bf16", "max_steps": 1})
    rows = read_metrics(train(options, tmp_path / "run", device="cpu").directory)
    assert next(row["eval_rewards/margins"] for row in rows if "eval_loss" in row) == 0
    assert [row["rewards/margins"] for row in rows if "loss" in row] == [0]


def test_quantized_base(llama: Path, pairs: Path, tmp_path: Path) -> None:
    options = recipe(llama, pairs, "dpo", ADAPTER, model={"quantization": "int8"})
    run = train(options, tmp_path / "run", device="cpu")
    evals = [row for row in read_metrics(run.directory) if "eval_loss" in row]
    assert evals[0]["eval_rewards/margins"] == 0
    assert evals[-1]["eval_rewards/margins"] > 0


def test_errors_of_users(llama: Path, pairs: Path, tmp_path: Path) -> None:
    def start(options: dict[str, Any], match: str) -> None:
        with pytest.raises(CutawayError, match=match):
            prepare_trainer(load_recipe(options), tmp_path / "run", device="cpu")
        assert not (tmp_path / "run").exists()

    start(recipe(llama, pairs, "dpo", None) | {"model": "tiny-gpt"}, "compares the model with itself before training")
    start(recipe(llama, pairs, "dpo", None, model={"checkpoint": "tiny-english-encoder"}), "model of form decoder")
    start(recipe(llama, pairs, "kto", None, training={"batch_size": 1}), "use at least 2")
    start(recipe(llama, pairs, "dpo", None, parallel={"tp": 2}), r"parallel\.tp = 1")
    start(recipe(llama, pairs, "dpo", None, objective={"beta": 0}), r"objective\.beta")
    start(recipe(llama, pairs, "dpo", None, objective={"loss_type": "hinge"}), r"objective\.loss_type")
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n" + json.dumps({"text": "b"}))
    start(recipe(llama, chats, "dpo", None), "prompt, chosen and rejected")
    start(recipe(llama, chats, "kto", None), "prompt, completion and label")
    train(recipe(llama, pairs, "dpo", None, training={"max_steps": 1}), tmp_path / "done", device="cpu")
    changed = transformers.LlamaForCausalLM.from_pretrained(llama)
    torch.nn.init.normal_(changed.lm_head.weight)
    changed.save_pretrained(llama)
    with pytest.raises(CutawayError, match="missing or has changed"):
        resume(tmp_path / "done")
