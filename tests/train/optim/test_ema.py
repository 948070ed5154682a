"""The running mean of the weights: what a plain loop makes of them, looked at, exported, and the same after a stop."""

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
from cutaway.train.trainer.launch import prepare_trainer, resume, resume_trainer, train
from cutaway.train.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("skip_preflight")

DECAY = 0.6


@pytest.fixture
def how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return tiny_recipe(
        tmp_path / "text.txt", training={"ema_decay": DECAY, "max_steps": 25}, eval={"sample_prompt": "1"}
    )


def followed(trainer: Trainer) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """A mean in 64 bits, one weight after another, beside the trainer's; and the weights after each step."""
    means: dict[str, Tensor] = {}
    every: list[dict[str, Tensor]] = []
    plain = trainer.train_step_runner.run

    def step(number: int, **kwargs: Any) -> dict[str, Any]:
        row = plain(number)
        every.append({name: p.detach().double().clone() for name, p in trainer.model.named_parameters()})
        kept = min(DECAY, number / (number + 9))
        for name, weight in every[-1].items():
            means[name] = kept * means[name] + (1 - kept) * weight if number else weight
        return row

    trainer.train_step_runner.run = step  # type: ignore[method-assign]
    return means, every


def test_it_is_a_plain_loops(how: dict[str, Any], tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(how), tmp_path / "run", device="cpu")
    means, every = followed(trainer)
    looked: list[dict[str, Tensor]] = []
    plain = trainer.evaluate

    def look() -> None:
        looked.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
        plain()

    trainer.evaluate = look  # type: ignore[method-assign]
    trainer.train()
    assert trainer.ema is not None
    exported = ct.load(trainer.run_directory.directory).model
    saved = trainer.checkpoint_manager.load_latest(log=print)
    assert saved is not None
    for name, mean in means.items():
        if not name.endswith("k.bias"):  # which softmax does not see, so that it hardly moves
            assert not torch.allclose(mean, every[-1][name], atol=1e-5), name
        for found in (trainer.ema.averages, looked[-1], dict(exported.named_parameters()), saved.tensor_groups["ema"]):
            torch.testing.assert_close(found[name].double(), mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(trainer.model.get_parameter(name).double(), every[-1][name])
        assert torch.equal(saved.tensor_groups["model"][name].double(), every[-1][name])


def test_training_itself_does_not_notice(how: dict[str, Any], tmp_path: Path) -> None:
    with_mean = train(how, tmp_path / "with", device="cpu")
    without = train(how | {"training": how["training"] | {"ema_decay": None}}, tmp_path / "without", device="cpu")
    rows = [
        [row for row in map(json.loads, (run.directory / "metrics.jsonl").open()) if "loss" in row]
        for run in (with_mean, without)
    ]
    assert rows[0] == rows[1]


def test_a_run_that_was_stopped_goes_on_to_the_same_mean(how: dict[str, Any], tmp_path: Path) -> None:
    whole = train(how, tmp_path / "whole", device="cpu")
    trainer = prepare_trainer(load_recipe(how), tmp_path / "run", device="cpu")
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 11 else None
    trainer.train()
    assert trainer.ema is not None
    again = resume_trainer(tmp_path / "run", device="cpu")
    assert again.ema is not None
    assert all(torch.equal(again.ema.averages[name], mean) for name, mean in trainer.ema.averages.items())
    resume(tmp_path / "run", device="cpu")
    assert run_digest(tmp_path / "run") == run_digest(whole.directory)


def test_the_weights_come_back_after_an_error(how: dict[str, Any], tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(how), tmp_path / "run", device="cpu")
    trainer.train_step(0)
    trainer.train_step(1)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    def interrupted() -> None:
        with trainer.averaged_weights():
            assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_shards_that_were_gathered_are_gathered_anew(tmp_path: Path) -> None:
    """FSDP keeps the outermost weights whole after a look; they must not be the mean when training goes on."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        average, x = WeightEMA(model, DECAY), torch.ones(1, 4)
        with torch.no_grad():
            for number in range(3):
                for weight in model.parameters():
                    weight.mul_(1.5)
                average.update(number)
            with average.averaged_weights():
                mean = model(x)
            last = model(x)
            assert not torch.allclose(mean, last)
            with average.averaged_weights():
                assert torch.equal(model(x), mean)
            assert torch.equal(model(x), last)
    finally:
        dist.destroy_process_group()
