"""A dry run on shapes ≡ what size says ≡ what is really held: bytes of a rank, and the collectives of a step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from typer.testing import CliRunner

import cutaway as ct
from cutaway.cli import app
from cutaway.errors import InputError
from cutaway.size.shape_pass.loss import CHUNK_TOKENS
from cutaway.train.objectives.objective import causal_lm
from cutaway.train.optim.optimizer import OPTIMIZER_KINDS, build_optimizer
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import Recipe
from cutaway.train.trainer import training_module
from cutaway.train.trainer.dry_run import DryRunReport, MemoryCommTracker, dry_run
from cutaway.train.trainer.memory_check import expected_memory
from cutaway.train.trainer.training_module import TrainingModule

OBJECTIVES = {"tiny-t5": "seq2seq", "tiny-bert": "masked-lm"}
LENGTH = 48


def asked(model: str, *, dp_shard: int | str = 1, tp: int = 1, **training: Any) -> Recipe:
    return load_recipe(
        {
            "model": model,
            "data": {"seq_len": LENGTH},
            "objective": {"kind": OBJECTIVES.get(model, "causal-lm")},
            "training": {"batch_size": 8} | training,
            "parallel": {"dp_shard": dp_shard, "tp": tp},
        }
    )


def same(found: DryRunReport, *, within: float) -> None:
    counted, predicted = found.measured, found.predicted
    for name in ("weights", "gradients", "optimizer", "collectives"):
        assert getattr(counted, name) == getattr(predicted, name), name
    assert predicted.peak_bytes == pytest.approx(counted.peak_bytes, rel=within)


@pytest.mark.parametrize(
    ("world_size", "dp_shard", "tp", "precision", "activation_checkpointing", "dims"),
    [
        (4, "all", 1, "fp32", "none", (1, 4, 1)),
        (2, 1, 2, "fp32", "none", (1, 1, 2)),
        (8, 2, 2, "bf16", "selective", (2, 2, 2)),
        pytest.param(4, 2, 2, "fp32", "none", (1, 2, 2), marks=pytest.mark.nightly),
        pytest.param(4, 1, 2, "bf16", "none", (2, 1, 2), marks=pytest.mark.nightly),
        pytest.param(1, 1, 1, "fp32", "none", (1, 1, 1), marks=pytest.mark.nightly),
    ],
)
def test_a_rank_holds_and_sends_what_size_says(
    world_size: int, dp_shard: Any, tp: int, precision: str, activation_checkpointing: str, dims: tuple[int, ...]
) -> None:
    wanted = asked(
        "tiny-llama",
        dp_shard=dp_shard,
        tp=tp,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
    )
    found = dry_run(wanted, world_size)
    assert (found.devices.dp_replicate, found.devices.dp_shard, found.devices.tp) == dims
    same(found, within=0.01)
    assert not distributed.is_initialized()


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "tp"), [("tiny-gpt", 2), ("tiny-t5", 1), ("tiny-moe", 1), ("tiny-bert", 2)])
def test_other_models_too(model: str, tp: int) -> None:
    same(dry_run(asked(model, dp_shard=2, tp=tp), 2 * tp), within=0.02)


@pytest.mark.nightly
def test_all_is_computed_again() -> None:
    wanted = asked("tiny-llama", dp_shard="all", tp=2, activation_checkpointing="full", precision="bf16")
    same(dry_run(wanted, 4), within=0.05)


@pytest.mark.nightly
def test_pieces_gather_and_scatter_again() -> None:
    one = dry_run(asked("tiny-llama", dp_shard="all"), 4).measured.collectives
    two = dry_run(asked("tiny-llama", dp_shard="all", grad_accum_steps=2), 4)
    assert two.measured.collectives == two.predicted.collectives
    number, size = one["reduce-scatter"]
    assert two.measured.collectives["reduce-scatter"] == (2 * number, 2 * size)


def test_what_cannot_be_rehearsed_is_said() -> None:
    with pytest.raises(InputError, match="--world-size 1"):
        dry_run(asked("tiny-llama"), 4)
    with pytest.raises(InputError, match="start a multiple of 8"):
        dry_run(asked("tiny-llama", dp_shard=4, tp=2), 4)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.toml"
    file.write_text('model = "tiny-llama"\n[training]\nbatch_size = 4\n[data]\nseq_len = 32\n')
    how = ["train", str(file), "--dry-run", "--world-size", "4", "--set", "parallel.dp_shard=all"]
    told = json.loads(CliRunner().invoke(app, [*how, "--json"]).stdout)
    assert told["weights"]["ratio"] == 1.0
    assert told["collectives"]["all-gather"]["count"] == told["collectives"]["all-gather"]["predicted_count"]
    shown = CliRunner().invoke(app, how).stdout
    assert "of 4 (1 dp_replicate × 4 dp_shard × 1 tp)" in shown
    assert "reduce-scatter" in shown
    assert [each.name for each in tmp_path.iterdir()] == ["small.toml"]
    bad = CliRunner().invoke(app, ["train", str(file), "--dry-run"])
    assert isinstance(bad.exception, InputError)


@pytest.mark.nightly
def test_llama_405b_on_1024_ranks() -> None:
    """The bytes of a rank within 5 %, on a machine that could not hold one of its layers."""
    wanted = load_recipe(
        {
            "model": "llama-3.1-405b",
            "data": {"seq_len": 8192, "tokenizer": {"kind": "bpe", "vocab_size": 128256}},
            "training": {"batch_size": 128, "precision": "bf16", "activation_checkpointing": "full"},
            "parallel": {"dp_shard": "all", "tp": 8},
        }
    )
    found = dry_run(wanted, 1024)
    assert found.num_parameters == ct.size("llama-3.1-405b").num_parameters
    same(found, within=0.05)


# ---------------------------------------------------------------------------------------- on real tensors


@pytest.mark.parametrize(
    ("model", "precision", "grad_accum_steps", "packed"),
    [("tiny-llama", "fp32", 1, True), ("tiny-llama", "bf16", 2, True), ("tiny-gpt", "fp32", 1, False)],
)
def test_what_is_expected_is_what_a_step_holds(model: str, precision: str, grad_accum_steps: int, packed: bool) -> None:
    wanted = asked(model, precision=precision, grad_accum_steps=grad_accum_steps, batch_size=16)
    config = ct.config(model)
    with MemoryCommTracker() as tracker:
        real = ct.build(model, seed=0).train()
        asks, optimizer = TrainingModule(real, wanted), build_optimizer("adamw", real, lr=1e-3)
        for _ in range(2):
            tracker.reset_peak()
            optimizer.zero_grad()
            for _ in range(grad_accum_steps):
                tokens = torch.ones((16 // grad_accum_steps, LENGTH + 1), dtype=torch.long)
                documents = (torch.arange(LENGTH + 1) > 20).long().expand_as(tokens) if packed else None
                asks(causal_lm(tokens, documents)).loss.backward()
            optimizer.step()
    about, certain = expected_memory(wanted, config, torch.device("cpu"))
    assert about == pytest.approx(tracker.peak_bytes, rel=0.1)
    assert certain == pytest.approx(tracker.live_bytes, rel=0.02)


@pytest.mark.parametrize("kind", OPTIMIZER_KINDS)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-moe", "tiny-mla"])
def test_an_optimiser_keeps_what_size_says(model: str, kind: str) -> None:
    real = ct.build(model, seed=0)
    for parameter in real.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(kind, real, lr=1e-3)
    optimizer.step()
    said = ct.size(model, mode="train", dtype="fp32", optimizer={"sgd": "sgd-momentum"}.get(kind, kind))
    assert sum(each.nbytes for each in optimizer.state_dict().values()) == said.memory.bytes_by_component["optimizer"]


def test_the_chunk_is_the_same() -> None:
    assert CHUNK_TOKENS == training_module.LOSS_CHUNK_SIZE
