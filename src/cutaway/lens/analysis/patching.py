"""Activation patching and path patching: put activations of a clean run into a corrupted run.

The metric is the logit of `answer_token`, or the difference of that logit to the logit of `incorrect_token`.
Scores are the recovered fraction of the metric, (patched − corrupted) / (clean − corrupted): 1 means full recovery, 0
means none.
"""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.adapters import ModelLike, sites
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, TokenOrId, prepare_inputs, upcast_float32
from cutaway.lens.analysis.patched_logits import Patch, PatchSweep, resumed_sites
from cutaway.lens.edit import EditSpec, edit
from cutaway.lens.hooks import index_tensor
from cutaway.lens.interventions import Intervention
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.lens.sites import Indices, Site, materialize_indices, resid_before_sublayer, resolve_heads, select_sites
from cutaway.model.block import ParallelBlock

Item = TypeVar("Item")


def activation_patching(
    model: ModelLike,
    clean: TextOrTokens,
    corrupted: TextOrTokens,
    answer_token: TokenOrId,
    *,
    incorrect_token: TokenOrId | None = None,
    site: str = "resid_post",
    by_head: bool = False,
    position: int = -1,
    layers: Indices | None = None,
    source: tuple[TextOrTokens, TextOrTokens] | None = None,
    progress: bool = True,
) -> LabeledTensor:
    """Patch the clean activation at `site` into the corrupted run: layer × token, or layer × head with `by_head`.

    The values are the recovered fraction of the metric, which is 0 in the corrupted run and 1 in the clean run. The
    metric is the logit of `answer_token` at `position`, minus the logit of `incorrect_token` if given.

    Both texts must have the same number of tokens. For an encoder-decoder, `source` is the pair of clean and corrupted
    encoder inputs.
    """
    experiment = PatchingExperiment(model, clean, corrupted, answer_token, incorrect_token, position, source)
    layer_sites = experiment.select_layer_sites(site, layers)
    axis = "H" if by_head else "T"
    if any(axis not in layer_site.axes for layer_site in layer_sites):
        missing = "head axis; use attn.z" if by_head else "token axis; use resid_post"
        raise InputError(f"'{site}' has no {missing}")
    if by_head and len({layer_site.num_heads for layer_site in layer_sites}) > 1:
        raise InputError("the layers differ in their number of heads; pass layers with equal numbers of heads")
    tokens = tuple((token, token) for token in range(experiment.clean.tokens.shape[1]))
    patches = [
        Patch(layer_site.name, tokens, index) if by_head else Patch(layer_site.name, (tokens[index],))
        for layer_site in layer_sites
        for index in range((layer_site.num_heads or 0) if by_head else len(tokens))
    ]
    sweep = experiment.plan_sweep(layer_sites, patches)
    if progress:
        sweep.state_cost(f"activation patching of {site}", experiment.seconds_per_forward)
    logits = (sweep.logits(batch) for batch in track_progress(sweep.batches, progress, f"patching {site}"))
    fractions = torch.cat([experiment.to_recovered_fraction(experiment.to_metric(values)) for values in logits])
    rows = fractions.view(len(layer_sites), -1)
    labels = tuple(str(head) for head in range(rows.shape[1])) if by_head else experiment.token_labels
    names = tuple(layer_site.name.removesuffix(f".{site}").replace("blocks.", "") for layer_site in layer_sites)
    title = f"activation patching of {site}: recovered fraction of {experiment.title}"
    axes = ("layer", "head" if by_head else "token")
    return LabeledTensor(title, rows, axes, (names, labels), note=experiment.note)


