"""Parity of activations with transformers at every site that both models have."""

import copy
from typing import Any

import torch
from support.config_strategies import has_additive_residual
from support.tracing import count_hooks
from torch import Tensor

import cutaway as ct
from cutaway.lens import sites
from cutaway.lens.analysis import direct_logit_attribution


def call_arguments(tokens: tuple[Tensor, ...], **extra: Any) -> dict[str, Any]:
    """Keyword arguments of a transformers model."""
    return dict(zip(("input_ids", "decoder_input_ids"), tokens, strict=False)) | extra


def assert_same(actual: Tensor, expected: Tensor, label: str) -> None:
    assert actual.shape == expected.shape, (label, actual.shape, expected.shape)
    diff, tolerance = (actual - expected).abs().max().item(), 1e-5 * max(1.0, expected.abs().max().item())
    assert diff <= tolerance, f"{label}: max diff {diff:.2e}, tolerance {tolerance:.2e}"


def compare_activations(peer: Any, model: Any, tokens: tuple[Tensor, ...], **extra: Any) -> None:
    """Assert that the activations are equal and that tracing does not change the peer's output or number of hooks."""
    peer_sites = sites(peer)
    assert peer_sites.keys() <= sites(model).keys()
    assert peer_sites.keys() | peer_sites.unavailable.keys() == sites(model).keys()
    run = model.encode if getattr(model, "head", None) is None else model
    with torch.no_grad():
        untraced = peer(**call_arguments(tokens, **extra))
        before = count_hooks(peer)
        with ct.trace(peer, "*") as t:
            traced = peer(**call_arguments(tokens, **extra))
        assert count_hooks(peer) == before
        with ct.trace(model, *peer_sites) as expected:
            run(*tokens)
    assert torch.equal(traced[0], untraced[0])
    assert "logits" not in peer_sites or torch.equal(t["logits"], traced.logits)
    for site in peer_sites:
        assert t[site].axes == expected[site].axes
        assert_same(t[site], expected[site], site)


def check_sites(checkpoint_model: Any, tokens: tuple[Tensor, ...]) -> None:
    """Assert in fp64 that each site has its declared shape and can be edited, and check the sums of contributions."""
    model = copy.deepcopy(checkpoint_model).double()
    run = model.encode if getattr(model, "head", None) is None else model
    model_sites = sites(model)
    length, source = tokens[-1].shape[1], tokens[0].shape[1]
    with torch.no_grad():
        expected = run(*tokens)
        with ct.trace(model, "*") as t:
            assert torch.equal(run(*tokens), expected)
        for site in t.sites:
            assert tuple(t[site.name].shape) == site.shape(len(tokens[0]), length, source), site.name
        with ct.edit(model, dict.fromkeys(model_sites, torch.clone)):
            assert torch.equal(run(*tokens), expected)
        for name in list(model_sites)[::5]:
            with ct.edit(model, {name: lambda value: value + 0.1 * torch.arange(value.shape[-1])}):
                assert not torch.equal(run(*tokens), expected), name
        assert torch.equal(run(*tokens), expected)
    assert count_hooks(model) == 0
    check_residual_sums(model, t, tokens)


def check_residual_sums(model: Any, t: Any, tokens: tuple[Tensor, ...]) -> None:
    """embed + Σ out = resid_post and Σ attributions = logit, unless norms are on the residual stream."""
    source = {"source": tokens[0][:1]} if len(tokens) > 1 else {}
    for name, stack in model.stacks.items():
        if not has_additive_residual(model.config.stacks[name]):
            continue
        prefix = f"{name}." if len(model.stacks) > 1 else ""
        outputs = [site for site in t if site.startswith(f"{prefix}blocks.") and site.endswith(".out")]
        end = t[f"{prefix}blocks.{len(stack.blocks) - 1}.resid_post"]
        error = (t[f"{prefix}embed"] + sum(t[site] for site in outputs) - end).abs().max()
        assert error <= 1e-9 * max(1.0, float(end.abs().max())), name
        head = getattr(model, "head", None)
        if head is None or head.transform is not None or head.softcap is not None or name == "encoder":
            continue
        attribution = direct_logit_attribution(model, tokens[-1][:1], answer_token=7, by_head=True, **source)
        logit = float(t["logits"][0, -1, 7])
        assert abs(float(attribution.values.sum()) - logit) <= 1e-9 * max(1.0, float(t["logits"].abs().max()))
