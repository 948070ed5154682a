"""Components that an answer depends on, by intervention alone: ablation, and activation patching.

A component is the output of an attention or FFN sublayer, or of one head. The answer is the top-1 token at a position.
A component is *necessary* if the top-1 token changes when the component is ablated, and *sufficient* if the component's
output, patched alone from the clean run into a run on a corrupted text, makes the answer the top-1 token there.

If several components write the answer, or if a later one takes over when an earlier one is ablated (backup), none of
them is necessary. Ablations of pairs show this: two components are jointly necessary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.adapters import ModelLike, sites
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, TokenOrId, prepare_inputs
from cutaway.lens.analysis.patching import track_progress
from cutaway.lens.edit import EditSpec, TensorFn, edit
from cutaway.lens.labeled_tensor import LabeledTensor, show_whitespace
from cutaway.lens.structural_edits import supports_structural_edit
from cutaway.lens.trace import Trace

AblationMethod = Literal["zero", "mean", "resample"]
ABLATION_METHODS: tuple[AblationMethod, ...] = ("zero", "mean", "resample")
ABLATION_METRICS = ("logit difference", "probability", "necessary")
PATCHING_METRICS = ("recovered", "sufficient")
PAIR_METRICS = ("logit difference", "interaction", "necessary")
_BATCH_SIZE, _CPU_BATCH_TOKENS = 32, 512
"""Maximum number of interventions per forward pass, each in one batch row; on a CPU also of tokens in a batch.

