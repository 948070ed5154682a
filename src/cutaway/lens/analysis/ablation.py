"""Ablation: loss and KL divergence without a block, a head, a residual, the final norm, the mask or positions."""

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
    """Loss of the text, KL divergence from the unedited model and overlap of the top 5 tokens, for each edit.

    `edits` maps a label to the edits of `ct.edit`. Default: all structural edits that the model supports (skip each
    block, swap its sublayers, drop its residual, the final norm, the mask, positions). In nats, averaged over the text.
    """
    inputs = prepare_inputs(model, tokens, source)
    inputs.require_head()
    edits_by_label = {label: dict(spec) for label, spec in (_default_edits(inputs) if edits is None else edits).items()}
    if not edits_by_label:
        raise InputError("edits is empty, so there is nothing to compare; pass at least one, or leave edits out")
    with eval_mode(inputs.model):
        baseline_logits = upcast_float32(inputs.run())[0]
        rows = [_compute_metrics(inputs, baseline_logits, baseline_logits)]
        for label in track_progress(list(edits_by_label), progress, "ablating"):
            with edit(inputs.model, edits_by_label[label]):
                rows.append(_compute_metrics(inputs, upcast_float32(inputs.run())[0], baseline_logits))
    labels = ("baseline", *edits_by_label)
    note = "" if _has_loss(inputs) else _no_loss_reason(inputs)
    return LabeledTensor("ablation", torch.stack(rows), ("edit", "metric"), (labels, METRICS), "nats", note)


def head_ablation(
    model: Any, tokens: TextOrTokens, *, source: TextOrTokens | None = None, progress: bool = True
) -> LabeledTensor:
    """Increase of the text's loss when a head is zero-ablated: layer × head."""
    inputs = prepare_inputs(model, tokens, source)
    if not _has_loss(inputs):
        raise InputError(f"{_no_loss_reason(inputs)}; use ablation(…), which has KL divergence")
    z_sites = select_sites(sites(inputs.model), [f"{inputs.site_prefix}blocks.*.attn.z"])
    max_heads = max(site.num_heads or 0 for site in z_sites)
    increases = torch.full((len(z_sites), max_heads), float("nan"))
    with eval_mode(inputs.model):
        baseline_loss = _next_token_loss(inputs, upcast_float32(inputs.run())[0])
        for row, site in enumerate(track_progress(z_sites, progress, "ablating heads")):
            for head in range(site.num_heads or 0):
                with edit(inputs.model, {site.name: {"do": "zero", "heads": [head]}}):
                    increases[row, head] = _next_token_loss(inputs, upcast_float32(inputs.run())[0]) - baseline_loss
    names = tuple(site.name.split("blocks.")[1].split(".")[0] for site in z_sites)
    labels = (names, tuple(str(head) for head in range(max_heads)))
    note = f"the loss with all heads is {float(baseline_loss):.3f}"
    return LabeledTensor("head ablation: increase of the loss", increases, ("layer", "head"), labels, "nats", note)


def _default_edits(inputs: AnalysisInputs) -> dict[str, dict[str, EditSpec]]:
    """Return all structural ablations that this model supports."""
    edits: dict[str, dict[str, EditSpec]] = {}
    for (kind, op), label in _EDIT_LABELS.items():
        for name, (target_kind, stack, layer) in structural_edits.structural_targets(inputs.model).items():
            if (
                target_kind == kind
                and stack is inputs.stack
                and structural_edits.supports_structural_edit(inputs.model, name, op)
            ):
                edits[label if layer is None else f"{label} {layer}"] = {name: op}
    return edits


def _has_loss(inputs: AnalysisInputs) -> bool:
    return not isinstance(inputs.model, EncoderOnly) and inputs.tokens.shape[1] > 1


def _no_loss_reason(inputs: AnalysisInputs) -> str:
    if isinstance(inputs.model, EncoderOnly):
        return "an encoder has no next-token loss"
    return "a text of one token has no next token"


def _next_token_loss(inputs: AnalysisInputs, logits: Tensor) -> Tensor:
    """Mean cross-entropy of the next tokens."""
    return F.cross_entropy(logits[:-1], inputs.tokens[0, 1:])


def _compute_metrics(inputs: AnalysisInputs, logits: Tensor, baseline_logits: Tensor) -> Tensor:
    """Return (loss, KL, top-5 overlap); logits are (T, V)."""
    kl: Tensor = kl_divergence_from_logits(baseline_logits, logits).mean()
    k = min(TOP_K, logits.shape[-1])
    top, baseline_top = logits.topk(k).indices, baseline_logits.topk(k).indices  # (T, k)
    overlap = (top[:, :, None] == baseline_top[:, None, :]).any(-1).float().mean()
    loss = _next_token_loss(inputs, logits) if _has_loss(inputs) else kl.new_tensor(float("nan"))
    return torch.stack((loss, kl, overlap.to(kl)))
