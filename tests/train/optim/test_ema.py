"""Weight EMA: equal to a plain loop, evaluated and exported, bit-identical after resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.tiny_runs import TEXT, run_digest, tiny_recipe
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cutaway as ct
from cutaway.train.optim.ema import WeightEMA
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume_trainer, train
from cutaway.train.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("skip_preflight")

DECAY = 0.6


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return tiny_recipe(
        tmp_path / "text.txt", training={"ema_decay": DECAY, "max_steps": 25}, eval={"sample_prompt": "1"}
    )


def record_reference(trainer: Trainer) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Reference averages in fp64, updated with each step of the trainer; and the weights after each step."""
    averages: dict[str, Tensor] = {}
    weights_by_step: list[dict[str, Tensor]] = []
    run_step = trainer.train_step_runner.run

    def run_and_record(step: int, **kwargs: Any) -> dict[str, Any]:
        metrics = run_step(step)
        weights_by_step.append({name: p.detach().double().clone() for name, p in trainer.model.named_parameters()})
        decay = min(DECAY, step / (step + 9))
        for name, weight in weights_by_step[-1].items():
            averages[name] = decay * averages[name] + (1 - decay) * weight if step else weight
        return metrics

    trainer.train_step_runner.run = run_and_record  # type: ignore[method-assign]
    return averages, weights_by_step


def test_ema_equals_a_plain_loop(recipe: dict[str, Any], tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    averages, weights_by_step = record_reference(trainer)
    evaluated: list[dict[str, Tensor]] = []
    evaluate = trainer.evaluate

    def record_and_evaluate() -> bool:
        evaluated.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
        return evaluate()

    trainer.evaluate = record_and_evaluate  # type: ignore[method-assign]
    trainer.train()
    assert trainer.ema is not None
    exported = dict(ct.load(trainer.run_directory.directory).model.named_parameters())
    saved = trainer.checkpoint_manager.load_latest(log=print)
    assert saved is not None
    for name, average in averages.items():
        if not name.endswith("k.bias"):  # softmax is invariant to it, so it hardly changes
            assert not torch.allclose(average, weights_by_step[-1][name], atol=1e-5), name
        for values in (trainer.ema.averages, evaluated[-1], exported, saved.tensor_groups["ema"]):
            torch.testing.assert_close(values[name].double(), average, rtol=1e-5, atol=1e-6)
        assert torch.equal(trainer.model.get_parameter(name).double(), weights_by_step[-1][name])
        assert torch.equal(saved.tensor_groups["model"][name].double(), weights_by_step[-1][name])


def test_ema_does_not_change_training(recipe: dict[str, Any], tmp_path: Path) -> None:
    with_ema = train(recipe, tmp_path / "with", device="cpu")
    without_recipe = recipe | {"training": recipe["training"] | {"ema_decay": None}}
    without_ema = train(without_recipe, tmp_path / "without", device="cpu")
    rows = [
        [row for row in map(json.loads, (run.directory / "metrics.jsonl").open()) if "loss" in row]
        for run in (with_ema, without_ema)
    ]
    assert rows[0] == rows[1]


def test_resumed_run_has_the_same_averages(recipe: dict[str, Any], tmp_path: Path) -> None:
    uninterrupted = train(recipe, tmp_path / "uninterrupted", device="cpu")
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 11 else None
    trainer.train()
    assert trainer.ema is not None
    resumed = resume_trainer(tmp_path / "run", device="cpu")
    assert resumed.ema is not None
    assert all(torch.equal(resumed.ema.averages[name], average) for name, average in trainer.ema.averages.items())
    resumed.train()
    assert run_digest(tmp_path / "run") == run_digest(uninterrupted.directory)


def test_weights_are_restored_after_an_error(recipe: dict[str, Any], tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    trainer.train_step(0)
    trainer.train_step(1)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    def interrupt_evaluation() -> None:
        with trainer.averaged_weights():
            assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt_evaluation()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_fsdp_weights_are_gathered_again_after_the_swap(tmp_path: Path) -> None:
    """FSDP keeps the outermost weights gathered after an evaluation; training must not continue with the averages."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        ema, x = WeightEMA(model, DECAY), torch.ones(1, 4)
        with torch.no_grad():
            for step in range(3):
                for weight in model.parameters():
                    weight.mul_(1.5)
                ema.update(step)
            with ema.averaged_weights():
                with_averages = model(x)
            with_weights = model(x)
            assert not torch.allclose(with_averages, with_weights)
            with ema.averaged_weights():
                assert torch.equal(model(x), with_averages)
            assert torch.equal(model(x), with_weights)
    finally:
        dist.destroy_process_group()
