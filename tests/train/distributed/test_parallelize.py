"""Several processes that train one model do what one does: losses, gradients, checkpoints, and order of the data."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cutaway as ct
from cutaway.tokenizer import train_bpe
from cutaway.train.trainer.launch import resume

TEXT = [f"{a} and {b} make {a + b}\n" for a in range(40) for b in range(12)]
Run = Callable[..., list[int]]


@pytest.fixture(scope="module")
def driver() -> Iterator["subprocess.Popen[str]"]:
    script = Path(__file__).parents[2] / "support" / "multiprocess_runner.py"
    with subprocess.Popen([sys.executable, str(script)], stdin=-1, stdout=-1, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def run(driver: "subprocess.Popen[str]", tmp_path: Path) -> Run:
    def run_job(world_size: int, **job: Any) -> list[int]:
        job["environment"] = {"CUTAWAY_CACHE": str(tmp_path / "cache")} | job.get("environment", {})
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.write(json.dumps({"world_size": world_size} | job) + "\n")
        driver.stdin.flush()
        answer: list[int] = json.loads(driver.stdout.readline())
        return answer

    return run_job


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
            "data": {"seq_len": 24, "validation_split": 0.2, "sources": [{"path": str(texts)}]},
            "optimizer": {"lr": 3e-3},
            "schedule": {"warmup_steps": 2},
            "training": {"max_steps": 4, "batch_size": 5},
            "eval": {"interval": 3, "num_sequences": 7},
            "checkpoint": {"interval": 2},
        }
        if ct.config(model).form == "encoder-decoder":
            recipe["data"]["sources"] = [{"path": str(tmp_path / "sums.jsonl"), "target_column": "target"}]
            recipe["objective"] = {"kind": "seq2seq", "label_smoothing": 0.1, "z_loss_coef": 1e-3}
        if ct.config(model).form == "encoder":
            recipe["objective"] = {"kind": "masked-lm"}
            train_bpe(TEXT, 300, special_tokens=("<eos>", "<pad>", "<mask>")).save(tmp_path / "tokenizer")
            settings = tmp_path / "tokenizer" / "tokenizer_config.json"
            settings.write_text(json.dumps(json.loads(settings.read_text()) | {"mask_token": "<mask>"}))
            recipe["data"]["tokenizer"] = {"kind": "pretrained", "path": str(tmp_path / "tokenizer")}
        for name, value in changes.items():
            recipe[name] = {**recipe.get(name, {}), **value} if isinstance(value, dict) else value
        return recipe

    return made


def rows(run: Path) -> list[dict[str, Any]]:
    """What steps and looks told; readings of layers are for ranks that have whole ones."""
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in every if "layer_stats" not in row]


def said(run: Path, world: int = 2) -> str:
    return "".join(Path(f"{run}.{rank}.txt").read_text() for rank in range(world))


def assert_same_rows(one: Path, two: Path) -> None:
    ours, theirs = rows(one), rows(two)
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for key in mine:
            same = mine[key] if isinstance(mine[key], str) else pytest.approx(mine[key], abs=1e-6, rel=1e-6)
            assert other[key] == same, (key, mine, other)


WAYS = {
    "ddp": (2, {}),
    "grad-accum": (2, {"training": {"grad_accum_steps": 2}}),
    "fsdp": (2, {"parallel": {"dp_shard": 2}, "training": {"grad_accum_steps": 2}}),
    "tp": (2, {"parallel": {"tp": 2}}),
    "three": (3, {"parallel": {"dp_shard": "all"}, "training": {"batch_size": 2}}),
    "activation-checkpointing": (
        2,
        {"parallel": {"dp_shard": "all"}, "training": {"activation_checkpointing": "full"}},
    ),
    "fsdp-tp": (4, {"parallel": {"dp_shard": 2, "tp": 2}}),
    "ddp-tp": (4, {"parallel": {"tp": 2}}),
    "hsdp": (4, {"parallel": {"dp_shard": 2}}),
}
FEW = {("tiny-gpt", way) for way in ("ddp", "grad-accum", "fsdp", "tp", "three")} | {
    (model, way) for model in ("tiny-llama", "tiny-bert") for way in ("fsdp", "tp")
}
FEW |= {("tiny-bert", "ddp"), ("sinks", "tp")}
MODELS = (
    "tiny-gpt",
    "tiny-llama",
    "tiny-t5",
    "tiny-bert",
    "tiny-gemma",
    "albert",
    "tiny-modernbert",
    "tiny-bart",
    "sinks",
)


def cases() -> Iterator[Any]:
    for model in MODELS:
        for way in WAYS:
            nightly = () if (model, way) in FEW else (pytest.mark.nightly,)
            yield pytest.param(model, way, marks=nightly, id=f"{model}-{way}")


def with_sinks() -> dict[str, Any]:
    """Every parameter that belongs to a head: sinks, gains, biases; and ALiBi."""
    config = ct.config("tiny-llama").model_dump(mode="json")
    config["decoder"]["block"][0]["attention"] |= {
        "sink": True,
        "bias": ["q", "k", "v", "o"],
        "qk_norm": {"norm": {"kind": "rmsnorm"}, "over": "head", "gain_per_head": True},
        "position": {"kind": "alibi"},
    }
    return config


MADE = {
    "sinks": with_sinks(),
    "albert": ct.config("tiny-albert").model_dump(mode="json") | {"head": ct.config("tiny-bert").head.model_dump()},
}


@pytest.mark.parametrize(("model", "way"), list(cases()))
def test_ranks_make_the_step_of_one(model: str, way: str, run: Run, how: Any, tmp_path: Path) -> None:
    """Loss, gradients and their length; batches do not divide, and documents end anywhere."""
    world, changes = WAYS[way]
    recipe = how(MADE.get(model, model), **changes)
    for count, name in ((1, "one"), (world, "many")):
        job = {"recipe": recipe, "run": str(tmp_path / name), "gradients": str(tmp_path / f"{name}.safetensors")}
        assert run(count, **job) == [0] * count, said(tmp_path / name, count)
    one, many = (load_file(tmp_path / f"{name}.safetensors") for name in ("one", "many"))
    assert one.keys() == many.keys()
    torch.testing.assert_close(many["row"], one["row"], rtol=2e-6, atol=1e-6)
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)


def state(run: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer at the end."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    return {
        f"{file.name}/{name}": each for file in newest.glob("*.safetensors") for name, each in load_file(file).items()
    }


def digest(run: Path) -> str:
    """The log, the weights, the optimizer and the model that was made, as one hash."""
    files = [run / "metrics.jsonl", *sorted((run / "model").glob("*.safetensors"))]
    files += sorted(sorted((run / "checkpoints").iterdir())[-1].glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@pytest.mark.parametrize("way", ["ddp", "fsdp", "tp", pytest.param("fsdp-tp", marks=pytest.mark.nightly)])
def test_ranks_train_as_one(way: str, run: Run, how: Any, tmp_path: Path) -> None:
    world, changes = WAYS[way]
    recipe = how(**changes | {"eval": {"sample_prompt": "1 and"}})
    for count, name in ((1, "one"), (world, "many")):
        assert run(count, recipe=recipe, run=str(tmp_path / name)) == [0] * count, said(tmp_path / name, count)
    assert_same_rows(tmp_path / "one", tmp_path / "many")
    ours, theirs = state(tmp_path / "one"), state(tmp_path / "many")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: name + text)
    assert ct.load(tmp_path / "many").tokenizer is not None


@pytest.mark.parametrize("way", ["ddp", "fsdp", "tp"])
def test_two_ranks_then_one_then_two(way: str, run: Run, how: Any, tmp_path: Path) -> None:
    """One of the two is asked to stop: both do, at the same step. The order of the data and the losses are one's."""
    recipe = how(**WAYS[way][1] | {"training": {"max_steps": 6, "batch_size": 5}})
    assert run(1, recipe=recipe, run=str(tmp_path / "one")) == [0]
    where = {"recipe": recipe, "run": str(tmp_path / "run")}
    assert run(2, **where, stop=[1, 2]) == [0, 0], said(tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")][-1] == 3
    assert run(1, **where, resume=True, stop=[0, 3]) == [0], said(tmp_path / "run")
    assert run(2, **where, resume=True) == [0, 0], said(tmp_path / "run")
    assert_same_rows(tmp_path / "one", tmp_path / "run")


@pytest.mark.parametrize(("way", "rank"), [("ddp", 1), ("fsdp", 0), ("tp", 1)])
def test_a_rank_is_killed(way: str, rank: int, run: Run, how: Any, tmp_path: Path) -> None:
    """The other stops and says how to go on; they then end where they would have."""
    recipe = how(**WAYS[way][1])
    assert run(2, recipe=recipe, run=str(tmp_path / "whole")) == [0, 0], said(tmp_path / "whole")
    where = {"recipe": recipe, "run": str(tmp_path / "run"), "environment": {"CUTAWAY_DIST_TIMEOUT": "20"}}
    codes = run(2, **where, failpoints={str(rank): "after-step:3"})
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] == 2, said(tmp_path / "run")
    assert "another process is gone" in said(tmp_path / "run")
    assert run(2, **where, resume=True) == [0, 0], said(tmp_path / "run")
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_disk_that_is_full_stops_nobody(way: str, run: Run, how: Any, tmp_path: Path) -> None:
    """The leader cannot write; the others bring their parts all the same, and training goes on."""
    assert run(2, recipe=how(**WAYS[way][1]), run=str(tmp_path / "run"), disk_full=True) == [0, 0], said(
        tmp_path / "run"
    )
    assert rows(tmp_path / "run")[-1]["step"] == 4
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("tiny-gpt", {"parallel": {"dp_shard": 3}}, "2 processes cannot share by parallel.dp_shard = 3"),
        ("tiny-moe", {"parallel": {"tp": 2}}, "a mixture of experts cannot be shared"),
        ("tiny-mla", {"parallel": {"tp": 2}}, "latent attention cannot be shared"),
        ("tiny-gpt", {"parallel": {"dp_shard": 2}, "optimizer": {"kind": "muon"}}, "muon looks at whole matrices"),
        ("tiny-gpt", {"data": {"seq_len": 10**6}}, "give more text, or a smaller seq_len"),
    ],
)
def test_what_cannot_be_is_said_once(
    model: str, changes: dict[str, Any], message: str, run: Run, how: Any, tmp_path: Path
) -> None:
    codes = run(2, recipe=how(model, **changes), run=str(tmp_path / "run"))
    assert sorted(codes) == [1, 2], said(tmp_path / "run")
    assert said(tmp_path / "run").count("\n") == 1
    assert message in said(tmp_path / "run")


