"""Which site carries the answer: values of one run put into another, place by place.

A score of 1 means that the answer is all there, 0 that nothing is: (patched − corrupt) / (clean − corrupt), of one
token's logit, or of the difference of two.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.adapters import sites
from cutaway.lens.analysis.inputs import (
    AnalysisInputs,
    TextOrTokens,
    TokenOrId,
    eval_mode,
    prepare_inputs,
    upcast_float32,
)
from cutaway.lens.analysis.labeled_tensor import LabeledTensor
from cutaway.lens.edit import edit
from cutaway.lens.hooks import index_tensor
from cutaway.lens.sites import Indices, Site, materialize_indices, resid_before_sublayer, resolve_heads, select_sites
from cutaway.lens.trace import trace
from cutaway.model.block import Block

Item = TypeVar("Item")
PATCH_BATCH_SIZE = 32
"""Cells of the matrix that are computed in one pass, each as a row of its batch."""


def activation_patching(
    model: Any,
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
    """Put each layer's clean value at `site` into the corrupt run, one position at a time (or one head): layer × place.

    The texts must be of one length. An encoder-decoder reads `source`: the clean and the corrupt one.
    """
    pair = PatchingExperiment(model, clean, corrupted, answer_token, incorrect_token, position, source)
    asked = pair.select_layer_sites(site, layers)
    axis = "H" if by_head else "T"
    if any(axis not in each.axes for each in asked):
        missing = "heads; take attn.z" if by_head else "tokens; take resid_post"
        raise InputError(f"'{site}' has no axis for {missing}")
    kept = pair.cache_activations(pair.clean, asked)
    rows = []
    for each in track_progress(asked, progress, f"patching {site}"):
        value, place = kept[each.name], each.axes.index(axis)
        cells = range(value.shape[place])
        patches = [
            BatchedPatch(value, place, cells[at : at + PATCH_BATCH_SIZE])
            for at in range(0, len(cells), PATCH_BATCH_SIZE)
        ]
        rows.append(torch.cat([pair.recovered_fraction({each.name: patch}, patch.batch_size) for patch in patches]))
    if len({len(row) for row in rows}) > 1:
        raise InputError("layers differ in their heads, so they make no matrix; choose layers that are alike")
    labels = tuple(str(head) for head in range(len(rows[0]))) if by_head else pair.token_labels
    names = tuple(each.name.removesuffix(f".{site}").replace("blocks.", "") for each in asked)
    title = f"what of {pair.title} comes back with the clean {site}"
    return LabeledTensor(
        title, torch.stack(rows), ("layer", "head" if by_head else "token"), (names, labels), note=pair.note
    )


class PatchingExperiment:
    """A clean and a corrupt run of one model, and the answer that is looked for."""

    def __init__(
        self,
        model: Any,
        clean: TextOrTokens,
        corrupted: TextOrTokens,
        answer_token: TokenOrId,
        incorrect_token: TokenOrId | None,
        position: int,
        source: tuple[TextOrTokens, TextOrTokens] | None,
    ) -> None:
        first, second = (None, None) if source is None else source
        self.clean, self.corrupted = prepare_inputs(model, clean, first), prepare_inputs(model, corrupted, second)
        texts = (
            (self.clean.tokens, self.corrupted.tokens, "texts"),
            (self.clean.source, self.corrupted.source, "sources"),
        )
        for mine, other, what in texts:
            if mine is not None and other is not None and mine.shape != other.shape:
                raise InputError(
                    f"the {what} have {mine.shape[1]} and {other.shape[1]} tokens; a value is put where it came from, "
                    "so give texts of one length"
                )
        self.clean.require_head()
        self.answer_token = self.clean.resolve_token(answer_token, "answer_token")
        self.incorrect_token = (
            None if incorrect_token is None else self.clean.resolve_token(incorrect_token, "incorrect_token")
        )
        self.position = self.clean.resolve_position(position)
        self.all_sites = sites(self.clean.model)
        with eval_mode(self.clean.model):
            self.clean_metric, self.corrupted_metric = (
                self.logit_metric(self.clean.run()),
                self.logit_metric(self.corrupted.run()),
            )
        if torch.equal(self.clean_metric, self.corrupted_metric):
            raise InputError("both texts give the same answer, so nothing carries a difference; give two that differ")
        first_word, *rest = self.clean.decode_tokens(
            [self.answer_token] if self.incorrect_token is None else [self.answer_token, self.incorrect_token]
        )
        self.title = f"the logit of {first_word!r}" + (f" − {rest[0]!r}" if rest else "")
        clean_value, corrupted_value = float(self.clean_metric), float(self.corrupted_metric)
        self.note = f"clean {clean_value:.3f}, corrupt {corrupted_value:.3f}; 1 is all of the difference"

    @property
    def token_labels(self) -> tuple[str, ...]:
        pairs = zip(self.clean.token_labels, self.corrupted.token_labels, strict=True)
        return tuple(mine if mine == other else f"{mine}/{other}" for mine, other in pairs)

    def select_layer_sites(self, site: str, layers: Indices | None) -> list[Site]:
        mine = self.clean.site_prefix
        return select_sites(self.all_sites, [f"{mine}blocks.*.{site}"], layers)

    def logit_metric(self, logits: Tensor) -> Tensor:
        """(rows,)"""
        found = upcast_float32(logits)[:, self.position]
        return found[:, self.answer_token] - (0 if self.incorrect_token is None else found[:, self.incorrect_token])

    def cache_activations(self, inputs: AnalysisInputs, sites: Iterable[Site]) -> dict[str, Tensor]:
        names = [each.name for each in sites]
        with eval_mode(inputs.model), trace(inputs.model, *names) as t:
            inputs.run()
        return {name: t[name].as_subclass(Tensor) for name in names}

    def recovered_fraction(self, edits: Any, batch_size: int = 1) -> Tensor:
        """(rows,): how much of the difference is there in the corrupt run, changed so."""
        model = self.clean.model
        with eval_mode(model), edit(model, edits):
            found = self.logit_metric(_expand_batch(self.corrupted, batch_size).run())
        return (found - self.corrupted_metric) / (self.clean_metric - self.corrupted_metric)


class BatchedPatch:
    """Row r takes the clean value at its own place of an axis."""

    def __init__(self, clean: Tensor, axis: int, indices: range) -> None:
        self.clean, self.axis, self.indices = clean, axis, indices

    @property
    def batch_size(self) -> int:
        return len(self.indices)

    def __call__(self, value: Tensor) -> Tensor:
        changed = value.clone()
        for row, cell in enumerate(self.indices):
            changed[row].select(self.axis - 1, cell).copy_(self.clean[0].select(self.axis - 1, cell))
        return changed


def _expand_batch(inputs: AnalysisInputs, batch_size: int) -> AnalysisInputs:
    source = None if inputs.source is None else inputs.source.expand(batch_size, -1)
    return AnalysisInputs(inputs.model, inputs.tokenizer, inputs.tokens.expand(batch_size, -1), source)


def track_progress(items: list[Item], progress: bool, description: str) -> Iterable[Item]:
    """A bar for a person, which goes when it is done."""
    if not progress or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description, transient=True, console=Console(stderr=True))


def path_patching(
    model: Any,
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
    """What of the answer goes from one writer straight to each later reader: all else it does is held as it was.

    `sender` is a site that writes (`blocks.2.attn.out`), or `blocks.2.attn.z` with `heads`. What it writes when clean
    is shown to one receiver alone, and what that makes of it goes on through the model; `logits` gets it as it is.
    """
    heads = materialize_indices(heads, "heads")
    pair = PatchingExperiment(model, clean, corrupted, answer_token, incorrect_token, position, source)
    pair.clean.require_additive_residual("a path straight through it")
    [begin] = select_sites(pair.all_sites, [sender])[:1]
    writer = pair.all_sites.get(begin.name.rsplit(".", 1)[0] + ".out")
    if writer is None or writer.stack is not pair.clean.stack or len(select_sites(pair.all_sites, [sender])) > 1:
        raise InputError(f"'{sender}' is not one site that writes to the stream; name one such as blocks.0.attn.out")
    order = list(pair.all_sites)
    beside = not isinstance(pair.clean.stack.blocks[writer.layer or 0], Block)  # its FFN reads what attention reads
    later = [
        each
        for each in select_sites(pair.all_sites, receivers)
        if order.index(each.name) > order.index(writer.name) and not (beside and each.layer == writer.layer)
    ]
    if not later:
        raise InputError(f"none of {', '.join(receivers)} reads what {sender} writes; name one that comes later")
    delta = _sender_difference(pair, begin, writer, heads)
    scores = [_patch_receiver(pair, each, delta) for each in track_progress(later, progress, f"from {sender}")]
    some = (
        ""
        if heads is None
        else f", heads {', '.join(map(str, resolve_heads(begin, materialize_indices(heads, 'heads'))))}"
    )
    title = f"what of {pair.title} goes straight from the clean {sender}{some}"
    return LabeledTensor(title, torch.cat(scores), ("receiver",), (tuple(each.name for each in later),), note=pair.note)


def _sender_difference(experiment: PatchingExperiment, sender: Site, writer: Site, heads: Indices | None) -> Tensor:
    """What the writer adds when what it is made of is clean, less what it adds when that is corrupt."""
    model = experiment.clean.model
    clean, plain = (
        experiment.cache_activations(experiment.clean, [sender])[sender.name],
        experiment.cache_activations(experiment.corrupted, [writer])[writer.name],
    )
    change: dict[str, Any] = {"do": "replace", "value": clean}
    if heads is not None:
        if "H" not in sender.axes:
            raise InputError(f"{sender.name} has no heads; name attn.z to send from some of them")
        found = resolve_heads(sender, heads)
        change |= {"value": clean.index_select(sender.axes.index("H"), index_tensor(found, clean)), "heads": found}
    with eval_mode(model), edit(model, {sender.name: change}), trace(model, writer.name) as t:
        experiment.corrupted.run()
    return t[writer.name].as_subclass(Tensor) - plain


def _patch_receiver(experiment: PatchingExperiment, receiver: Site, delta: Tensor) -> Tensor:
    """How far the answer moves when this receiver alone is shown the difference."""
    model, prefix = experiment.clean.model, experiment.clean.site_prefix
    if receiver.layer is None:
        last = f"{prefix}blocks.{len(experiment.clean.stack.blocks) - 1}.resid_post"
        return experiment.recovered_fraction({last: lambda value: value + delta})
    with (
        eval_mode(model),
        edit(model, {resid_before_sublayer(receiver): lambda value: value + delta}),
        trace(model, receiver.name) as t,
    ):
        experiment.corrupted.run()
    return experiment.recovered_fraction({receiver.name: t[receiver.name].as_subclass(Tensor)})
