"""Distributed training equals a single process: losses, gradients, checkpoints and data order."""

import hashlib
import json
import os
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
from cutaway.train.checkpoint.run_lock import RunLock
from cutaway.train.trainer.launch import resume

TEXT = [f"{a} and {b} make {a + b}\n" for a in range(40) for b in range(12)]
RunJob = Callable[..., list[int]]


@pytest.fixture
def build_recipe(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    texts = tmp_path / "texts"
    texts.mkdir()
    for start in range(0, len(TEXT), 12):
        (texts / f"{start:03}.txt").write_text("".join(TEXT[start : start + 12 - start % 5]))
    sums = [json.dumps({"text": f"{a}+{b}", "target": f"{a + b}"}) for a in range(20) for b in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(sums))

    def build(model: Any = "tiny-gpt", **sections: Any) -> dict[str, Any]:
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
            config = tmp_path / "tokenizer" / "tokenizer_config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"mask_token": "<mask>"}))
            recipe["data"]["tokenizer"] = {"kind": "pretrained", "path": str(tmp_path / "tokenizer")}
        for name, value in sections.items():
            recipe[name] = {**recipe.get(name, {}), **value} if isinstance(value, dict) else value
        return recipe

    return build


def read_rows(run: Path) -> list[dict[str, Any]]:
    """Metrics of steps and evaluations, without layer statistics, which need full layers on a rank."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "layer_stats" not in row]


def output(run: Path, world_size: int = 2) -> str:
    return "".join(Path(f"{run}.{rank}.txt").read_text() for rank in range(world_size))


def assert_equal_rows(one: Path, two: Path) -> None:
    expected_rows, rows = read_rows(one), read_rows(two)
    assert len(expected_rows) == len(rows) > 0
    for expected, row in zip(expected_rows, rows, strict=True):
        assert expected.keys() == row.keys()
        for key, value in expected.items():
            is_close = value if isinstance(value, str) else pytest.approx(value, abs=1e-6, rel=1e-6)
            assert row[key] == is_close, (key, expected, row)


PARALLELISM = {
    "ddp": (2, {}),
    "grad-accum": (2, {"training": {"grad_accum_steps": 2}}),
    "fsdp": (2, {"parallel": {"dp_shard": 2}, "training": {"grad_accum_steps": 2}}),
    "tp": (2, {"parallel": {"tp": 2}}),
    "three-ranks": (3, {"parallel": {"dp_shard": "all"}, "training": {"batch_size": 2}}),
    "activation-checkpointing": (
        2,
        {"parallel": {"dp_shard": "all"}, "training": {"activation_checkpointing": "full"}},
    ),
    "fsdp-tp": (4, {"parallel": {"dp_shard": 2, "tp": 2}}),
    "ddp-tp": (4, {"parallel": {"tp": 2}}),
    "hsdp": (4, {"parallel": {"dp_shard": 2}}),
}
NOT_NIGHTLY = {("tiny-gpt", kind) for kind in ("ddp", "grad-accum", "fsdp", "tp", "three-ranks")} | {
    (model, kind) for model in ("tiny-llama", "tiny-bert") for kind in ("fsdp", "tp")
}
NOT_NIGHTLY |= {("tiny-bert", "ddp"), ("sinks", "tp")}
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
        for kind in PARALLELISM:
            nightly = () if (model, kind) in NOT_NIGHTLY else (pytest.mark.nightly,)
            yield pytest.param(model, kind, marks=nightly, id=f"{model}-{kind}")


def config_with_sinks() -> dict[str, Any]:
    """All per-head parameters: sinks, gains, biases; and ALiBi."""
    config = ct.config("tiny-llama").model_dump(mode="json")
    config["decoder"]["block"][0]["attention"] |= {
        "sink": True,
        "bias": ["q", "k", "v", "o"],
        "qk_norm": {"norm": {"kind": "rmsnorm"}, "over": "head", "gain_per_head": True},
        "position": {"kind": "alibi"},
    }
    return config


VOCAB_SIZE = {"vocab_size": 300}  # at least that of each tokenizer; the other ids are padding
CUSTOM_CONFIGS = {
    "sinks": config_with_sinks() | VOCAB_SIZE,
    "albert": ct.config("tiny-albert").model_dump(mode="json")
    | {"head": ct.config("tiny-bert").head.model_dump()}
    | VOCAB_SIZE,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "kind"), list(cases()))
def test_step_equals_single_process(model: str, kind: str, run: RunJob, build_recipe: Any, tmp_path: Path) -> None:
    """Loss, gradients and gradient norm; batches are not divisible, and documents end anywhere."""
    world_size, sections = PARALLELISM[kind]
    recipe = build_recipe(CUSTOM_CONFIGS.get(model, model), **sections)
    for count, name in ((1, "one"), (world_size, "many")):
        job = {"recipe": recipe, "run": str(tmp_path / name), "gradients": str(tmp_path / f"{name}.safetensors")}
        assert run(count, **job) == [0] * count, output(tmp_path / name, count)
    one, many = (load_file(tmp_path / f"{name}.safetensors") for name in ("one", "many"))
    assert one.keys() == many.keys()
    torch.testing.assert_close(many["row"], one["row"], rtol=2e-6, atol=1e-6)
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_float8_step_is_close_to_a_single_process(kind: str, run: RunJob, build_recipe: Any, tmp_path: Path) -> None:
    """The scales of activations are those of a rank's sequences, so the rounding to fp8 differs, but not its size."""
    world_size, sections = PARALLELISM[kind]
    precisions: dict[str, Any] = {
        "bf16": {"precision": "bf16"},
        "float8": {"precision": "float8", "float8": {"emulate": True}},
    }
    gradients = {}
    for count, precision in ((1, "bf16"), (1, "float8"), (world_size, "float8")):
        name = f"{precision} {count}"
        recipe = build_recipe("tiny-llama", **sections)
        recipe["training"] |= precisions[precision]
        job = {"recipe": recipe, "run": str(tmp_path / name), "gradients": str(tmp_path / f"{name}.safetensors")}
        assert run(count, **job) == [0] * count, output(tmp_path / name, count)
        gradients[name] = load_file(tmp_path / f"{name}.safetensors")
    reference, one, many = gradients.values()
    assert float(many["row"][0]) == pytest.approx(float(reference["row"][0]), rel=1e-3)
    for name in one:
        error = (one[name] - reference[name]).norm()
        assert 0 < (many[name] - reference[name]).norm() < 2 * error, name


def final_state(run: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the last checkpoint."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    return {
        f"{file.name}/{name}": tensor
        for file in newest.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def digest(run: Path) -> str:
    """Hash of metrics log, last checkpoint and exported model."""
    files = [run / "metrics.jsonl", *sorted((run / "model").glob("*.safetensors"))]
    files += sorted(sorted((run / "checkpoints").iterdir())[-1].glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp", pytest.param("fsdp-tp", marks=pytest.mark.nightly)])
def test_training_equals_single_process(kind: str, run: RunJob, build_recipe: Any, tmp_path: Path) -> None:
    world_size, sections = PARALLELISM[kind]
    recipe = build_recipe(**sections | {"eval": {"sample_prompt": "1 and"}})
    for count, name in ((1, "one"), (world_size, "many")):
        assert run(count, recipe=recipe, run=str(tmp_path / name)) == [0] * count, output(tmp_path / name, count)
    assert_equal_rows(tmp_path / "one", tmp_path / "many")
    one, many = final_state(tmp_path / "one"), final_state(tmp_path / "many")
    assert one.keys() == many.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(many[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: name + text)
    assert ct.load(tmp_path / "many").tokenizer is not None


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_world_size_can_change_on_resume(kind: str, run: RunJob, build_recipe: Any, tmp_path: Path) -> None:
    """Two ranks, then one, then two. One of two gets a stop request: both stop at the same step."""
    recipe = build_recipe(**PARALLELISM[kind][1] | {"training": {"max_steps": 6, "batch_size": 5}})
    assert run(1, recipe=recipe, run=str(tmp_path / "one")) == [0]
    job = {"recipe": recipe, "run": str(tmp_path / "run")}
    assert run(2, **job, stop=[1, 2]) == [0, 0], output(tmp_path / "run")
    assert [row["step"] for row in read_rows(tmp_path / "run")][-1] == 3
    assert run(1, **job, resume=True, stop=[0, 3]) == [0], output(tmp_path / "run")
    assert run(2, **job, resume=True) == [0, 0], output(tmp_path / "run")
    assert_equal_rows(tmp_path / "one", tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "rank"), [("ddp", 1), ("fsdp", 0), ("tp", 1)])
def test_killed_rank_stops_the_others(kind: str, rank: int, run: RunJob, build_recipe: Any, tmp_path: Path) -> None:
    """The other rank fails with a message; the resumed run equals an uninterrupted one, and only one may resume it."""
    recipe = build_recipe(**PARALLELISM[kind][1])
    expected = tmp_path / "expected"
    assert run(2, recipe=recipe, run=str(expected)) == [0, 0], output(expected)
    job = {"recipe": recipe, "run": str(tmp_path / "run"), "environment": {"CUTAWAY_DIST_TIMEOUT": "20"}}
    exit_codes = run(2, **job, failpoints={str(rank): "after-step:3"})
    assert exit_codes[rank] == -signal.SIGKILL
    assert exit_codes[1 - rank] == 2, output(tmp_path / "run")
    assert "another process failed" in output(tmp_path / "run")
    with RunLock(tmp_path / "run"):  # the main process is refused, and the other one ends without a message of its own
        assert run(2, **job, resume=True) == [2, 1], output(tmp_path / "run")
    assert f"is being trained by process {os.getpid()}, " in output(tmp_path / "run")
    assert run(2, **job, resume=True) == [0, 0], output(tmp_path / "run")
    assert digest(tmp_path / "run") == digest(expected)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_full_disk_does_not_stop_training(kind: str, run: RunJob, build_recipe: Any, tmp_path: Path) -> None:
    """The main process cannot write; the other ranks still take part in gathering, and training continues."""
    recipe = build_recipe(**PARALLELISM[kind][1])
    assert run(2, recipe=recipe, run=str(tmp_path / "run"), disk_full=True) == [0, 0], output(tmp_path / "run")
    assert read_rows(tmp_path / "run")[-1]["step"] == 4
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ("tiny-gpt", {"parallel": {"dp_shard": 3}}, "2 processes are not a multiple of parallel.dp_shard = 3"),
        ("tiny-moe", {"parallel": {"tp": 2}}, "tensor parallelism does not support a mixture of experts"),
        ("tiny-mla", {"parallel": {"tp": 2}}, "tensor parallelism does not support latent attention"),
        (
            "tiny-gpt",
            {"parallel": {"dp_shard": 2}, "optimizer": {"kind": "muon"}},
            "optimizer.kind = 'muon' needs full matrices",
        ),
        ("tiny-gpt", {"data": {"seq_len": 4000}}, "use more text, or lower seq_len"),
    ],
)
def test_errors_are_reported_once(
    model: str, sections: dict[str, Any], message: str, run: RunJob, build_recipe: Any, tmp_path: Path
) -> None:
    exit_codes = run(2, recipe=build_recipe(model, **sections), run=str(tmp_path / "run"))
    assert sorted(exit_codes) == [1, 2], output(tmp_path / "run")
    assert output(tmp_path / "run").count("\n") == 1
    assert message in output(tmp_path / "run")


@pytest.mark.nightly
def test_fsdp_in_bf16_is_close_to_single_process(run: RunJob, build_recipe: Any, tmp_path: Path) -> None:
    """FSDP gathers weights in bf16, where a single process casts them for each product."""
    recipe = build_recipe(
        "tiny-llama", parallel={"dp_shard": "all"}, training={"max_steps": 4, "batch_size": 5, "precision": "bf16"}
    )
    for count, name in ((1, "one"), (2, "many")):
        assert run(count, recipe=recipe, run=str(tmp_path / name)) == [0] * count, output(tmp_path / name, count)
    losses = [[row["loss"] for row in read_rows(tmp_path / name) if "loss" in row] for name in ("one", "many")]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


@pytest.mark.unchecked
@pytest.mark.nightly
def test_torchrun(build_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line only the main process prints; a single process can resume a run of two."""
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "recipe.json").write_text(json.dumps(build_recipe(parallel={"dp_shard": "all"})))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "cutaway", "train"]
    options = ["--device", "cpu", "--json", "--out", str(tmp_path / "run"), "--set", "checkpoint.interval=3"]
    result = subprocess.run(
        [sys.executable, *command, str(tmp_path / "recipe.json"), *options], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert rows[-1]["done"]
    for directory in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        shutil.rmtree(directory)
    resume(tmp_path / "run", device="cpu")
    assert [row["step"] for row in read_rows(tmp_path / "run") if "loss" in row] == [1, 2, 3, 4]
