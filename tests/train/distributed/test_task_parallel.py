"""Training of task heads on two ranks equals a single process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cutaway as ct
from cutaway.tokenizer import byte_tokenizer

RunJob = Callable[..., list[int]]


def read_rows(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "layer_stats" not in row]


@pytest.mark.parametrize(
    ("adapter", "dp_shard"),
    [(False, 1), (True, 1), (False, 2)],
)
@pytest.mark.nightly
def test_two_ranks_equal_a_single_process(adapter: bool, dp_shard: int, run: RunJob, tmp_path: Path) -> None:
    """Uneven batches: ranks have two and three texts of different lengths."""
    tokenizer = byte_tokenizer()
    config = ct.config("tiny-bert").replace(vocab_size=tokenizer.vocab_size)
    ct.save(ct.build(config, seed=0), tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    rows = [{"text": "a b " * (1 + n % 3) + str(n), "label": ("x", "y", "z")[n % 3]} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = {
        "model": {"checkpoint": str(tmp_path / "base")} | ({"adapter": {"rank": 4}} if adapter else {}),
        "data": {"sources": [{"path": str(tmp_path / "rows.jsonl")}], "seq_len": 32, "validation_split": 0.2},
        "objective": {"kind": "classification"},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.0},
        "schedule": {"warmup_steps": 1},
        "training": {"max_steps": 3, "batch_size": 5, "grad_accum_steps": 2},
        "parallel": {"dp_shard": dp_shard},
        "eval": {"interval": 2, "num_sequences": 5},
        "checkpoint": {"interval": 3},
    }
    assert run(1, recipe=recipe | {"parallel": {}}, run=str(tmp_path / "one")) == [0]
    exit_codes = run(2, recipe=recipe, run=str(tmp_path / "two"))
    assert exit_codes == [0, 0], "".join((tmp_path / f"two.{rank}.txt").read_text() for rank in range(2))
    one, two = read_rows(tmp_path / "one"), read_rows(tmp_path / "two")
    assert len(one) == len(two) > 3
    assert "accuracy" in one[-1]
    for expected, row in zip(one, two, strict=True):
        assert row == pytest.approx(expected, abs=1e-5, rel=1e-4), expected
    [file] = (tmp_path / "one" / "model").glob("*model*.safetensors")
    for name, tensor in load_file(file).items():
        other = load_file(tmp_path / "two" / "model" / file.name)[name]
        torch.testing.assert_close(other, tensor, rtol=1e-4, atol=1e-5)
