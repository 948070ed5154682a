"""What a model loses when a part of it is taken away: a block, a head, a norm, the mask, positions."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens import structure
from cutaway.lens.choice import chosen
from cutaway.lens.edit import What, edit
from cutaway.lens.readings.patching import shown_as_bar
from cutaway.lens.readings.reading import Reading
from cutaway.lens.readings.subject import Subject, Text, resting, subject, wide
from cutaway.lens.sites import sites
from cutaway.measure.equations import kl_of_logits
from cutaway.model import EncoderOnly

MEASURES = ("loss", "KL", "top-5 kept")
BEST = 5
SAID = {
    ("block", "skip"): "without block",
    ("block", "swap"): "FFN before attention in block",
    ("block", "no_residual"): "no residual in block",
    ("final_norm", "drop"): "without the final norm",
    ("mask", "drop"): "without the mask",
    ("positions", "drop"): "without positions",
}


def ablation(
    model: Any,
    tokens: Text,
    changes: Mapping[str, Mapping[str, What]] | None = None,
    *,
    source: Text | None = None,
    progress: bool = True,
) -> Reading:
    """The text's loss with each change, how far the distributions move (KL), and how much of the top five stays.

    `changes` are edits by a name of yours; unless given, what this model has is taken away part by part: each block,
    its order, its residual, the final norm, the mask, positions. All in nats, averaged over the text.
    """
    this = subject(model, tokens, source)
    this.need_head()
    asked = {name: dict(each) for name, each in (usual(this) if changes is None else changes).items()}
    if not asked:
        raise InputError("no change was given, so there is nothing to compare; name one, or leave changes out")
    with resting(this.model):
        plain = wide(this.run())[0]
        rows = [measured(this, plain, plain)]
        for name in shown_as_bar(list(asked), progress, "taking away"):
            with edit(this.model, asked[name]):
                rows.append(measured(this, wide(this.run())[0], plain))
    labels = ("as it is", *asked)
    note = "" if has_loss(this) else f"{lossless(this)}, so there is no loss"
    return Reading("what a change does", torch.stack(rows), ("change", "measure"), (labels, MEASURES), "nats", note)


def head_ablation(model: Any, tokens: Text, *, source: Text | None = None, progress: bool = True) -> Reading:
    """How much the text's loss rises without each head: layer × head."""
    this = subject(model, tokens, source)
    if not has_loss(this):
        raise InputError(f"{lossless(this)}, so there is no loss to rise; use ablation(…), which has KL")
    asked = chosen(sites(this.model), [f"{this.prefix}blocks.*.attn.z"])
    most = max(site.heads or 0 for site in asked)
    found = torch.full((len(asked), most), float("nan"))
    with resting(this.model):
        plain = loss(this, wide(this.run())[0])
        for row, site in enumerate(shown_as_bar(asked, progress, "without each head")):
            for head in range(site.heads or 0):
                with edit(this.model, {site.name: {"do": "zero", "heads": [head]}}):
                    found[row, head] = loss(this, wide(this.run())[0]) - plain
    names = tuple(site.name.split("blocks.")[1].split(".")[0] for site in asked)
    labels = (names, tuple(str(head) for head in range(most)))
    note = f"with all heads the loss is {float(plain):.3f}"
    return Reading("how much the loss rises without a head", found, ("layer", "head"), labels, "nats", note)


def usual(this: Subject) -> dict[str, dict[str, What]]:
    """Everything of this model that can be taken away."""
    found: dict[str, dict[str, What]] = {}
    for (kind, how), said in SAID.items():
        for name, (other, stack, layer) in structure.places(this.model).items():
            if other == kind and stack is this.stack and structure.can(this.model, name, how):
                found[said if layer is None else f"{said} {layer}"] = {name: how}
    return found


def has_loss(this: Subject) -> bool:
    return not isinstance(this.model, EncoderOnly) and this.tokens.shape[1] > 1


def lossless(this: Subject) -> str:
    """Why there is no loss."""
    what = "an encoder's text" if isinstance(this.model, EncoderOnly) else "a text of one token"
    return f"{what} has no next token"


def loss(this: Subject, logits: Tensor) -> Tensor:
    """Of each next token, averaged."""
    return F.cross_entropy(logits[:-1], this.tokens[0, 1:])


def measured(this: Subject, logits: Tensor, plain: Tensor) -> Tensor:
    apart: Tensor = kl_of_logits(plain, logits).mean()
    count = min(BEST, logits.shape[-1])
    mine, theirs = logits.topk(count).indices, plain.topk(count).indices
    kept = (mine[:, :, None] == theirs[:, None, :]).any(-1).float().mean()
    return torch.stack(
        (loss(this, logits) if has_loss(this) else apart.new_tensor(float("nan")), apart, kept.to(apart))
    )
