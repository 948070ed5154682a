"""What a model loses when a part of it is taken away: a block, a head, a norm, the mask, positions."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import InputError
from cutaway.evaluate.functional import kl_divergence_from_logits
from cutaway.lens import structural_edits
from cutaway.lens.adapters import sites
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, eval_mode, prepare_inputs, upcast_float32
from cutaway.lens.analysis.labeled_tensor import LabeledTensor
from cutaway.lens.analysis.patching import track_progress
from cutaway.lens.edit import EditSpec, edit
from cutaway.lens.sites import select_sites
from cutaway.model import EncoderOnly

METRICS = ("loss", "KL", "top-5 overlap")
TOP_K = 5
_EDIT_LABELS = {
    ("block", "skip"): "without block",
    ("block", "swap"): "FFN before attention in block",
    ("block", "no_residual"): "no residual in block",
    ("final_norm", "drop"): "without the final norm",
    ("mask", "drop"): "without the mask",
    ("positions", "drop"): "without positions",
}


def ablation(
    model: Any,
    tokens: TextOrTokens,
    edits: Mapping[str, Mapping[str, EditSpec]] | None = None,
    *,
    source: TextOrTokens | None = None,
    progress: bool = True,
) -> LabeledTensor:
    """The text's loss with each change, how far the distributions move (KL), and how much of the top five stays.

    `edits` are edits by a name of yours; unless given, what this model has is taken away part by part: each block,
    its order, its residual, the final norm, the mask, positions. All in nats, averaged over the text.
    """
    this = prepare_inputs(model, tokens, source)
    this.require_head()
    asked = {name: dict(each) for name, each in (_default_edits(this) if edits is None else edits).items()}
    if not asked:
        raise InputError("no change was given, so there is nothing to compare; name one, or leave edits out")
    with eval_mode(this.model):
        plain = upcast_float32(this.run())[0]
        rows = [_compute_metrics(this, plain, plain)]
        for name in track_progress(list(asked), progress, "taking away"):
            with edit(this.model, asked[name]):
                rows.append(_compute_metrics(this, upcast_float32(this.run())[0], plain))
    labels = ("baseline", *asked)
    note = "" if _has_loss(this) else f"{_no_loss_reason(this)}, so there is no loss"
    return LabeledTensor("what a change does", torch.stack(rows), ("edit", "metric"), (labels, METRICS), "nats", note)


def head_ablation(
    model: Any, tokens: TextOrTokens, *, source: TextOrTokens | None = None, progress: bool = True
) -> LabeledTensor:
    """How much the text's loss rises without each head: layer × head."""
    this = prepare_inputs(model, tokens, source)
    if not _has_loss(this):
        raise InputError(f"{_no_loss_reason(this)}, so there is no loss to rise; use ablation(…), which has KL")
    asked = select_sites(sites(this.model), [f"{this.site_prefix}blocks.*.attn.z"])
    most = max(site.num_heads or 0 for site in asked)
    found = torch.full((len(asked), most), float("nan"))
    with eval_mode(this.model):
        plain = _next_token_loss(this, upcast_float32(this.run())[0])
        for row, site in enumerate(track_progress(asked, progress, "without each head")):
            for head in range(site.num_heads or 0):
                with edit(this.model, {site.name: {"do": "zero", "heads": [head]}}):
                    found[row, head] = _next_token_loss(this, upcast_float32(this.run())[0]) - plain
    names = tuple(site.name.split("blocks.")[1].split(".")[0] for site in asked)
    labels = (names, tuple(str(head) for head in range(most)))
    note = f"with all heads the loss is {float(plain):.3f}"
    return LabeledTensor("how much the loss rises without a head", found, ("layer", "head"), labels, "nats", note)


def _default_edits(inputs: AnalysisInputs) -> dict[str, dict[str, EditSpec]]:
    """Everything of this model that can be taken away."""
    found: dict[str, dict[str, EditSpec]] = {}
    for (kind, how), said in _EDIT_LABELS.items():
        for name, (other, stack, layer) in structural_edits.structural_targets(inputs.model).items():
            if (
                other == kind
                and stack is inputs.stack
                and structural_edits.supports_structural_edit(inputs.model, name, how)
            ):
                found[said if layer is None else f"{said} {layer}"] = {name: how}
    return found


def _has_loss(inputs: AnalysisInputs) -> bool:
    return not isinstance(inputs.model, EncoderOnly) and inputs.tokens.shape[1] > 1


def _no_loss_reason(inputs: AnalysisInputs) -> str:
    """Why there is no loss."""
    what = "an encoder's text" if isinstance(inputs.model, EncoderOnly) else "a text of one token"
    return f"{what} has no next token"


def _next_token_loss(inputs: AnalysisInputs, logits: Tensor) -> Tensor:
    """Of each next token, averaged."""
    return F.cross_entropy(logits[:-1], inputs.tokens[0, 1:])


def _compute_metrics(inputs: AnalysisInputs, logits: Tensor, baseline_logits: Tensor) -> Tensor:
    apart: Tensor = kl_divergence_from_logits(baseline_logits, logits).mean()
    count = min(TOP_K, logits.shape[-1])
    mine, theirs = logits.topk(count).indices, baseline_logits.topk(count).indices
    kept = (mine[:, :, None] == theirs[:, None, :]).any(-1).float().mean()
    return torch.stack(
        (
            _next_token_loss(inputs, logits) if _has_loss(inputs) else apart.new_tensor(float("nan")),
            apart,
            kept.to(apart),
        )
    )
