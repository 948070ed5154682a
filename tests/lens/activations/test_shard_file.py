"""Files written in parts equal those of safetensors."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cutaway.lens.activations.shard_file import write_safetensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_file_equals_that_of_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = {
        "resid_post": [torch.randn(count, 3, 5, generator=generator).to(dtype) for count in (1, 4, 2)],
        "tokens": [torch.arange(count, dtype=torch.int32) for count in (1, 4, 2)],
        "sequences": [torch.arange(count) for count in (1, 4, 2)],
        "one per token": [torch.randn(7, generator=generator).to(dtype)],
        "not contiguous": [torch.randn(5, 7, generator=generator).to(dtype).mT],
    }
    whole = {name: torch.cat(tensors).contiguous() for name, tensors in parts.items()}
    digest = write_safetensors(tmp_path / "parts.safetensors", parts)
    save_file(whole, tmp_path / "whole.safetensors")
    written = (tmp_path / "parts.safetensors").read_bytes()
    assert digest == hashlib.sha256(written).hexdigest()
    loaded = load_file(tmp_path / "parts.safetensors")
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)
