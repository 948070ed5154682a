"""Preflight checks before the first step: a leak is an error, other findings are logged, nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cutaway as ct
from cutaway.errors import InputError
from cutaway.model import stack
from cutaway.train.trainer.launch import train
from cutaway.train.trainer.preflight import run_preflight

pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("frozen_check_clock")]


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
def bidirectional_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every stack bidirectional."""
    self_attention_mask = stack.self_attention_mask
    monkeypatch.setattr(
        stack,
        "self_attention_mask",
        lambda q, k, **kwargs: self_attention_mask(q, k, **kwargs | {"is_causal": False}),
    )


@pytest.mark.usefixtures("bidirectional_mask")
def test_model_that_attends_to_future_tokens_is_not_trained(recipe: dict[str, Any], tmp_path: Path) -> None:
    message = r"attends to future tokens.*position \d+.*Likely cause.*training\.preflight = false"
    with pytest.raises(InputError, match=message):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(recipe, tmp_path / "run", overrides=["training.preflight=false"])
    assert (tmp_path / "run" / "model").exists()


def test_preflight_does_not_change_the_run(recipe: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(5)
    train(recipe, tmp_path / "with")
    drawn = torch.rand(3)
    torch.manual_seed(5)
    train(recipe, tmp_path / "without", overrides=["training.preflight=false"])
    assert torch.equal(drawn, torch.rand(3))
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("with", "without"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_preflight_restores_process_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bf16 product disables oneDNN on a CPU without bf16; later fp32 products would round differently."""
    model, before = ct.build("tiny-gpt", seed=0), (torch.backends.mkldnn.enabled, torch.get_num_threads())
    forward = model.forward

    def forward_without_onednn(*args: Any, **kwargs: Any) -> Any:
        torch.backends.mkldnn.enabled = False
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", forward_without_onednn)
    run_preflight(model, 0, lambda _: None)
    assert (torch.backends.mkldnn.enabled, torch.get_num_threads()) == before


def test_other_findings_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, messages = ct.build("tiny-gpt", seed=0), []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: forward(*args, **kwargs) * (1 + 0.1 * torch.rand(1)))
    run_preflight(model, 0, messages.append)
    assert any(message.startswith("eval-determinism") for message in messages)


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-bert", "tiny-t5"])
def test_correct_model_passes_with_few_forward_passes(preset: str) -> None:
    model, messages, calls = ct.build(preset, seed=0), [], []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    run_preflight(model, 0, messages.append)
    assert not messages
    assert len(calls) < 150
