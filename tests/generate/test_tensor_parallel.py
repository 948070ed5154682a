"""Tensor-parallel inference on two processes equals a single process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import small_checkpoint
from support.tensor_parallel_ranks import MEASURED, run_rank

import cutaway as ct
from cutaway.errors import InputError

SCRIPT = Path(__file__).parents[1] / "support" / "tensor_parallel_ranks.py"


def edit(preset: str, **attention: Any) -> dict[str, Any]:
    """Changes of the attention of a preset's decoder blocks, as `config_changes` of `small_checkpoint`."""
    decoder = ct.config(preset).model_dump(mode="json")["decoder"]
    for block in decoder["block"]:
        block["attention"] |= attention
    return {"decoder": decoder}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("tiny-gpt", {}),
    "gqa": ("tiny-llama", {}),
    "one-kv-head": ("tiny-llama", edit("tiny-llama", kv_heads=1)),
    "moe": ("tiny-moe", {}),
    "mla": ("tiny-mla", {}),
    "odd-vocabulary": ("tiny-gemma", {"vocab_size": 263}),
    "qk-norm": ("tiny-llama", edit("tiny-llama", qk_norm={"norm": {"kind": "rmsnorm"}, "over": "full"})),
    "sinks": (
        "tiny-llama",
        edit(
            "tiny-llama",
            sink=True,
            bias=["q", "k", "v", "o"],
            position={"kind": "alibi"},
            qk_norm={"norm": {"kind": "rmsnorm"}, "over": "head", "gain_per_head": True},
        ),
    ),
    "encoder": ("tiny-bert", {}),
    "encoder-decoder": ("tiny-t5", {}),
}
ERRORS = {"three-heads": ("tiny-llama", edit("tiny-llama", heads=3, kv_heads=3, d_head=16))}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the outputs of all models, on one process and on each of two."""
    directory = tmp_path_factory.mktemp("outputs")
    names = {**MODELS, **ERRORS}
    for name, (preset, changes) in names.items():
        checkpoint = small_checkpoint(preset, **changes)
        with torch.no_grad():  # not all zeros, as after initialization
            for parameter in checkpoint.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        ct.save(checkpoint, directory / name, family="cutaway" if changes else None)  # presets in their own format
    command = [sys.executable, str(SCRIPT), "2", str(directory), *(str(directory / name) for name in names)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        run_rank(0, 1, directory, [directory / name for name in names])
        assert process.communicate(timeout=300)[1] == ""
    return directory


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_equal_one(name: str, outputs: Path) -> None:
    """Logits, and the tokens of greedy and of sampled completions."""
    one = load_file(outputs / f"{name}.1.0.safetensors")
    for rank in range(2):
        two = load_file(outputs / f"{name}.2.{rank}.safetensors")
        assert one.keys() == two.keys()
        for key, expected in one.items():
            if key.startswith("logits"):
                difference = float((two[key] - expected).abs().max())
                assert difference <= 1e-5 * max(1.0, float(expected.abs().max())), key
            else:
                assert torch.equal(two[key], expected), key


@pytest.mark.parametrize("name", MEASURED)
def test_rank_has_the_predicted_size(name: str, outputs: Path) -> None:
    """Bytes of weights and KV cache, and number and bytes of the all-reduces of a decode step."""
    checkpoint = ct.load(outputs / name)
    options: dict[str, Any] = {"dtype": "fp32", "kv_cache_dtype": "fp32", "context": 9}
    estimate = ct.size(checkpoint.config, world_size=2, tp=2, **options)
    counter = estimate.decode_pass.counter
    for rank in range(2):
        measured = load_file(outputs / f"{name}.measured.{rank}.safetensors")
        assert int(measured["weight_bytes"]) == estimate.inference_memory.bytes_by_component["weights"]
        assert int(measured["kv_bytes"]) == estimate.kv_cache.total_bytes
        assert len(measured["all_reduce_bytes"]) == counter.num_collectives["all-reduce"]
        assert int(measured["all_reduce_bytes"].sum()) == counter.collective_bytes["all-reduce"]


def test_heads_that_cannot_be_split_are_refused(outputs: Path) -> None:
    assert (outputs / "three-heads.1.0.safetensors").exists()
    for rank in range(2):
        message = json.loads((outputs / f"three-heads.2.{rank}.json").read_text())
        assert message == "3 query heads cannot be split over 2 processes; use a divisor of 3: 3"


def test_error_of_the_engine_is_raised_on_all_ranks(outputs: Path) -> None:
    for rank in range(2):
        message = json.loads((outputs / f"gqa.2.{rank}.json").read_text())
        assert message == "a model on several processes does not support weight_bits; leave it out"


def test_one_process_cannot_hold_two_parts(tmp_path: Path) -> None:
    ct.save(small_checkpoint(), tmp_path / "model")
    with pytest.raises(InputError, match="start the script with torchrun"):
        ct.load(tmp_path / "model", tensor_parallel_size=2)
