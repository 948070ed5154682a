"""GRPO on two ranks, which share the prompts of a step, equals a single process."""

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
REWARD = "def letters(completions):\n    return [sum(map(str.isalpha, text)) for text in completions]\n"


def read_rows(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name != "sample"} for row in rows if "layer_stats" not in row]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "objective",
    [
        {"scale_rewards": "batch", "loss_type": "grpo"},
        {"beta": 0.1},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ],
)
def test_two_ranks_equal_a_single_process(objective: dict[str, Any], run: RunJob, tmp_path: Path) -> None:
    """Uneven batches: ranks have two and three prompts."""
    tokenizer = byte_tokenizer()
    config = ct.config("tiny-llama").replace(vocab_size=tokenizer.vocab_size)
    ct.save(ct.build(config, seed=0), tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "rewards.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n} + 1 ="}) for n in range(30)))
    reward = f"{tmp_path / 'code' / 'rewards.py'}:letters"
    recipe = {
        "model": {"checkpoint": str(tmp_path / "base"), "adapter": {"rank": 4}},
        "data": {"sources": [{"path": str(tmp_path / "prompts.jsonl")}], "seq_len": 32, "validation_split": 0.2},
        "objective": {"kind": "grpo", "reward": reward, "num_generations": 4, "max_new_tokens": 5, **objective},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.0},
        "schedule": {"warmup_steps": 1},
        "training": {"max_steps": 3, "batch_size": 5, "grad_accum_steps": 2, "preflight": False},
        "eval": {"interval": 2, "num_sequences": 5, "general_text": ""},
        "checkpoint": {"interval": 3},
    }
    assert run(1, recipe=recipe, run=str(tmp_path / "one")) == [0]
    output = [tmp_path / f"two.{rank}.txt" for rank in range(2)]
    exit_codes = run(2, recipe=recipe, run=str(tmp_path / "two"))
    assert exit_codes == [0, 0], "".join(file.read_text() for file in output)
    one, two = read_rows(tmp_path / "one"), read_rows(tmp_path / "two")
    assert len(one) == len(two) > 3
    for expected, row in zip(one, two, strict=True):
        assert row == pytest.approx(expected, abs=1e-5, rel=1e-4), expected
    [file] = (tmp_path / "one" / "model").glob("*model*.safetensors")
    for name, tensor in load_file(file).items():
        other = load_file(tmp_path / "two" / "model" / file.name)[name]
        torch.testing.assert_close(other, tensor, rtol=1e-4, atol=1e-5)
