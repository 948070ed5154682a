"""Preference learning on two ranks equals a single process."""

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


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tokenizer = byte_tokenizer()
    config = ct.config("tiny-llama").replace(vocab_size=tokenizer.vocab_size)
    ct.save(ct.build(config, seed=0), tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    return tmp_path / "base"


def read_rows(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "layer_stats" not in row]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "adapter", "dp_shard"),
    [
        ("kto", True, 1),
        *(
            pytest.param(kind, adapter, dp_shard, marks=pytest.mark.nightly)
            for kind in ("dpo", "kto", "orpo")
            for adapter, dp_shard in ((True, 1), (False, 1), (False, 2))
            if (kind, adapter) != ("kto", True)
        ),
    ],
)
def test_two_ranks_equal_a_single_process(
    kind: str, adapter: bool, dp_shard: int, base: Path, run: RunJob, tmp_path: Path
) -> None:
    """Uneven batches: ranks have two and three pairs. The reference model exists on each rank."""
    pairs = [
        {"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": " I do not know" * (1 + n % 3)} for n in range(30)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    recipe = {
        "model": {"checkpoint": str(base)} | ({"adapter": {"rank": 4}} if adapter else {}),
        "data": {"sources": [{"path": str(tmp_path / "pairs.jsonl")}], "seq_len": 64, "validation_split": 0.2},
        "objective": {"kind": kind},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.0},
        "schedule": {"warmup_steps": 1},
        "training": {"max_steps": 3, "batch_size": 5, "grad_accum_steps": 2, "preflight": False},
        "parallel": {"dp_shard": dp_shard},
        "eval": {"interval": 2, "num_sequences": 5, "general_text": ""},
        "checkpoint": {"interval": 3},
    }
    single = recipe | {"parallel": {}}
    assert run(1, recipe=single, run=str(tmp_path / "one")) == [0]
    output = [tmp_path / f"two.{rank}.txt" for rank in range(2)]
    exit_codes = run(2, recipe=recipe, run=str(tmp_path / "two"))
    assert exit_codes == [0, 0], "".join(file.read_text() for file in output)
    one, two = read_rows(tmp_path / "one"), read_rows(tmp_path / "two")
    assert len(one) == len(two) > 3
    for expected, row in zip(one, two, strict=True):
        assert row == pytest.approx(expected, abs=1e-5, rel=1e-4), expected
    assert one[-1]["eval_rewards/margins"] != one[0]["eval_rewards/margins"]
    [file] = (tmp_path / "one" / "model").glob("*model*.safetensors")
    for name, tensor in load_file(file).items():
        other = load_file(tmp_path / "two" / "model" / file.name)[name]
        torch.testing.assert_close(other, tensor, rtol=1e-4, atol=1e-5)
