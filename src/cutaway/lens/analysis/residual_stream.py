"""The stream by depth: how long its vectors are, and what each sublayer does to them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, eval_mode, prepare_inputs, upcast_float32
from cutaway.lens.analysis.labeled_tensor import LabeledTensor
from cutaway.lens.trace import trace
from cutaway.model.block import Block


def resid_norms(model: Any, tokens: TextOrTokens, *, source: TextOrTokens | None = None) -> LabeledTensor:
    """Length of each token's vector after the embedding and after every block."""
    this = prepare_inputs(model, tokens, source)
    names = [
        f"{this.site_prefix}embed",
        *(f"{this.site_prefix}blocks.{at}.resid_post" for at in range(len(this.stack.blocks))),
    ]
    with eval_mode(this.model), trace(this.model, *names) as t:
        this.run()
    lengths = torch.stack([upcast_float32(t[name])[0].norm(dim=-1) for name in names])
    labels = ("embed", *(str(layer) for layer in range(len(this.stack.blocks))))
    return LabeledTensor(
        "length of the stream's vectors", lengths, ("layer", "token"), (labels, this.token_labels), unit="norm"
    )


def update_norm_ratios(model: Any, tokens: TextOrTokens, *, source: TextOrTokens | None = None) -> LabeledTensor:
    """|out| / |stream|: how much each sublayer adds, beside what it adds it to."""
    this = prepare_inputs(model, tokens, source)
    names, pairs = _sublayer_updates(this)
    sizes = torch.stack([added.norm(dim=-1) / stream.norm(dim=-1) for added, stream in pairs])
    return LabeledTensor(
        "size of what is added to the stream", sizes, ("sublayer", "token"), (names, this.token_labels), "|out|/|x|"
    )


def update_cosine_similarities(
    model: Any, tokens: TextOrTokens, *, source: TextOrTokens | None = None
) -> LabeledTensor:
    """Cosine of what each sublayer adds to the stream: 1 says it again, −1 takes it back, 0 is new."""
    this = prepare_inputs(model, tokens, source)
    names, pairs = _sublayer_updates(this)
    cosines = torch.stack([F.cosine_similarity(added, stream, dim=-1) for added, stream in pairs])
    return LabeledTensor(
        "direction of what is added to the stream", cosines, ("sublayer", "token"), (names, this.token_labels), "cosine"
    )


def _sublayer_updates(inputs: AnalysisInputs) -> tuple[tuple[str, ...], list[tuple[Tensor, Tensor]]]:
    """The sublayers' names; what each adds and the stream it is added to, (T, d)."""
    sites: dict[str, tuple[str, str]] = {}
    for layer, block in enumerate(inputs.stack.blocks):
        here = f"{inputs.site_prefix}blocks.{layer}"
        sites[f"{layer}.attn"] = f"{here}.attn.out", f"{here}.resid_pre"
        if getattr(block, "cross", None) is not None:
            sites[f"{layer}.cross"] = f"{here}.cross.out", f"{here}.cross.resid_pre"
        before = "resid_mid" if isinstance(block, Block) else "resid_pre"
        sites[f"{layer}.ffn"] = f"{here}.ffn.out", f"{here}.{before}"
    with eval_mode(inputs.model), trace(inputs.model, *(name for pair in sites.values() for name in pair)) as t:
        inputs.run()
    return tuple(sites), [
        (upcast_float32(t[added])[0], upcast_float32(t[stream])[0]) for added, stream in sites.values()
    ]
