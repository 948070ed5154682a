"""Ablation: loss and KL divergence of a model without one block, head, residual, final norm, mask or positions."""

import time
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import InputError
from cutaway.evaluate.functional import kl_divergence_from_logits
from cutaway.lens.adapters import ModelLike, sites
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, prepare_inputs
from cutaway.lens.analysis.patched_logits import Patch, PatchSweep, resumed_sites
from cutaway.lens.analysis.patching import track_progress
from cutaway.lens.edit import EditSpec, edit
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.lens.sites import select_sites
from cutaway.lens.structural_edits import structural_targets, supports_structural_edit
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
    model: ModelLike,
    tokens: TextOrTokens,
    edits: Mapping[str, Mapping[str, EditSpec]] | None = None,
    *,
    source: TextOrTokens | None = None,
    progress: bool = True,
) -> LabeledTensor:
    """Loss of the text, KL divergence from the unedited model and overlap of the top 5 tokens, for each edit.

    `edits` maps a label to edits as `ct.edit` takes them. The default is every structural edit that the model supports:
    for each block, skip it, swap its sublayers, or drop its residual; and drop the final norm, the mask or positions.
    In models of other libraries, only blocks can be skipped.
    Loss and KL divergence are in nats, averaged over the text.
    """
    inputs = prepare_inputs(model, tokens, source)
    inputs.require_head()
    edits = _default_edits(inputs) if edits is None else edits
    if not edits:
        raise InputError("edits is empty, so there is nothing to compare; pass at least one, or leave edits out")
    baseline_logits = inputs.logits()
    rows = [_compute_metrics(inputs, baseline_logits, baseline_logits)]
    for label in track_progress(list(edits), progress, "ablating"):
        with inputs.eval_mode(), edit(inputs.model, edits[label]):
            rows.append(_compute_metrics(inputs, inputs.logits(), baseline_logits))
    labels = (("baseline", *edits), METRICS)
    return LabeledTensor("ablation", torch.stack(rows), ("edit", "metric"), labels, "nats", _no_loss_reason(inputs))


def head_ablation(
    model: ModelLike, tokens: TextOrTokens, *, source: TextOrTokens | None = None, progress: bool = True
) -> LabeledTensor:
    """Increase of the text's loss when each head in turn is zero-ablated: layer × head."""
    inputs = prepare_inputs(model, tokens, source)
    if reason := _no_loss_reason(inputs):
        raise InputError(f"{reason}; use ablation(…), which has KL divergence")
    z_sites = select_sites(sites(inputs.model), [f"{inputs.site_prefix}blocks.*.attn.z"])
    max_heads = max(site.num_heads or 0 for site in z_sites)
    increases = torch.full((len(z_sites), max_heads), float("nan"))
    start = time.monotonic()
    baseline_loss = _next_token_loss(inputs, inputs.logits())
    seconds_per_forward = time.monotonic() - start
    values = inputs.trace(*resumed_sites(inputs), *(site.name for site in z_sites))
    plain_values = {name: values[name].as_subclass(Tensor) for name in values}
    zeros = {site.name: torch.zeros_like(plain_values[site.name]) for site in z_sites}
    cells = [(row, head) for row, site in enumerate(z_sites) for head in range(site.num_heads or 0)]
    positions = tuple((token, token) for token in range(inputs.tokens.shape[1]))
    patch_sets = [[Patch(z_sites[row].name, positions, head)] for row, head in cells]
    sweep = PatchSweep(inputs, plain_values, zeros, patch_sets, position=None)
    if progress:
        sweep.state_cost("head ablation", seconds_per_forward)
    logits = (sweep.logits(batch) for batch in track_progress(sweep.batches, progress, "ablating heads"))
    losses = [_next_token_loss(inputs, row_logits) for batch_logits in logits for row_logits in batch_logits]
    for cell, loss in zip(cells, losses, strict=True):
        increases[cell] = loss - baseline_loss
    names = tuple(site.name.split("blocks.")[1].split(".")[0] for site in z_sites)
    labels = (names, tuple(str(head) for head in range(max_heads)))
    note = f"the loss with all heads is {float(baseline_loss):.3f}"
    return LabeledTensor("head ablation: increase of the loss", increases, ("layer", "head"), labels, "nats", note)


def _default_edits(inputs: AnalysisInputs) -> dict[str, dict[str, EditSpec]]:
    """Return {label: edits} for all structural ablations that the stack of `inputs` supports."""
    if inputs.cutaway_model is None:
        inputs.require_additive_residual("the default of edits for models of other libraries")
        all_sites, prefix = sites(inputs.model), f"{inputs.site_prefix}blocks."
        names = [f"{prefix}{{}}.{sublayer}.out" for sublayer in ("attn", "cross", "ffn")]
        return {  # a block that adds nothing to the residual stream is skipped
            f"without block {layer}": {name.format(layer): "zero" for name in names if name.format(layer) in all_sites}
            for layer in range(len(inputs.blocks))
        }
    targets = structural_targets(inputs.cutaway_model)
    edits: dict[str, dict[str, EditSpec]] = {}
    for (kind, op), label in _EDIT_LABELS.items():
        for name, target in targets.items():
            is_target = target.kind == kind and target.stack is inputs.stack
            if is_target and supports_structural_edit(inputs.cutaway_model, name, op):
                edits[label if target.layer is None else f"{label} {target.layer}"] = {name: op}
    return edits


def _no_loss_reason(inputs: AnalysisInputs) -> str:
    """Return why there is no next-token loss, or an empty string if there is one."""
    if isinstance(inputs.structure, EncoderOnly):
        return "an encoder has no next-token loss"
    return "" if inputs.tokens.shape[1] > 1 else "a text of one token has no next token"


def _next_token_loss(inputs: AnalysisInputs, logits: Tensor) -> Tensor:
    """Mean cross-entropy of predicting each next token."""
    return F.cross_entropy(logits[:-1], inputs.tokens[0, 1:])


def _compute_metrics(inputs: AnalysisInputs, logits: Tensor, baseline_logits: Tensor) -> Tensor:
    """Return a tensor of loss, KL divergence and top-5 overlap. Both logits are (T, V)."""
    kl = kl_divergence_from_logits(baseline_logits, logits).mean()
    k = min(TOP_K, logits.shape[-1])
    top, baseline_top = logits.topk(k).indices, baseline_logits.topk(k).indices  # (T, k)
    overlap = (top[:, :, None] == baseline_top[:, None, :]).any(-1).float().mean()
    loss = kl.new_tensor(float("nan")) if _no_loss_reason(inputs) else _next_token_loss(inputs, logits)
    return torch.stack((loss, kl, overlap.to(kl)))