def test_shards_in_bf16_are_near_one(run: Run, how: Any, tmp_path: Path) -> None:
    """Sharded weights are gathered narrow, where one rank alone narrows them for each product."""
    recipe = how(
        "tiny-llama", parallel={"dp_shard": "all"}, training={"max_steps": 4, "batch_size": 5, "precision": "bf16"}
    )
    for count, name in ((1, "one"), (2, "many")):
        assert run(count, recipe=recipe, run=str(tmp_path / name)) == [0] * count, said(tmp_path / name, count)
    losses = [[row["loss"] for row in rows(tmp_path / name) if "loss" in row] for name in ("one", "many")]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


@pytest.mark.unchecked
def test_torchrun(how: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line: only the leader speaks; one process goes on with what two have begun."""
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "recipe.json").write_text(json.dumps(how(parallel={"dp_shard": "all"})))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "cutaway", "train"]
    options = ["--device", "cpu", "--json", "--out", str(tmp_path / "run"), "--set", "checkpoint.interval=3"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "recipe.json"), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["step"] for row in told if "loss" in row] == [1, 2, 3, 4]
    assert told[-1]["done"]
    for folder in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        shutil.rmtree(folder)
    resume(tmp_path / "run", device="cpu")
    assert [row["step"] for row in rows(tmp_path / "run") if "loss" in row] == [1, 2, 3, 4]
