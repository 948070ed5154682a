"""Residual stream by depth: norms, and norm ratio and cosine similarity of each sublayer's update."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.lens.adapters import ModelLike
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, prepare_inputs, upcast_float32
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.model.block import Block


def resid_norms(model: ModelLike, tokens: TextOrTokens, *, source: TextOrTokens | None = None) -> LabeledTensor:
    """L2 norm of each token's residual stream after the embedding and after each block: layer × token."""
    inputs = prepare_inputs(model, tokens, source)
    t = inputs.trace(*inputs.resid_sites.values())
    norms = torch.stack([upcast_float32(t[name])[0].norm(dim=-1) for name in inputs.resid_sites.values()])
    labels = (tuple(inputs.resid_sites), inputs.token_labels)
    return LabeledTensor("norm of the residual stream", norms, ("layer", "token"), labels, unit="norm")


def update_norm_ratios(model: ModelLike, tokens: TextOrTokens, *, source: TextOrTokens | None = None) -> LabeledTensor:
    """Norm of each sublayer output divided by the norm of the residual stream it is added to: sublayer × token."""
    inputs = prepare_inputs(model, tokens, source)
    names, pairs = _sublayer_updates(inputs)
    ratios = torch.stack([out.norm(dim=-1) / resid.norm(dim=-1) for out, resid in pairs])
    title, labels = "norm of sublayer outputs relative to the residual stream", (names, inputs.token_labels)
    return LabeledTensor(title, ratios, ("sublayer", "token"), labels, "|out|/|x|")


def update_cosine_similarities(
    model: ModelLike, tokens: TextOrTokens, *, source: TextOrTokens | None = None
) -> LabeledTensor:
    """Cosine similarity of each sublayer output with the residual stream it is added to: sublayer × token.

    1 means that the output amplifies the residual stream, −1 that it shrinks the residual stream, 0 that it is
    orthogonal to the residual stream.
    """
    inputs = prepare_inputs(model, tokens, source)
    names, pairs = _sublayer_updates(inputs)
    cosines = torch.stack([F.cosine_similarity(out, resid, dim=-1) for out, resid in pairs])
    title, labels = "cosine of sublayer outputs with the residual stream", (names, inputs.token_labels)
    return LabeledTensor(title, cosines, ("sublayer", "token"), labels, "cosine")


def _sublayer_updates(inputs: AnalysisInputs) -> tuple[tuple[str, ...], list[tuple[Tensor, Tensor]]]:
    """Return the sublayer names and, for each, (sublayer output, residual stream it is added to), both (T, d)."""
    sites: dict[str, tuple[str, str]] = {}
    for layer, block in enumerate(inputs.blocks):
        name = f"{inputs.site_prefix}blocks.{layer}"
        sites[f"{layer}.attn"] = f"{name}.attn.out", f"{name}.resid_pre"
        if isinstance(block, Block) and block.cross is not None:
            sites[f"{layer}.cross"] = f"{name}.cross.out", f"{name}.cross.resid_pre"
        before = "resid_mid" if isinstance(block, Block) else "resid_pre"
        sites[f"{layer}.ffn"] = f"{name}.ffn.out", f"{name}.{before}"
    t = inputs.trace(*(site for pair in sites.values() for site in pair))
    return tuple(sites), [(upcast_float32(t[out])[0], upcast_float32(t[resid])[0]) for out, resid in sites.values()]
