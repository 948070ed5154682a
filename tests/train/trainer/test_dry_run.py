"""Dry run: memory of a rank and collectives of a step equal the estimate of `size` and real measurements."""

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
from cutaway.train.optim.optimizer import build_optimizer
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import AdafactorConfig, AdamWConfig, MuonConfig, OptimizerConfig, Recipe, SGDConfig
from cutaway.train.trainer import training_module
from cutaway.train.trainer.dry_run import DryRunReport, MemoryCommTracker, dry_run
from cutaway.train.trainer.memory_check import expected_memory
from cutaway.train.trainer.training_module import TrainingModule

OBJECTIVES = {"tiny-t5": "seq2seq", "tiny-bert": "masked-lm"}
SEQ_LEN = 48


def build_recipe(model: str, *, dp_shard: int | str = 1, tp: int = 1, **training: Any) -> Recipe:
    return load_recipe(
        {
            "model": model,
            "data": {"seq_len": SEQ_LEN},
            "objective": {"kind": OBJECTIVES.get(model, "causal-lm")},
            "training": {"batch_size": 8} | training,
            "parallel": {"dp_shard": dp_shard, "tp": tp},
        }
    )


def assert_matches_prediction(report: DryRunReport, *, rel: float) -> None:
    for name in ("weights", "gradients", "optimizer", "collectives"):
        assert getattr(report.measured, name) == getattr(report.predicted, name), name
    assert report.predicted.peak_bytes == pytest.approx(report.measured.peak_bytes, rel=rel)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world_size", "dp_shard", "tp", "precision", "activation_checkpointing", "dims"),
    [
        (4, "all", 1, "fp32", "none", (1, 4, 1)),
        (2, 1, 2, "fp32", "none", (1, 1, 2)),
        (8, 2, 2, "bf16", "selective", (2, 2, 2)),
        (2, "all", 1, "float8", "none", (1, 2, 1)),
        pytest.param(4, 2, 2, "fp32", "none", (1, 2, 2), marks=pytest.mark.nightly),
        pytest.param(4, 1, 2, "bf16", "none", (2, 1, 2), marks=pytest.mark.nightly),
        pytest.param(1, 1, 1, "fp32", "none", (1, 1, 1), marks=pytest.mark.nightly),
    ],
)
def test_memory_and_collectives_match_size(
    world_size: int, dp_shard: Any, tp: int, precision: str, activation_checkpointing: str, dims: tuple[int, ...]
) -> None:
    recipe = build_recipe(
        "tiny-llama",
        dp_shard=dp_shard,
        tp=tp,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
    )
    report = dry_run(recipe, world_size)
    assert (report.devices.dp_replicate, report.devices.dp_shard, report.devices.tp) == dims
    assert_matches_prediction(report, rel=0.01)
    assert not distributed.is_initialized()


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "tp"), [("tiny-gpt", 2), ("tiny-t5", 1), ("tiny-moe", 1), ("tiny-bert", 2)])
def test_other_models_match_size(model: str, tp: int) -> None:
    assert_matches_prediction(dry_run(build_recipe(model, dp_shard=2, tp=tp), 2 * tp), rel=0.02)


@pytest.mark.nightly
@pytest.mark.parametrize(("precision", "tp"), [("bf16", 2), ("float8", 1)])
def test_full_activation_checkpointing_matches_size(precision: str, tp: int) -> None:
    recipe = build_recipe("tiny-llama", dp_shard="all", tp=tp, activation_checkpointing="full", precision=precision)
    assert_matches_prediction(dry_run(recipe, 4), rel=0.05)


@pytest.mark.nightly
def test_every_micro_batch_has_its_own_collectives() -> None:
    one = dry_run(build_recipe("tiny-llama", dp_shard="all"), 4).measured.collectives
    two = dry_run(build_recipe("tiny-llama", dp_shard="all", grad_accum_steps=2), 4)
    assert two.measured.collectives == two.predicted.collectives
    count, num_bytes = one["reduce-scatter"]
    assert two.measured.collectives["reduce-scatter"] == (2 * count, 2 * num_bytes)


def test_unsupported_parallelism_is_an_error() -> None:
    with pytest.raises(InputError, match="--world-size 1"):
        dry_run(build_recipe("tiny-llama"), 4)
    with pytest.raises(InputError, match="start a multiple of 8"):
        dry_run(build_recipe("tiny-llama", dp_shard=4, tp=2), 4)