class PatchingExperiment:
    """Clean and corrupted inputs of one model, and the logit metric that is compared."""

    def __init__(
        self,
        model: ModelLike,
        clean: TextOrTokens,
        corrupted: TextOrTokens,
        answer_token: TokenOrId,
        incorrect_token: TokenOrId | None,
        position: int,
        source: tuple[TextOrTokens, TextOrTokens] | None,
    ) -> None:
        clean_source, corrupted_source = (None, None) if source is None else source
        self.clean = prepare_inputs(model, clean, clean_source)
        self.corrupted = prepare_inputs(model, corrupted, corrupted_source)
        pairs = ((self.clean.tokens, self.corrupted.tokens), (self.clean.source, self.corrupted.source))
        for clean_ids, corrupted_ids in pairs:
            if clean_ids is not None and corrupted_ids is not None and clean_ids.shape != corrupted_ids.shape:
                lengths = f"{clean_ids.shape[1]} and {corrupted_ids.shape[1]} tokens"
                raise InputError(f"clean and corrupted have {lengths}; pass texts of equal length")
        self.clean.require_head()
        self.tokens = [self.clean.resolve_token(answer_token, "answer_token")]
        """The answer token, and the incorrect token if there is one."""
        if incorrect_token is not None:
            self.tokens.append(self.clean.resolve_token(incorrect_token, "incorrect_token"))
        self.position = self.clean.resolve_position(position)
        self.all_sites = sites(self.clean.model)
        self.clean_metric = self.logit_metric(self.clean.run())
        start = time.monotonic()
        self.corrupted_metric = self.logit_metric(self.corrupted.run())
        self.seconds_per_forward = time.monotonic() - start
        if torch.equal(self.clean_metric, self.corrupted_metric):
            raise InputError("clean and corrupted have the same metric, so no patch can recover it; pass other texts")
        answer, *incorrect = self.clean.decode_tokens(self.tokens)
        self.title = f"the logit of {answer!r}" if not incorrect else f"the logits {answer!r} − {incorrect[0]!r}"
        clean_value, corrupted_value = float(self.clean_metric), float(self.corrupted_metric)
        self.note = f"metric: clean {clean_value:.3f}, corrupted {corrupted_value:.3f}; 1 is full recovery"

    @property
    def token_labels(self) -> tuple[str, ...]:
        pairs = zip(self.clean.token_labels, self.corrupted.token_labels, strict=True)
        return tuple(clean if clean == corrupted else f"{clean}/{corrupted}" for clean, corrupted in pairs)

    def select_layer_sites(self, site: str, layers: Indices | None) -> list[Site]:
        return select_sites(self.all_sites, [f"{self.clean.site_prefix}blocks.*.{site}"], layers)

    def logit_metric(self, logits: Tensor) -> Tensor:
        """Return the logit of the answer, minus that of the incorrect token if there is one: (B, T, V) → (B,)."""
        return self.to_metric(upcast_float32(logits)[:, self.position])

    def to_metric(self, logits: Tensor) -> Tensor:
        """Return the metric from the logits at `position`: (B, V) → (B,)."""
        answer, *incorrect = logits[:, self.tokens].unbind(-1)
        return answer - incorrect[0] if incorrect else answer

    def to_recovered_fraction(self, metric: Tensor) -> Tensor:
        return (metric - self.corrupted_metric) / (self.clean_metric - self.corrupted_metric)

    def plan_sweep(self, patched_sites: Iterable[Site], patches: Iterable[Patch]) -> PatchSweep:
        """Plan forward passes of the corrupted text, each with one patch from the clean text."""
        clean_values = self.cache_activations(self.clean, patched_sites)
        names = resumed_sites(self.corrupted)
        corrupted_values = self.cache_activations(self.corrupted, [self.all_sites[name] for name in names])
        patch_sets = [[patch] for patch in patches]
        return PatchSweep(self.corrupted, corrupted_values, clean_values, patch_sets, self.position)

    def cache_activations(self, inputs: AnalysisInputs, sites: Iterable[Site]) -> dict[str, Tensor]:
        """Run the model on `inputs`, and return the activations at these sites by name."""
        if not (names := [site.name for site in sites]):
            return {}
        t = inputs.trace(*names)
        return {name: t[name].as_subclass(Tensor) for name in t}

    def recovered_fraction(self, edits: Mapping[str, EditSpec]) -> Tensor:
        """Run the corrupted inputs with these edits. Return the recovered fraction of the metric, (1,)."""
        with self.clean.eval_mode(), edit(self.clean.model, edits):
            return self.to_recovered_fraction(self.logit_metric(self.corrupted.run()))


def track_progress(items: list[Item], progress: bool, description: str) -> Iterable[Item]:
    """Return the items, with a progress bar on an interactive terminal. The bar disappears at the end."""
    if not progress or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description, transient=True, console=Console(stderr=True))


