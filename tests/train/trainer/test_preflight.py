"""Training asks the model whether it is right before the first step, and stops on a leak."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cutaway as ct
from cutaway.errors import InputError
from cutaway.model import stack
from cutaway.train.trainer.launch import train
from cutaway.train.trainer.preflight import BUDGET_SECONDS, run_preflight

pytestmark = pytest.mark.unchecked


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for n in range(8):
        (tmp_path / "texts" / f"{n}.txt").write_text("\n".join(f"{n} and {b} make {n + b}" for b in range(40)))
    return {
        "model": "tiny-gpt",
        "data": {"seq_len": 32, "validation_split": 0.2, "sources": [{"path": str(tmp_path / "texts")}]},
        "training": {"max_steps": 3, "batch_size": 4},
        "eval": {"interval": 3, "num_sequences": 4},
    }


@pytest.fixture
def leaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stack sees both sides."""
    right = stack.self_attention_mask
    monkeypatch.setattr(stack, "self_attention_mask", lambda q, k, **how: right(q, k, **how | {"is_causal": False}))


@pytest.mark.usefixtures("leaking")
def test_a_model_that_sees_the_future_is_not_trained(recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sees the future.*position \d+.*Likely cause.*training\.preflight = false"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(recipe, tmp_path / "run", overrides=["training.preflight=false"])
    assert (tmp_path / "run" / "model").exists()


def test_being_asked_changes_no_bit_of_a_run(recipe: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(5)
    train(recipe, tmp_path / "asked")
    drawn = torch.rand(3)
    torch.manual_seed(5)
    train(recipe, tmp_path / "not", overrides=["training.preflight=false"])
    assert torch.equal(drawn, torch.rand(3))
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("asked", "not"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_being_asked_changes_nothing_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product in bf16 turns oneDNN off where the CPU has none; later fp32 products would be rounded otherwise."""
    model, before = ct.build("tiny-gpt", seed=0), (torch.backends.mkldnn.enabled, torch.get_num_threads())
    right = model.forward

    def forward(*given: Any, **how: Any) -> Any:
        torch.backends.mkldnn.enabled = False
        return right(*given, **how)

    monkeypatch.setattr(model, "forward", forward)
    run_preflight(model, 0, lambda _: None)
    assert (torch.backends.mkldnn.enabled, torch.get_num_threads()) == before


def test_what_else_is_found_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, told = ct.build("tiny-gpt", seed=0), []
    right = model.forward
    monkeypatch.setattr(model, "forward", lambda *given, **how: right(*given, **how) * (1 + 0.1 * torch.rand(1)))
    run_preflight(model, 0, told.append)
    assert any(line.startswith("eval-determinism") for line in told)


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-bert", "tiny-t5"])
def test_a_healthy_model_is_asked_quickly_and_hears_nothing(preset: str) -> None:
    model, told = ct.build(preset, seed=0), []
    start = time.monotonic()
    run_preflight(model, 0, told.append)
    assert not told
    assert time.monotonic() - start < 4 * BUDGET_SECONDS  # a busy machine is no reason to fail
