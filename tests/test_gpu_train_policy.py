"""Policies on a GPU: nobody waits to judge a step, and memory that is really too small means smaller pieces."""

from pathlib import Path

import pytest
import torch
from small_runs import rows_of, small

from cutaway.train.audience import Watcher
from cutaway.train.policy import Policy
from cutaway.train.start import train

pytestmark = pytest.mark.gpu


def test_nobody_waits_to_judge_a_step() -> None:
    policy, length = Policy(1, device="cuda"), torch.ones((), device="cuda")
    policy.judge(length)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            policy.judge(length)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_that_is_too_small_means_smaller_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    how = {"batch": 4096, "steps": 2}
    watching = {"every": 100, "sequences": 1}
    train(small(tmp_path, training=how | {"pieces": 4}, watching=watching), tmp_path / "whole", device="cuda")
    most = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    said: list[str] = []
    torch.cuda.set_per_process_memory_fraction(1.2 * most / total)
    try:
        train(
            small(tmp_path, training=how, watching=watching),
            tmp_path / "run",
            device="cuda",
            watcher=Watcher(say=said.append),
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("memory is too small for a batch in 1 pieces" in each for each in said)
    losses = [[row["loss"] for row in rows_of(tmp_path / name) if "loss" in row] for name in ("run", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
