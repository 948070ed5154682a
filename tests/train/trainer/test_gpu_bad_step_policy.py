"""Step policy on a GPU: no synchronization, and retries after a real out-of-memory error."""

from pathlib import Path

import pytest
import torch
from support.tiny_runs import read_metrics, tiny_recipe_in

from cutaway.train.logging.callbacks import Callback
from cutaway.train.trainer.bad_step_policy import BadStepPolicy
from cutaway.train.trainer.launch import train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("skip_preflight")]


def test_check_grad_norm_does_not_synchronize() -> None:
    policy, grad_norm = BadStepPolicy(1, device="cuda"), torch.ones((), device="cuda")
    policy.check_grad_norm(grad_norm)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            policy.check_grad_norm(grad_norm)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_out_of_memory_retries_with_smaller_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    training = {"batch_size": 4096, "max_steps": 2}
    evaluation = {"interval": 100, "num_sequences": 1}
    train(
        tiny_recipe_in(tmp_path, training=training | {"grad_accum_steps": 4}, eval=evaluation),
        tmp_path / "expected",
        device="cuda",
    )
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    messages: list[str] = []
    torch.cuda.set_per_process_memory_fraction(1.2 * peak / total)
    try:
        train(
            tiny_recipe_in(tmp_path, training=training, eval=evaluation),
            tmp_path / "run",
            device="cuda",
            callback=Callback(on_message=messages.append),
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("out of memory with 1 micro-batches per step" in message for message in messages)
    losses = [[row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("run", "expected")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