A batch starts at the first block of its interventions, so that small batches skip more blocks. This saves time where
larger batches do not make a forward pass more efficient.
"""


class _Component(NamedTuple):
    """A sublayer output, or the output of one head of it."""

    name: str
    site: str
    layer: int
    head: int | None = None


class _Target(NamedTuple):
    """What one intervention replaces: components at one token position, or at all positions (None)."""

    components: tuple[_Component, ...]
    token: int | None = None


def component_effects(
    model: ModelLike,
    tokens: TextOrTokens,
    answer_token: TokenOrId | None = None,
    *,
    incorrect_token: TokenOrId | None = None,
    position: int = -1,
    ablation: AblationMethod = "zero",
    corrupted: TextOrTokens | None = None,
    reference: Iterable[TextOrTokens] | None = None,
    by_head: bool = False,
    by_token: bool = False,
    pairs: bool = False,
    source: TextOrTokens | None = None,
    corrupted_source: TextOrTokens | None = None,
    progress: bool = True,
) -> LabeledTensor:
    """Effect of each attention and FFN sublayer (or head) on the answer at `position`: component × metric.

    Metrics of the ablation:

    - `logit difference`: change of the logit of the answer minus the logit of `incorrect_token`.
    - `probability`: change of the probability of the answer.
    - `necessary`: 1 if the ablation changes the top-1 token, else 0.
    - `jointly necessary` (with `pairs`): 1 if the component is not necessary, but the top-1 token changes when it is
      ablated together with another component that is not necessary either.

    Metrics of activation patching, if `corrupted` is given (clean output into the corrupted run, "denoising"):

    - `recovered`: recovered fraction of the logit difference, 0 in the corrupted run and 1 in the clean run.
    - `sufficient`: 1 if the patch alone makes the answer the top-1 token of the corrupted text, else 0.

    Args:
        answer_token: the top-1 token at `position`, which is the default.
        incorrect_token: the default is the top-1 token of `corrupted`, or the second most likely token.
        ablation: `zero`; `mean`, the mean output over the tokens of `reference` (default: of the text); or `resample`,
            the output in the run on `corrupted` ("noising").
        by_head: heads instead of attention sublayers.
        by_token: intervene at one token position at a time: component × token × metric.
        source, corrupted_source: encoder inputs of an encoder-decoder; `corrupted_source` is `source` by default. Only
            components of the decoder are listed.
    """
    if pairs and by_token:
        raise InputError("pairs and by_token are both set; pairs are ablated at all tokens, so leave one of them out")
    clean, corrupted_inputs = _prepare_pair(model, tokens, corrupted, source, corrupted_source)
    experiment = _Experiment(clean, corrupted_inputs, answer_token, incorrect_token, position, by_head=by_head)
    replacements = experiment.ablation_values(ablation, reference)
    positions: Sequence[int | None] = range(experiment.clean.tokens.shape[1]) if by_token else [None]
    targets = [_Target((component,), token) for component in experiment.components for token in positions]
    columns = experiment.measure_ablations(targets, replacements, progress)
    metrics: tuple[str, ...] = ABLATION_METRICS
    if pairs:
        _, pair_necessary = experiment.measure_pairs(replacements, progress)
        columns.append(_jointly_necessary(columns[-1], pair_necessary))
        metrics = (*metrics, "jointly necessary")
    if experiment.corrupted_run is not None:
        columns += experiment.measure_patches(targets, progress)
        metrics = (*metrics, *PATCHING_METRICS)
    values = torch.stack(columns, -1)
    labels: tuple[tuple[str, ...], ...] = (tuple(component.name for component in experiment.components), metrics)
    axes: tuple[str, ...] = ("component", "metric")
    if by_token:
        values = values.view(len(experiment.components), -1, len(metrics))
        labels, axes = (labels[0], experiment.clean.token_labels, metrics), ("component", "token", "metric")
    return LabeledTensor(
        f"effects of components on {experiment.title}, {ablation} ablation",
        values,
        axes,
        labels,
        note=f"{experiment.note}; {_describe_necessity(values, labels[0], metrics, by_token=by_token)}",
    )


def pair_ablation(
    model: ModelLike,
    tokens: TextOrTokens,
    answer_token: TokenOrId | None = None,
    *,
    incorrect_token: TokenOrId | None = None,
    position: int = -1,
    ablation: AblationMethod = "zero",
    corrupted: TextOrTokens | None = None,
    reference: Iterable[TextOrTokens] | None = None,
    by_head: bool = False,
    source: TextOrTokens | None = None,
    corrupted_source: TextOrTokens | None = None,
    progress: bool = True,
) -> LabeledTensor:
    """Effect on the answer of ablating two components together: component × other component × metric.

    - `logit difference`: change of the logit difference. The diagonal has the ablations of single components.
    - `interaction`: that change minus the changes by the two single ablations. It is 0 if the effects add up, and
      negative if one component compensates for the ablation of the other (backup, self-repair).
    - `necessary`: 1 if the ablation of the pair changes the top-1 token, else 0.

    The arguments are those of `component_effects`; `corrupted` is the text of `resample`.
    """
    clean, corrupted_inputs = _prepare_pair(model, tokens, corrupted, source, corrupted_source)
    experiment = _Experiment(clean, corrupted_inputs, answer_token, incorrect_token, position, by_head=by_head)
    replacements = experiment.ablation_values(ablation, reference)
    singles = [_Target((component,)) for component in experiment.components]
    single_changes, _, single_necessary = experiment.measure_ablations(singles, replacements, progress)
    pair_changes, pair_necessary = experiment.measure_pairs(replacements, progress)
    joint = pair_changes + single_changes.diag()
    interaction = joint - single_changes[:, None] - single_changes
    interaction.fill_diagonal_(0.0)
    necessary = pair_necessary + single_necessary.diag()
    names = tuple(component.name for component in experiment.components)
    title = f"ablation of pairs: effect on {experiment.title}, {ablation} ablation"
    values, labels = torch.stack((joint, interaction, necessary), -1), (names, names, PAIR_METRICS)
    return LabeledTensor(title, values, ("component", "other", "metric"), labels, note=experiment.note)


def ablated_logits(
    inputs: AnalysisInputs, position: int, ablation: AblationMethod = "zero", *, by_head: bool = False
) -> dict[str, Tensor]:
    """Logits at `position`, (V,), without each attention and FFN sublayer (or head) in turn, by component."""
    experiment = _Experiment(inputs, None, None, None, position, by_head=by_head)
    replacements = experiment.ablation_values(ablation, None)
    targets = [_Target((component,)) for component in experiment.components]
    logits = experiment.run(experiment.clean_run, targets, replacements, False, "ablating")
    return {component.name: row for component, row in zip(experiment.components, logits, strict=True)}


class _Run(NamedTuple):
    """Inputs and the recorded values of one forward pass."""

    inputs: AnalysisInputs
    logits: Tensor
    """Logits at the position, (V,)."""
    outputs: dict[str, Tensor]
    """Outputs of all components, (T, …), by site."""
    block_inputs: dict[int, Tensor]
    """Residual stream before each block, (1, T, d), by layer; empty if layers share a block or blocks cannot be
    skipped."""


class _Experiment:
    """Clean and corrupted inputs of a model, the components, the answer and the token it is compared with."""

    def __init__(
        self,
        clean: AnalysisInputs,
        corrupted: AnalysisInputs | None,
        answer_token: TokenOrId | None,
        incorrect_token: TokenOrId | None,
        position: int,
        *,
        by_head: bool,
    ) -> None:
        clean.require_head()
        self.clean = clean
        self.position = clean.resolve_position(position)
        self.components = list_components(clean, by_head=by_head)
        self.clean_run = self.record(clean)
        self.corrupted_run = None if corrupted is None else self.record(corrupted)
        self.logits = self.clean_run.logits
        self.corrupted_logits = None if self.corrupted_run is None else self.corrupted_run.logits
        self.answer = int(self.logits.argmax())
        self._check_answer(answer_token)
        self.incorrect = self._resolve_incorrect(incorrect_token)

    def _check_answer(self, answer_token: TokenOrId | None) -> None:
        """Raise if the given answer is not the top-1 token, or if the corrupted text has the same answer."""
        top, *_ = self.clean.decode_tokens([self.answer])
        if answer_token is not None and self.clean.resolve_token(answer_token, "answer_token") != self.answer:
            problem = f"answer_token is {answer_token!r}, but the top-1 token is {top!r}"
            raise InputError(f"{problem}; pass the top-1 token, or a text whose top-1 token is the answer")
        if self.corrupted_logits is not None and int(self.corrupted_logits.argmax()) == self.answer:
            raise InputError(f"corrupted has the same top-1 token {top!r}; pass a text with another answer")

    def _resolve_incorrect(self, incorrect_token: TokenOrId | None) -> int:
        if incorrect_token is not None:
            token = self.clean.resolve_token(incorrect_token, "incorrect_token")
            if token == self.answer:
                raise InputError(f"incorrect_token {incorrect_token!r} is the answer; pass another token")
            return token
        if self.corrupted_logits is not None:
            return int(self.corrupted_logits.argmax())
        return int(self.logits.topk(2).indices[1])

    @property
    def title(self) -> str:
        answer, incorrect = self.clean.decode_tokens([self.answer, self.incorrect])
        return f"'{show_whitespace(answer)}' (logit difference to '{show_whitespace(incorrect)}')"

    @property
    def note(self) -> str:
        difference, probability = float(self.logit_difference(self.logits)), float(self.logits.softmax(-1)[self.answer])
        text = f"clean: logit difference {difference:.3f}, probability {probability:.3f}"
        if self.corrupted_logits is not None:
            text += f"; corrupted: logit difference {float(self.logit_difference(self.corrupted_logits)):.3f}"
        return text

    def logit_difference(self, logits: Tensor) -> Tensor:
        """(…, V) → (…): logit of the answer minus that of the incorrect token."""
        return logits[..., self.answer] - logits[..., self.incorrect]

    def record(self, inputs: AnalysisInputs) -> _Run:
        """Run the model on a text, and record the outputs of the components and the inputs of the blocks."""
        names = dict.fromkeys(component.site for component in self.components)
        blocks = [f"{inputs.site_prefix}blocks.{layer}" for layer in range(len(inputs.blocks))]
        model = inputs.cutaway_model
        if model is None or not all(supports_structural_edit(model, name, "skip") for name in blocks):
            blocks = []
        with Trace(inputs.model, *names, *(f"{name}.resid_pre" for name in blocks)) as t:
            logits = inputs.logits_at(self.position)[0]
        values = {name: t[name].as_subclass(Tensor) for name in t}
        block_inputs = {layer: values[f"{name}.resid_pre"] for layer, name in enumerate(blocks)}
        return _Run(inputs, logits, {name: values[name][0] for name in names}, block_inputs)

    def ablation_values(self, method: AblationMethod, reference: Iterable[TextOrTokens] | None) -> dict[str, Tensor]:
        """Return the values that replace the outputs, (T, …), by site."""
        if method not in ABLATION_METHODS:
            raise InputError(f"ablation is {method!r}; use one of {', '.join(ABLATION_METHODS)}")
        if reference is not None and method != "mean":
            raise InputError(f"reference is set, but ablation is '{method}'; leave reference out, or use 'mean'")
        if method == "resample":
            if self.corrupted_run is None:
                raise InputError("ablation 'resample' takes outputs of another text; pass it as corrupted")
            return self.corrupted_run.outputs
        clean = self.clean_run.outputs
        if method == "zero":
            return {site: torch.zeros_like(value) for site, value in clean.items()}
        return self._mean_values(clean, reference)

    def _mean_values(self, clean: Mapping[str, Tensor], reference: Iterable[TextOrTokens] | None) -> dict[str, Tensor]:
        """Return the mean of the outputs over all tokens of the reference texts, expanded to (T, …), by site."""
        runs = [clean]
        if reference is not None:
            texts = [reference] if isinstance(reference, str) else list(reference)
            traces = [prepare_inputs(self.clean, text, self.clean.source).trace(*clean) for text in texts]
            runs = [{site: t[site].as_subclass(Tensor)[0] for site in clean} for t in traces]
            if not runs:
                raise InputError("reference is empty; pass at least one text, or leave reference out")
        return {
            site: torch.cat([run[site] for run in runs]).mean(0, keepdim=True).expand_as(value)
            for site, value in clean.items()
        }

    def measure_ablations(
        self, targets: Sequence[_Target], replacements: Mapping[str, Tensor], progress: bool
    ) -> list[Tensor]:
        """Return the changes of logit difference and probability, and whether the top-1 token changes, (targets,)."""
        logits = self.run(self.clean_run, targets, replacements, progress, "ablating")
        difference = self.logit_difference(logits) - self.logit_difference(self.logits)
        probability = logits.softmax(-1)[:, self.answer] - self.logits.softmax(-1)[self.answer]
        return [difference, probability, (logits.argmax(-1) != self.answer).to(difference)]

    def measure_pairs(self, replacements: Mapping[str, Tensor], progress: bool) -> tuple[Tensor, Tensor]:
        """Return the change of the logit difference and whether the top-1 token changes, (components, components).

        The diagonals are 0.
        """
        pairs = [_Target(pair) for pair in combinations(self.components, 2)]
        difference, _, necessary = self.measure_ablations(pairs, replacements, progress)
        return _pair_matrix(difference, len(self.components)), _pair_matrix(necessary, len(self.components))

    def measure_patches(self, targets: Sequence[_Target], progress: bool) -> list[Tensor]:
        """Return the recovered fraction of the logit difference and whether the answer becomes top-1, (targets,)."""
        assert self.corrupted_run is not None
        logits = self.run(self.corrupted_run, targets, self.clean_run.outputs, progress, "patching")
        start = self.logit_difference(self.corrupted_run.logits)
        recovered = (self.logit_difference(logits) - start) / (self.logit_difference(self.logits) - start)
        return [recovered, (logits.argmax(-1) == self.answer).to(recovered)]

    def run(
        self,
        base: _Run,
        targets: Sequence[_Target],
        replacements: Mapping[str, Tensor],
        progress: bool,
        description: str,
    ) -> Tensor:
        """Return the logits at the position, (targets, V), with each target in turn replaced."""
        inputs, logits, size = base.inputs, [], _BATCH_SIZE
        if inputs.tokens.device.type == "cpu":
            size = max(1, min(size, _CPU_BATCH_TOKENS // inputs.tokens.shape[1]))
        for start in track_progress(list(range(0, len(targets), size)), progress, description):
            batch = targets[start : start + size]
            components = [component for target in batch for component in target.components]
            names = dict.fromkeys(component.site for component in components)
            edits: dict[str, EditSpec] = {name: _replace_rows(name, batch, replacements[name]) for name in names}
            first = min(component.layer for component in components)
            if first and first in base.block_inputs:  # the blocks before compute the same values in all rows
                edits |= {f"{inputs.site_prefix}blocks.{layer}": "skip" for layer in range(first)}
                edits[f"{inputs.site_prefix}blocks.{first}.resid_pre"] = _replace_all(base.block_inputs[first])
            with inputs.eval_mode(), edit(inputs.model, edits):
                logits.append(expand_batch(inputs, len(batch)).logits_at(self.position))
        return torch.cat(logits)


def list_components(inputs: AnalysisInputs, *, by_head: bool = False) -> list[_Component]:
    """Return the sublayers (or heads and FFN sublayers) of the stack that the head reads, in model order."""
    all_sites, prefix = sites(inputs.model), f"{inputs.site_prefix}blocks."
    components: list[_Component] = []
    for layer in range(len(inputs.blocks)):
        for sublayer in ("attn", "cross", "ffn"):
            base, name = f"{prefix}{layer}.{sublayer}", f"{layer}.{sublayer}"
            if f"{base}.out" not in all_sites:
                continue
            if by_head and sublayer != "ffn":
                z = all_sites[f"{base}.z"]
                components += [_Component(f"{name}.{head}", z.name, layer, head) for head in range(z.num_heads or 0)]
            else:
                components.append(_Component(name, f"{base}.out", layer))
    return components


def _prepare_pair(
    model: ModelLike,
    tokens: TextOrTokens,
    corrupted: TextOrTokens | None,
    source: TextOrTokens | None,
    corrupted_source: TextOrTokens | None,
) -> tuple[AnalysisInputs, AnalysisInputs | None]:
    """Return the clean inputs, and the corrupted inputs if there are any, of equal length."""
    clean = prepare_inputs(model, tokens, source)
    if corrupted is None:
        if corrupted_source is not None:
            raise InputError("corrupted_source is set without corrupted; pass corrupted, which may be the text itself")
        return clean, None
    inputs = prepare_inputs(model, corrupted, source if corrupted_source is None else corrupted_source)
    for ids, corrupted_ids in ((clean.tokens, inputs.tokens), (clean.source, inputs.source)):
        if ids is not None and corrupted_ids is not None and ids.shape != corrupted_ids.shape:
            lengths = f"{ids.shape[1]} and {corrupted_ids.shape[1]} tokens"
            raise InputError(f"the text and corrupted have {lengths}; pass texts of equal length")
    return clean, inputs


def expand_batch(inputs: AnalysisInputs, batch_size: int) -> AnalysisInputs:
    source = None if inputs.source is None else inputs.source.expand(batch_size, -1)
    return replace(inputs, tokens=inputs.tokens.expand(batch_size, -1), source=source)


def _replace_rows(site: str, targets: Sequence[_Target], replacement: Tensor) -> TensorFn:
    """Return an edit that, in batch row r, replaces what `targets[r]` names at this site by `replacement`, (T, …)."""

    def edit_rows(value: Tensor) -> Tensor:
        for row, (components, token) in enumerate(targets):
            where = slice(None) if token is None else slice(token, token + 1)
            for component in components:
                if component.site == site and component.head is None:
                    value[row, where] = replacement[where]
                elif component.site == site:  # (T, H, E)
                    value[row, where, component.head] = replacement[where, component.head]
        return value

    return edit_rows


def _replace_all(replacement: Tensor) -> TensorFn:
    """Return an edit that replaces the values of all batch rows by `replacement`, (1, T, …)."""
    return lambda value: replacement.expand_as(value)


def _pair_matrix(values: Tensor, size: int) -> Tensor:
    """Values of pairs i < j as a symmetric matrix with zeros on the diagonal."""
    matrix = values.new_zeros(size, size)
    rows, columns = torch.triu_indices(size, size, 1, device=values.device)
    matrix[rows, columns] = matrix[columns, rows] = values
    return matrix


def _jointly_necessary(necessary: Tensor, pair_necessary: Tensor) -> Tensor:
    """Whether a component that is not necessary is part of a necessary pair of components that are not necessary."""
    free = 1 - necessary
    return ((pair_necessary * free[:, None] * free).sum(1) > 0).to(necessary)


def _describe_necessity(values: Tensor, names: Sequence[str], metrics: Sequence[str], *, by_token: bool) -> str:
    """Say which components are necessary, or that none is."""

    def listed(metric: str) -> str:
        flags = values[..., metrics.index(metric)].flatten(1).any(1) if by_token else values[:, metrics.index(metric)]
        return ", ".join(name for name, flag in zip(names, flags.tolist(), strict=True) if flag)

    text = f"necessary: {listed('necessary')}" if listed("necessary") else "no single component is necessary"
    if "jointly necessary" in metrics:
        return f"{text}; jointly necessary: {listed('jointly necessary') or 'no pair'}"
    hint = "" if by_token or listed("necessary") else "; redundant components show in pairs (pairs=True)"
    return text + hint
