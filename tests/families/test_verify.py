"""verify: comparison of a checkpoint with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import cutaway as ct
from cutaway.errors import InputError
from cutaway.families.replace_head import replace_head
from cutaway.families.verify import verify
from cutaway.tokenizer import byte_tokenizer


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


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        ("tiny-bert", "sequence-classification"),
        ("tiny-bert", "token-classification"),
        ("tiny-bert", "embedding"),
        ("tiny-llama", "sequence-classification"),
        ("tiny-llama", "embedding"),
        ("tiny-gpt", "token-classification"),
    ],
)
def test_verify_compares_heads_of_tasks(preset: str, kind: str, tmp_path: Path) -> None:
    checkpoint = replace_head(ct.build(preset, seed=0), kind, seed=0)
    checkpoint.tokenizer_loader = byte_tokenizer
    result = verify(ct.save(checkpoint, tmp_path / "model"))
    assert result.ok, str(result)
    assert result.num_gradients_compared > 8


def test_verify_refuses_multiple_choice(tmp_path: Path) -> None:
    saved = ct.save(replace_head(ct.build("tiny-bert", seed=0), "multiple-choice"), tmp_path / "model")
    with pytest.raises(InputError, match="verify does not compare an encoder with a head of kind 'multiple-choice'"):
        verify(saved)
