"""Several processes that train one model do what one does: losses, gradients, checkpoints, and order of the data."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cutaway.train.ranks import ALONE

TEXT = [f"{a} and {b} make {a + b}\n" for a in range(40) for b in range(12)]
LLAMA: dict[str, Any] = {
    "form": "decoder",
    "d_model": 32,
    "decoder": {
        "layers": 2,
        "norm": {"kind": "rms"},
        "block": {
            "attention": {"heads": 4, "kv_heads": 2, "position": {"kind": "rope"}},
            "ffn": {"kind": "gated", "hidden": 44},
        },
    },
    "head": {"tied": False},
}
Run = Callable[..., list[int]]


@pytest.fixture(scope="module")
def driver() -> Iterator["subprocess.Popen[str]"]:
    script = Path(__file__).with_name("rank_runs.py")
    with subprocess.Popen([sys.executable, str(script)], stdin=-1, stdout=-1, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def run(driver: "subprocess.Popen[str]", tmp_path: Path) -> Run:
    def carry_out(world: int, **job: Any) -> list[int]:
        job["environment"] = {"CUTAWAY_CACHE": str(tmp_path / "cache")} | job.get("environment", {})
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.write(json.dumps({"world": world} | job) + "\n")
        driver.stdin.flush()
        answer = json.loads(driver.stdout.readline())
        if os.environ.get("SHOW_TIMES"):
            print(world, answer, file=sys.stderr)
        return answer["codes"]

    return carry_out


@pytest.fixture
def how(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    texts = tmp_path / "texts"
    texts.mkdir()
    for place in range(0, len(TEXT), 12):
        (texts / f"{place:03}.txt").write_text("".join(TEXT[place : place + 12 - place % 5]))
    sums = [json.dumps({"text": f"{a}+{b}", "target": f"{a + b}"}) for a in range(20) for b in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(sums))

    def made(model: Any = "tiny-gpt", **changes: Any) -> dict[str, Any]:
        recipe: dict[str, Any] = {
            "model": model,
            "data": {"length": 24, "validation": 0.2, "sources": [{"path": str(texts)}]},
            "optimiser": {"rate": 3e-3},
            "schedule": {"warmup": 2},
            "training": {"steps": 4, "batch": 5},
            "watching": {"every": 3, "sequences": 7},
            "saving": {"every": 2},
        }
        if model == "tiny-t5":
            recipe["data"]["sources"] = [{"path": str(tmp_path / "sums.jsonl"), "target": "target"}]
            recipe["objective"] = {"kind": "seq2seq", "smoothing": 0.1, "z": 1e-3}
        if model == "tiny-bert":
            recipe["objective"] = {"kind": "masked"}
            recipe["data"]["tokenizer"] = {"kind": "bpe", "vocab_size": 300}
        for name, value in changes.items():
            recipe[name] = {**recipe.get(name, {}), **value} if isinstance(value, dict) else value
        return recipe

    return made


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def said(run: Path, world: int = 2) -> str:
    return "".join(Path(f"{run}.{rank}.txt").read_text() for rank in range(world))


def assert_same_rows(one: Path, two: Path) -> None:
    ours, theirs = rows(one), rows(two)
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for key in mine:
            assert other[key] == pytest.approx(mine[key], abs=2e-6, rel=2e-6), (key, mine, other)


WAYS = {
    "ddp": (2, {}),
    "pieces": (2, {"training": {"pieces": 2}}),
    "fsdp": (2, {"parallel": {"shards": 2}, "training": {"pieces": 2}}),
    "tensor": (2, {"parallel": {"tensor": 2}}),
    "three": (3, {"parallel": {"shards": "all"}, "training": {"batch": 2}}),
    "recompute": (2, {"parallel": {"shards": "all"}, "training": {"recompute": "full"}}),
    "both": (4, {"parallel": {"shards": 2, "tensor": 2}}),
    "copies-tensor": (4, {"parallel": {"tensor": 2}}),
    "copies-shards": (4, {"parallel": {"shards": 2}}),
}
FEW = {("tiny-gpt", way) for way in ("ddp", "pieces", "fsdp", "tensor", "three")} | {
    (model, way) for model in ("llama", "tiny-t5", "tiny-bert") for way in ("ddp", "fsdp", "tensor")
}


def cases() -> Iterator[Any]:
    for model in ("tiny-gpt", "llama", "tiny-t5", "tiny-bert"):
        for way in WAYS:
            nightly = () if (model, way) in FEW else (pytest.mark.nightly,)
            yield pytest.param(model, way, marks=nightly, id=f"{model}-{way}")


@pytest.mark.parametrize(("model", "way"), list(cases()))
def test_ranks_make_the_step_of_one(model: str, way: str, run: Run, how: Any, tmp_path: Path) -> None:
    """Loss, gradients and their length; batches do not divide, and documents end anywhere."""
    world, changes = WAYS[way]
    recipe = how(LLAMA if model == "llama" else model, **changes)
    for count, name in ((1, "one"), (world, "many")):
        job = {"source": recipe, "run": str(tmp_path / name), "gradients": str(tmp_path / f"{name}.safetensors")}
        assert run(count, **job) == [0] * count, said(tmp_path / name, count)
    one, many = (load_file(tmp_path / f"{name}.safetensors") for name in ("one", "many"))
    assert one.keys() == many.keys()
    torch.testing.assert_close(many["row"], one["row"], rtol=2e-6, atol=1e-6)
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)