def path_patching(
    model: ModelLike,
    clean: TextOrTokens,
    corrupted: TextOrTokens,
    answer_token: TokenOrId,
    sender: str,
    *,
    receivers: Sequence[str] = ("attn.out", "ffn.out", "logits"),
    heads: Indices | None = None,
    incorrect_token: TokenOrId | None = None,
    position: int = -1,
    source: tuple[TextOrTokens, TextOrTokens] | None = None,
    progress: bool = True,
) -> LabeledTensor:
    """Recovered fraction of the metric if only the direct path from a sender to one receiver is clean, per receiver.

    The metric is the same as in `activation_patching`.
    `sender` is a site that writes to the residual stream (`blocks.2.attn.out`), or `blocks.2.attn.z` with `heads`. The
    difference between the sender's clean and corrupted value is added to the input of one receiver alone, and the
    receiver's new output is patched into the corrupted run. For the receiver `logits`, the difference is added to the
    residual stream after the last block.
    """
    heads = materialize_indices(heads, "heads")
    experiment = PatchingExperiment(model, clean, corrupted, answer_token, incorrect_token, position, source)
    experiment.clean.require_additive_residual("path patching")
    matches = select_sites(experiment.all_sites, [sender])
    sender_site = matches[0]
    writer = experiment.all_sites.get(sender_site.name.rsplit(".", 1)[0] + ".out")
    is_in_stack = sender_site.name.startswith(f"{experiment.clean.site_prefix}blocks.")
    if writer is None or not is_in_stack or len(matches) > 1:
        raise InputError(f"'{sender}' is not one site that writes to the residual stream; pass e.g. blocks.0.attn.out")
    order = list(experiment.all_sites)
    # In a parallel block the FFN has the same input as attention, so it does not read the output of attention.
    is_parallel = isinstance(experiment.clean.blocks[writer.layer or 0], ParallelBlock)
    receiver_sites = [
        site
        for site in select_sites(experiment.all_sites, receivers)
        if order.index(site.name) > order.index(writer.name) and not (is_parallel and site.layer == writer.layer)
    ]
    if not receiver_sites:
        raise InputError(f"none of {', '.join(receivers)} reads {sender}; pass a receiver after the sender")
    delta = _sender_difference(experiment, sender_site, writer, heads)
    scores = [
        _patch_receiver(experiment, site, delta)
        for site in track_progress(receiver_sites, progress, f"path patching from {sender}")
    ]
    names = tuple(site.name for site in receiver_sites)
    head_text = "" if heads is None else f", heads {', '.join(map(str, resolve_heads(sender_site, heads)))}"
    title = f"path patching from {sender}{head_text}: recovered fraction of {experiment.title}"
    return LabeledTensor(title, torch.cat(scores), ("receiver",), (names,), note=experiment.note)


def _sender_difference(experiment: PatchingExperiment, sender: Site, writer: Site, heads: Indices | None) -> Tensor:
    """Return the writer's output with the clean sender value minus the writer's output in the corrupted run."""
    clean = experiment.cache_activations(experiment.clean, [sender])[sender.name]
    corrupted_output = experiment.cache_activations(experiment.corrupted, [writer])[writer.name]
    patch = Intervention("replace", clean)
    if heads is not None:
        if "H" not in sender.axes:
            raise InputError(f"heads is set, but sender {sender.name} has no head axis; use attn.z, or leave heads out")
        indices = resolve_heads(sender, heads)
        value = clean.index_select(sender.axes.index("H"), index_tensor(indices, clean))
        patch = Intervention("replace", value, heads=indices)
    with experiment.clean.eval_mode(), edit(experiment.clean.model, {sender.name: patch}):
        t = experiment.corrupted.trace(writer.name)
    return t[writer.name].as_subclass(Tensor) - corrupted_output


def _patch_receiver(experiment: PatchingExperiment, receiver: Site, delta: Tensor) -> Tensor:
    """Return the recovered fraction when only this receiver reads the sender's difference."""
    prefix = experiment.clean.site_prefix
    if receiver.layer is None:
        last = f"{prefix}blocks.{len(experiment.clean.stack.blocks) - 1}.resid_post"
        return experiment.recovered_fraction({last: lambda value: value + delta})
    before = resid_before_sublayer(receiver, experiment.clean.stack)
    edits: dict[str, EditSpec] = {before: lambda value: value + delta}
    with experiment.clean.eval_mode(), edit(experiment.clean.model, edits):
        t = experiment.corrupted.trace(receiver.name)
    return experiment.recovered_fraction({receiver.name: t[receiver.name].as_subclass(Tensor)})
