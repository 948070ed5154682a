"""GRPO runs: rollouts, gradients of micro-batches, resume, reference model, evaluation, and a reward that rises."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runner import CliRunner
from support.tiny_llama import save_tiny_llama
from support.tiny_runs import read_metrics, state_digest

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.generate.engine.engine import Engine
from cutaway.train.objectives.reference_model import ReferenceModel
from cutaway.train.recipe.load import load_recipe
from cutaway.train.rollouts.sampler import RolloutSampler
from cutaway.train.trainer.launch import prepare_trainer, resume, train
from cutaway.train.trainer.train_step import metrics_to_python
from cutaway.train.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("skip_preflight")
REWARDS = """
def lowercase(completions, **kwargs):
    return [sum(character.islower() for character in text) / 6 for text in completions]

def digits(completions, level):
    return [float(sum(map(str.isdigit, text)) >= each) for text, each in zip(completions, level)]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte tokenizer, saved by transformers."""
    directory = save_tiny_llama(tmp_path_factory.mktemp("base"), initializer_range=0.3, eos_token_id=257)
    (directory.parent / "code").mkdir()
    (directory.parent / "code" / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{'abc'[: n % 4]}{n}=", "level": n % 3} for n in range(30)]
    (directory.parent / "code" / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return directory


def grpo_recipe(base: Path, **sections: Any) -> dict[str, Any]:
    code = base.parent / "code"
    recipe: dict[str, Any] = {
        "model": {"checkpoint": str(base)},
        "data": {"sources": [{"path": str(code / "prompts.jsonl")}], "seq_len": 24, "validation_split": 0.2},
        "objective": {
            "kind": "grpo",
            "reward": f"{code / 'rewards.py'}:lowercase",
            "num_generations": 6,
            "max_new_tokens": 6,
        },
        "optimizer": {"lr": 3e-3, "weight_decay": 0.0, "betas": [0.9, 0.999]},
        "schedule": {"kind": "constant", "warmup_steps": 1},
        "training": {"max_steps": 6, "batch_size": 4, "on_grad_spike": "continue"},
        "eval": {"interval": 3, "num_sequences": 5, "general_text": ""},
        "checkpoint": {"interval": 50},
    }
    return {name: recipe.get(name, {}) | sections.get(name, {}) for name in recipe | sections}


def build_trainer(base: Path, directory: Path, **sections: Any) -> Trainer:
    trainer = prepare_trainer(load_recipe(grpo_recipe(base, **sections)), directory, device="cpu")
    trainer.model.train()
    return trainer


def rollouts_of(trainer: Trainer) -> RolloutSampler:
    assert trainer.rollouts is not None
    return trainer.rollouts


def step_gradient(trainer: Trainer, step: int = 0) -> dict[str, torch.Tensor]:
    """Gradient of a step, without the update."""
    trainer.train_step_runner.forward_backward(step)
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_micro_batches_have_the_same_rollouts_and_gradient(loss_type: str, base: Path, tmp_path: Path) -> None:
    results = []
    for count in (1, 2, 4):
        sections = {"objective": {"loss_type": loss_type, "beta": 0.1}, "training": {"grad_accum_steps": count}}
        trainer = build_trainer(base, tmp_path / str(count), **sections)
        gradient = step_gradient(trainer)
        batch = rollouts_of(trainer).batch
        assert batch is not None
        results.append((gradient, batch))
    for gradient, batch in results[1:]:
        torch.testing.assert_close(batch.tokens, results[0][1].tokens, atol=0, rtol=0)
        torch.testing.assert_close(batch.advantages, results[0][1].advantages, atol=0, rtol=0)
        torch.testing.assert_close(gradient, results[0][0], atol=1e-6, rtol=1e-4)
    assert max(float(each.abs().max()) for each in results[0][0].values()) > 1e-3


def test_completions_depend_on_seed_step_prompt_and_index_only(base: Path, tmp_path: Path) -> None:
    """Completions in training mode, with dropout, equal those of `generate` with the same seeds in eval mode."""
    trainer = build_trainer(base, tmp_path / "run", model={"adapter": {"rank": 4, "dropout": 0.5}})
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    sampler = rollouts_of(trainer)
    flags = [module.training for module in trainer.model.modules()]
    prompts = trainer.data.train.get_batch(0, 4)
    together = sampler.generate(prompts.prompt_ids, [3, 5, 7, 9], temperature=1.0)
    assert [module.training for module in trainer.model.modules()] == flags
    assert any(flags)
    trainer.model.eval()
    alone = [
        sampler.generate([ids], [seed], temperature=1.0)[0]
        for ids, seed in zip(prompts.prompt_ids, [3, 5, 7, 9], strict=True)
    ]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    public = ct.generate(trainer.model, prompts.prompt_ids[:1], max_new_tokens=6, temperature=1.0, seed=3)
    assert public[0].tokens == alone[0].tokens
    trainer.model.train()
    trainer.train_step(0)
    first = sampler.batch
    trainer.train_step(1)
    assert first is not None
    assert sampler.batch is not None
    assert not torch.equal(first.tokens[:, :8], sampler.batch.tokens[:, :8])


def test_kv_cache_is_freed(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[weakref.ref[Any]] = []
    init = Engine.__init__

    def recording_init(self: Engine, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        caches.append(weakref.ref(self.model_runner.cache))

    monkeypatch.setattr(Engine, "__init__", recording_init)
    trainer = build_trainer(base, tmp_path / "run")
    gc.disable()
    try:
        sampler = rollouts_of(trainer)
        sampler.build_micro_batches(0, [(0, 4)])
        assert len(caches) == 1
        assert caches[0]() is None
    finally:
        gc.enable()


def test_ratio_is_one_in_the_first_iteration_and_changes_in_the_second(base: Path, tmp_path: Path) -> None:
    trainer = build_trainer(base, tmp_path / "run", objective={"num_iterations": 2, "beta": 0.1})
    sampler, ratios = rollouts_of(trainer), []
    for step in range(4):
        [objective] = sampler.build_micro_batches(step, [(0, 4)])
        with torch.no_grad():
            selected = objective.select_targets()
            log_probs = objective.log_probs(trainer.model, selected)
        metrics = metrics_to_python(trainer.train_step(step))
        assert sampler.batch is not None
        old = sampler.batch.old_log_probs
        assert old is not None
        is_target = objective.token_weights != 0
        ratios.append((log_probs - old.float()).exp()[is_target])
        assert sampler.batch.index == step // 2
        if step == 0:
            assert metrics["kl"] == 0.0
            assert metrics["clip_ratio"] == 0.0
    for step in (0, 2):
        assert bool((ratios[step] == 1).all()), "the policy of the first iteration is the one that sampled"
        assert float((ratios[step + 1] - 1).abs().max()) > 1e-3


@pytest.mark.parametrize("objective", [{}, {"num_iterations": 3, "beta": 0.05}], ids=["one", "three"])
def test_resumed_run_is_bit_equal(objective: dict[str, Any], base: Path, tmp_path: Path) -> None:
    """Stopped after step 4, which is within the second batch of rollouts if there are three iterations."""
    recipe = grpo_recipe(base, objective=objective, model={"adapter": {"rank": 4, "dropout": 0.1}})
    train(recipe, tmp_path / "whole", device="cpu")
    stopped = prepare_trainer(load_recipe(recipe), tmp_path / "stopped", device="cpu")
    stopped.callback.on_step_end = lambda metrics, _: stopped.stop_requested.set() if metrics["step"] == 4 else None  # type: ignore[method-assign]
    stopped.train()
    assert stopped.global_step == 4
    resume(tmp_path / "stopped", device="cpu")
    assert state_digest(tmp_path / "stopped") == state_digest(tmp_path / "whole")


def test_disabled_adapter_equals_frozen_copy(base: Path, tmp_path: Path) -> None:
    trainer = build_trainer(base, tmp_path / "run", model={"adapter": {"rank": 4}}, objective={"beta": 0.5})
    for step in range(3):
        trainer.train_step(step)
    gradients = []
    for reference in (ReferenceModel(), ReferenceModel(ct.load(base, dtype=torch.float32).model)):
        rollouts_of(trainer).reference = reference
        gradients.append(step_gradient(trainer, 3))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)
    rollouts_of(trainer).reference = None
    without = step_gradient(trainer, 3)
    assert any(float((without[name] - each).abs().max()) > 1e-4 for name, each in gradients[0].items())


def test_reward_rises(base: Path, tmp_path: Path) -> None:
    recipe = grpo_recipe(
        base,
        objective={"num_generations": 12},
        optimizer={"lr": 1e-2},
        training={"max_steps": 20},
        eval={"interval": 5},
        checkpoint={"export": "best"},
    )
    run = train(recipe, tmp_path / "run", device="cpu")
    rows = read_metrics(tmp_path / "run")
    rewards = [row["reward"] for row in rows if "reward" in row]
    evals = [row for row in rows if "eval_reward" in row]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.6
    assert all(row["eval_loss"] == -row["eval_reward"] for row in evals)
    assert evals[-1]["eval_reward"] > evals[0]["eval_reward"] + 0.3
    assert "[reward " in evals[-1]["sample"]
    step = next(row for row in rows if "reward" in row)
    for name in ("reward_std", "frac_reward_zero_std", "completion_length", "frac_truncated", "entropy", "clip_ratio"):
        assert name in step
    timings = [json.loads(line) for line in (tmp_path / "run" / "timings.jsonl").read_text().splitlines()]
    assert all(row["rollout_tokens_per_second"] > 0 for row in timings)
    [completion] = ct.generate(ct.load(run.directory), "a1=", max_new_tokens=6, temperature=0.0)
    assert completion.text is not None


def test_chat_prompts_and_several_rewards(base: Path, tmp_path: Path) -> None:
    chats: list[Any] = [[{"role": "user", "content": f"{n}?"}] for n in range(10)]
    chats += [[{"role": "user", "content": [{"type": "text", "text": f"{n}?"}]}] for n in (10, 11)]
    rows = [{"prompt": json.dumps(chat) if n % 2 else chat, "level": n % 3} for n, chat in enumerate(chats)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"messages": []}, {"prompt": "x" * 90}])))
    file = base.parent / "code" / "rewards.py"
    recipe = grpo_recipe(
        base,
        data={"sources": [{"path": str(tmp_path / "chat.jsonl")}], "seq_len": 48},
        objective={"reward": [f"{file}:lowercase", {"function": f"{file}:digits", "weight": -2.0}]},
        training={"max_steps": 1},
    )
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    batch = trainer.data.train.get_batch(0, 1)
    tokenizer = trainer.run_directory.tokenizer
    assert tokenizer.chat_template is not None
    assert all(isinstance(prompt[0]["content"], str) for prompt in batch.prompts)
    assert batch.prompt_ids == [tokenizer.encode_chat(prompt) for prompt in batch.prompts]
    metrics = metrics_to_python(trainer.train_step(0))
    assert metrics["reward"] == pytest.approx(metrics["reward/lowercase"] - 2 * metrics["reward/digits"])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": {"reward": []}}, "has no reward .objective.reward is empty."),
        ({"objective": {"max_new_tokens": 64}}, "objective.max_new_tokens is 64, but prompt and completion"),
        ({"objective": {"num_generations": 1}}, "num_generations"),
        ({"parallel": {"tp": 2}}, "parallel"),
        ({"objective": {"reward": "exact_match"}}, "parameter 'answer', but the records have the columns level"),
    ],
)
def test_errors(sections: dict[str, Any], message: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match=message):
        build_trainer(base, tmp_path / "run", **sections)
    assert not (tmp_path / "run").exists()


def test_show_data(base: Path, run_cli: CliRunner, tmp_path: Path) -> None:
    code = base.parent / "code"
    reward = f"objective.reward={code / 'rewards.py'}:digits"
    arguments = ("train", "grpo", "--base", base, "--data", code / "prompts.jsonl", "--set", reward, "--show-data")
    output = run_cli(*arguments, "--set", "objective.max_new_tokens=8")
    assert "columns for rewards: level" in output
    assert "example 3 of 3:" in output
    assert "--set objective.reward=" in run_cli("train", "grpo", "--base", base, "--data", code, code=2)
