"""Rehearsed on shapes ≡ what size says ≡ what is really held: bytes of a rank, and the collectives of a step."""

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
from cutaway.size.walk.loss import CHUNK
from cutaway.train import learner
from cutaway.train.learner import Learner
from cutaway.train.ledger import Ledger
from cutaway.train.objectives import next_token
from cutaway.train.optimise import KINDS, make
from cutaway.train.recipe import Recipe, recipe
from cutaway.train.rehearse import Rehearsal, rehearse
from cutaway.train.room import expected

OBJECTIVES = {"tiny-t5": "seq2seq", "tiny-bert": "masked"}
LENGTH = 48


def asked(model: str, *, shards: int | str = 1, tensor: int = 1, **training: Any) -> Recipe:
    return recipe(
        {
            "model": model,
            "data": {"length": LENGTH},
            "objective": {"kind": OBJECTIVES.get(model, "next-token")},
            "training": {"batch": 8} | training,
            "parallel": {"shards": shards, "tensor": tensor},
        }
    )


def same(found: Rehearsal, *, within: float) -> None:
    counted, predicted = found.counted, found.predicted
    for name in ("weights", "gradients", "optimizer", "collectives"):
        assert getattr(counted, name) == getattr(predicted, name), name
    assert predicted.peak == pytest.approx(counted.peak, rel=within)


@pytest.mark.parametrize(
    ("world", "shards", "tensor", "precision", "recompute", "places"),
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
    world: int, shards: Any, tensor: int, precision: str, recompute: str, places: tuple[int, ...]
) -> None:
    wanted = asked("tiny-llama", shards=shards, tensor=tensor, precision=precision, recompute=recompute)
    found = rehearse(wanted, world)
    assert (found.devices.copies, found.devices.shards, found.devices.tensor) == places
    same(found, within=0.01)
    assert not distributed.is_initialized()


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "tensor"), [("tiny-gpt", 2), ("tiny-t5", 1), ("tiny-moe", 1), ("tiny-bert", 2)])
def test_other_models_too(model: str, tensor: int) -> None:
    same(rehearse(asked(model, shards=2, tensor=tensor), 2 * tensor), within=0.02)


@pytest.mark.nightly
def test_all_is_computed_again() -> None:
    same(rehearse(asked("tiny-llama", shards="all", tensor=2, recompute="full", precision="bf16"), 4), within=0.05)


@pytest.mark.nightly
def test_pieces_gather_and_scatter_again() -> None:
    one = rehearse(asked("tiny-llama", shards="all"), 4).counted.collectives
    two = rehearse(asked("tiny-llama", shards="all", pieces=2), 4)
    assert two.counted.collectives == two.predicted.collectives
    number, size = one["reduce-scatter"]
    assert two.counted.collectives["reduce-scatter"] == (2 * number, 2 * size)


def test_what_cannot_be_rehearsed_is_said() -> None:
    with pytest.raises(InputError, match="--world 1"):
        rehearse(asked("tiny-llama"), 4)
    with pytest.raises(InputError, match="start a multiple of 8"):
        rehearse(asked("tiny-llama", shards=4, tensor=2), 4)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.toml"
    file.write_text('model = "tiny-llama"\n[training]\nbatch = 4\n[data]\nlength = 32\n')
    how = ["train", str(file), "--rehearse", "--world", "4", "--set", "parallel.shards=all"]
    told = json.loads(CliRunner().invoke(app, [*how, "--json"]).stdout)
    assert told["weights"]["ratio"] == 1.0
    assert told["collectives"]["all-gather"]["number"] == told["collectives"]["all-gather"]["size_number"]
    shown = CliRunner().invoke(app, how).stdout
    assert "of 4 (1 copies × 4 shards × 1 tensor)" in shown
    assert "reduce-scatter" in shown
    assert [each.name for each in tmp_path.iterdir()] == ["small.toml"]
    bad = CliRunner().invoke(app, ["train", str(file), "--rehearse"])
    assert isinstance(bad.exception, InputError)


@pytest.mark.nightly
def test_llama_405b_on_1024_ranks() -> None:
    """The bytes of a rank within 5 %, on a machine that could not hold one of its layers."""
    wanted = recipe(
        {
            "model": "llama-3.1-405b",
            "data": {"length": 8192, "tokenizer": {"kind": "bpe", "vocab_size": 128256}},
            "training": {"batch": 128, "precision": "bf16", "recompute": "full"},
            "parallel": {"shards": "all", "tensor": 8},
        }
    )
    found = rehearse(wanted, 1024)
    assert found.parameters == ct.size("llama-3.1-405b").params
    same(found, within=0.05)


# ---------------------------------------------------------------------------------------- on real tensors


@pytest.mark.parametrize(
    ("model", "precision", "pieces", "packed"),
    [("tiny-llama", "fp32", 1, True), ("tiny-llama", "bf16", 2, True), ("tiny-gpt", "fp32", 1, False)],
)
def test_what_is_expected_is_what_a_step_holds(model: str, precision: str, pieces: int, packed: bool) -> None:
    wanted = asked(model, precision=precision, pieces=pieces, batch=16)
    config = ct.config(model)
    with Ledger() as ledger:
        real = ct.build(model, seed=0).train()
        asks, optimiser = Learner(real, wanted), make("adamw", real, rate=1e-3)
        for _ in range(2):
            ledger.forget()
            optimiser.zero()
            for _ in range(pieces):
                tokens = torch.ones((16 // pieces, LENGTH + 1), dtype=torch.long)
                documents = (torch.arange(LENGTH + 1) > 20).long().expand_as(tokens) if packed else None
                asks(next_token(tokens, documents)).total.backward()
            optimiser.step()
    about, certain = expected(wanted, config, torch.device("cpu"))
    assert about == pytest.approx(ledger.peak, rel=0.1)
    assert certain == pytest.approx(ledger.live, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-moe", "tiny-mla"])
def test_an_optimiser_keeps_what_size_says(model: str, kind: str) -> None:
    real = ct.build(model, seed=0)
    for parameter in real.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser = make(kind, real, rate=1e-3)
    optimiser.step()
    said = ct.size(model, mode="train", dtype="fp32", optimizer={"sgd": "sgd-momentum"}.get(kind, kind))
    assert sum(each.nbytes for each in optimiser.tensors().values()) == said.memory.whole["optimizer"]


def test_the_chunk_is_the_same() -> None:
    assert CHUNK == learner.CHUNK
