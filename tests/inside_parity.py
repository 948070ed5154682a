"""Ours ≡ transformers, inside: every site that both have."""

from typing import Any

import torch
from torch import Tensor, nn

import cutaway as ct
from cutaway.lens import sites


def asked(tokens: tuple[Tensor, ...], **extra: Any) -> dict[str, Any]:
    """How their models want to be called."""
    return dict(zip(("input_ids", "decoder_input_ids"), tokens, strict=False)) | extra


def hooks(model: nn.Module) -> int:
    """Their library leaves some of its own, when hidden states are asked for."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def same(one: Tensor, other: Tensor, what: str) -> None:
    assert one.shape == other.shape, (what, one.shape, other.shape)
    worst, bound = (one - other).abs().max().item(), 1e-5 * max(1.0, other.abs().max().item())
    assert worst <= bound, f"{what}: worst difference {worst:.2e}, bound {bound:.2e}"


def compare_inside(theirs: Any, ours: Any, tokens: tuple[Tensor, ...], **extra: Any) -> None:
    """Values traced in theirs are those traced in ours; what they give back is untouched; no hook stays."""
    known = sites(theirs)
    assert known.keys() <= sites(ours).keys()
    assert known.keys() | known.absent.keys() == sites(ours).keys()
    run = ours.encode if getattr(ours, "head", None) is None else ours
    with torch.no_grad():
        alone = theirs(**asked(tokens, **extra))
        before = hooks(theirs)
        with ct.trace(theirs, "*") as t:
            traced = theirs(**asked(tokens, **extra))
        assert hooks(theirs) == before
        with ct.trace(ours, *known) as own:
            run(*tokens)
    assert torch.equal(traced[0], alone[0])
    assert "logits" not in known or torch.equal(t["logits"], traced.logits)
    for site in known:
        assert t[site].axes == own[site].axes
        same(t[site], own[site], site)
