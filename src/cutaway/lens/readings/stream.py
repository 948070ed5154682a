"""The stream by depth: how long its vectors are, and what each sublayer does to them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.lens.readings.reading import Reading
from cutaway.lens.readings.subject import Subject, Text, resting, subject, wide
from cutaway.lens.trace import trace
from cutaway.model.block import Block


def stream_norms(model: Any, tokens: Text, *, source: Text | None = None) -> Reading:
    """Length of each token's vector after the embedding and after every block."""
    this = subject(model, tokens, source)
    names = [f"{this.prefix}embed", *(f"{this.prefix}blocks.{at}.resid_post" for at in range(len(this.stack.blocks)))]
    with resting(this.model), trace(this.model, *names) as t:
        this.run()
    lengths = torch.stack([wide(t[name])[0].norm(dim=-1) for name in names])
    labels = ("embed", *(str(layer) for layer in range(len(this.stack.blocks))))
    return Reading("length of the stream's vectors", lengths, ("layer", "token"), (labels, this.words), unit="norm")


def update_sizes(model: Any, tokens: Text, *, source: Text | None = None) -> Reading:
    """|out| / |stream|: how much each sublayer adds, beside what it adds it to."""
    this = subject(model, tokens, source)
    names, pairs = updates(this)
    sizes = torch.stack([added.norm(dim=-1) / stream.norm(dim=-1) for added, stream in pairs])
    return Reading(
        "size of what is added to the stream", sizes, ("sublayer", "token"), (names, this.words), "|out|/|x|"
    )


def update_cosines(model: Any, tokens: Text, *, source: Text | None = None) -> Reading:
    """Cosine of what each sublayer adds to the stream: 1 says it again, −1 takes it back, 0 is new."""
    this = subject(model, tokens, source)
    names, pairs = updates(this)
    cosines = torch.stack([F.cosine_similarity(added, stream, dim=-1) for added, stream in pairs])
    return Reading(
        "direction of what is added to the stream", cosines, ("sublayer", "token"), (names, this.words), "cosine"
    )


def updates(this: Subject) -> tuple[tuple[str, ...], list[tuple[Tensor, Tensor]]]:
    """The sublayers' names; what each adds and the stream it is added to, (T, d)."""
    sites: dict[str, tuple[str, str]] = {}
    for layer, block in enumerate(this.stack.blocks):
        here = f"{this.prefix}blocks.{layer}"
        sites[f"{layer}.attn"] = f"{here}.attn.out", f"{here}.resid_pre"
        if getattr(block, "cross", None) is not None:
            sites[f"{layer}.cross"] = f"{here}.cross.out", f"{here}.cross.resid_pre"
        before = "resid_mid" if isinstance(block, Block) else "resid_pre"
        sites[f"{layer}.ffn"] = f"{here}.ffn.out", f"{here}.{before}"
    with resting(this.model), trace(this.model, *(name for pair in sites.values() for name in pair)) as t:
        this.run()
    return tuple(sites), [(wide(t[added])[0], wide(t[stream])[0]) for added, stream in sites.values()]
