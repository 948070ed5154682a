"""`verify`: one checkpoint in transformers and here, compared layer by layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import cutaway as ct
from cutaway.families.verify import verify


def test_verify_finds_where_two_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer with one weight changed in its second layer: told by name of the layer, and by exit code."""
    llama = ct.save(ct.build("tiny-llama", seed=0), tmp_path / "model")
    assert verify(llama).ok
    own = transformers.LlamaForCausalLM.from_pretrained

    def changed(*args: Any, **kwargs: Any) -> Any:
        model = own(*args, **kwargs)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0] += 1.0
        return model

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", changed)
    found = verify(llama)
    assert not found.ok
    assert found.first_mismatch in ("blocks.1", "final_norm")
    assert "first part at" in str(found)
