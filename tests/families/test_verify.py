"""verify: comparison of a checkpoint with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import cutaway as ct
from cutaway.families.verify import verify


def test_verify_reports_first_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a changed weight in the second layer of the transformers model, that layer is reported."""
    llama = ct.save(ct.build("tiny-llama", seed=0), tmp_path / "model")
    assert verify(llama).ok
    from_pretrained = transformers.LlamaForCausalLM.from_pretrained

    def changed_from_pretrained(*args: Any, **kwargs: Any) -> Any:
        model = from_pretrained(*args, **kwargs)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0] += 1.0
        return model

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", changed_from_pretrained)
    result = verify(llama)
    assert not result.ok
    assert result.first_mismatch in ("blocks.1", "final_norm")
    assert "first difference is at" in str(result)
