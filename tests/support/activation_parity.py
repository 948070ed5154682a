"""Ours ≡ transformers, inside: every site that both have."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import cutaway as ct
from cutaway.config import PostNorm
from cutaway.lens import sites
from cutaway.lens.analysis import direct_logit_attribution


def call_arguments(tokens: tuple[Tensor, ...], **extra: Any) -> dict[str, Any]:
    """How their models want to be called."""
    return dict(zip(("input_ids", "decoder_input_ids"), tokens, strict=False)) | extra


def count_hooks(model: nn.Module) -> int:
    """Their library leaves some of its own, when hidden states are asked for."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def assert_same(one: Tensor, other: Tensor, what: str) -> None:
    assert one.shape == other.shape, (what, one.shape, other.shape)
    worst, bound = (one - other).abs().max().item(), 1e-5 * max(1.0, other.abs().max().item())
    assert worst <= bound, f"{what}: worst difference {worst:.2e}, bound {bound:.2e}"


def compare_activations(theirs: Any, ours: Any, tokens: tuple[Tensor, ...], **extra: Any) -> None:
    """Values traced in theirs are those traced in ours; what they give back is untouched; no hook stays."""
    known = sites(theirs)
    assert known.keys() <= sites(ours).keys()
    assert known.keys() | known.unavailable.keys() == sites(ours).keys()
    run = ours.encode if getattr(ours, "head", None) is None else ours
    with torch.no_grad():
        alone = theirs(**call_arguments(tokens, **extra))
        before = count_hooks(theirs)
        with ct.trace(theirs, "*") as t:
            traced = theirs(**call_arguments(tokens, **extra))
        assert count_hooks(theirs) == before
        with ct.trace(ours, *known) as own:
            run(*tokens)
    assert torch.equal(traced[0], alone[0])
    assert "logits" not in known or torch.equal(t["logits"], traced.logits)
    for site in known:
        assert t[site].axes == own[site].axes
        assert_same(t[site], own[site], site)


def check_sites(checkpoint_model: Any, tokens: tuple[Tensor, ...]) -> None:
    """Every site of ours is passed, as large as it says, can be changed and left; what was added adds up, in fp64."""
    model = copy.deepcopy(checkpoint_model).double()
    run = model.encode if getattr(model, "head", None) is None else model
    known = sites(model)
    length, source = tokens[-1].shape[1], tokens[0].shape[1]
    with torch.no_grad():
        plain = run(*tokens)
        with ct.trace(model, "*") as t:
            assert torch.equal(run(*tokens), plain)
        for site in t.sites:
            assert tuple(t[site.name].shape) == site.shape(len(tokens[0]), length, source), site.name
        with ct.edit(model, dict.fromkeys(known, torch.clone)):
            assert torch.equal(run(*tokens), plain)
        for name in list(known)[::5]:
            with ct.edit(model, {name: lambda value: value + 0.1 * torch.arange(value.shape[-1])}):
                assert not torch.equal(run(*tokens), plain), name
        assert torch.equal(run(*tokens), plain)
    assert count_hooks(model) == 0
    check_residual_sums(model, t, tokens)


def check_residual_sums(model: Any, t: Any, tokens: tuple[Tensor, ...]) -> None:
    """Embedding + Σ additions = stream, Σ attributions = logit, where norms do not stand on the stream."""
    beside = {"source": tokens[0][:1]} if len(tokens) > 1 else {}
    for name, stack in model.stacks.items():
        if isinstance(model.config.stacks[name].placement, PostNorm):
            continue
        prefix = f"{name}." if len(model.stacks) > 1 else ""
        added = [each for each in t if each.startswith(f"{prefix}blocks.") and each.endswith(".out")]
        end = t[f"{prefix}blocks.{len(stack.blocks) - 1}.resid_post"]
        error = (t[f"{prefix}embed"] + sum(t[each] for each in added) - end).abs().max()
        assert error <= 1e-9 * max(1.0, float(end.abs().max())), name
        head = getattr(model, "head", None)
        if head is None or head.transform is not None or head.softcap is not None or name == "encoder":
            continue
        parts = direct_logit_attribution(model, tokens[-1][:1], answer_token=7, by_head=True, **beside)
        logit = float(t["logits"][0, -1, 7])
        assert abs(float(parts.values.sum()) - logit) <= 1e-9 * max(1.0, float(t["logits"].abs().max()))