@pytest.mark.nightly
def test_dry_run_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.toml"
    file.write_text('model = "tiny-llama"\n[training]\nbatch_size = 4\n[data]\nseq_len = 32\n')
    command = ["train", str(file), "--dry-run", "--world-size", "4", "--set", "parallel.dp_shard=all"]
    report = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert report["weights"]["ratio"] == 1.0
    assert report["collectives"]["all-gather"]["count"] == report["collectives"]["all-gather"]["predicted_count"]
    shown = CliRunner().invoke(app, command).stdout
    assert "of 4 (1 dp_replicate × 4 dp_shard × 1 tp)" in shown
    assert "reduce-scatter" in shown
    assert [each.name for each in tmp_path.iterdir()] == ["small.toml"]
    single = json.loads(CliRunner().invoke(app, ["train", str(file), "--dry-run", "--json"]).stdout)
    assert (single["world_size"], single["weights"]["ratio"], single["collectives"]) == (1, 1.0, {})
    bad = CliRunner().invoke(app, ["train", str(file), "--world-size", "4"])
    assert isinstance(bad.exception, InputError)


@pytest.mark.nightly
def test_llama_405b_on_1024_ranks() -> None:
    """The bytes of a rank within 5 %, on a machine that cannot hold one of its layers."""
    recipe = load_recipe(
        {
            "model": "llama-3.1-405b",
            "data": {"seq_len": 8192, "tokenizer": {"kind": "bpe", "vocab_size": 128256}},
            "training": {"batch_size": 128, "precision": "bf16", "activation_checkpointing": "full"},
            "parallel": {"dp_shard": "all", "tp": 8},
        }
    )
    report = dry_run(recipe, 1024)
    assert report.num_parameters == ct.size("llama-3.1-405b").num_parameters
    assert_matches_prediction(report, rel=0.05)


# Real tensors


@pytest.mark.parametrize(
    ("model", "precision", "grad_accum_steps", "packed"),
    [("tiny-llama", "fp32", 1, True), ("tiny-llama", "bf16", 2, True), ("tiny-gpt", "fp32", 1, False)],
)
def test_expected_memory_matches_a_real_step(model: str, precision: str, grad_accum_steps: int, packed: bool) -> None:
    recipe = build_recipe(model, precision=precision, grad_accum_steps=grad_accum_steps, batch_size=16)
    config = ct.config(model)
    with MemoryCommTracker() as tracker:
        built = ct.build(model, seed=0).train()
        module = TrainingModule(built, recipe.objective, recipe.training.precision)
        optimizer = build_optimizer(AdamWConfig(), built)
        for _ in range(2):
            tracker.reset_peak()
            optimizer.zero_grad()
            for _ in range(grad_accum_steps):
                tokens = torch.ones((16 // grad_accum_steps, SEQ_LEN + 1), dtype=torch.long)
                document_ids = (torch.arange(SEQ_LEN + 1) > 20).long().expand_as(tokens) if packed else None
                module(causal_lm(tokens, document_ids)).loss.backward()
            optimizer.step()
    estimate, lower_bound = expected_memory(recipe, config, torch.device("cpu"))
    assert estimate == pytest.approx(tracker.peak_bytes, rel=0.1)
    assert lower_bound == pytest.approx(tracker.live_bytes, rel=0.02)


@pytest.mark.parametrize("optimizer_config", [AdamWConfig(), MuonConfig(), AdafactorConfig(), SGDConfig()])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-moe", "tiny-mla"])
def test_optimizer_state_matches_size(model: str, optimizer_config: OptimizerConfig) -> None:
    built = ct.build(model, seed=0)
    for parameter in built.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(optimizer_config, built)
    optimizer.step()
    kind = optimizer_config.kind
    estimate = ct.size(model, mode="train", dtype="fp32", optimizer={"sgd": "sgd-momentum"}.get(kind, kind))
    state_bytes = sum(tensor.nbytes for tensor in optimizer.state_dict().values())
    assert state_bytes == estimate.memory.bytes_by_component["optimizer"]


def test_size_uses_the_loss_chunk_size_of_training() -> None:
    assert CHUNK_TOKENS == training_module.LOSS_CHUNK_SIZE
