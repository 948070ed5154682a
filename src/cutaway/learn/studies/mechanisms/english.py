"""Mechanisms of tiny-english, each confirmed by an intervention.

Heads and blocks are selected on one set of prompts, and the effects are measured on prompts with other words and
templates. The score of a prompt is the log-odds of its answer: log p(answer) − log p(incorrect token).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.learn.studies.mechanisms.english_probe import measure_quotation_probe
from cutaway.learn.studies.mechanisms.english_prompts import (
    REPEAT_LEN,
    PromptSet,
    load_model,
    load_prompts,
    repeated_words,
)
from cutaway.learn.studies.representation.stacked_weights import attention_weights
from cutaway.learn.studies.study import Estimate, estimate, estimate_share, exact
from cutaway.lens.edit import EditSpec, edit
from cutaway.lens.trace import trace

NUM_HEADS, NUM_DRAWS = 3, 7
"""Number of selected heads, of which the first is also ablated alone; number of draws of random heads."""
MECHANISMS = ("name-memory", "quotes", "agreement", "pronoun")
"""Mechanisms whose heads are selected by ablation."""
HALF_TRANSFER = 0.5
"""A patch has an effect if at least this share of the score is transferred."""
NUM_INDUCTION_HEADS = 2
"""Number of induction heads that are selected on repeated lists of random words."""

Head = tuple[int, int]
"""Layer and index of a head."""
Edits = Mapping[str, EditSpec]


def count_blocks_and_heads(device: str) -> tuple[int, int]:
    layers, heads, *_ = attention_weights(load_model(device).model).o.shape
    return layers, heads


class Measurement:
    """Scores of a set of prompts with and without edits of the model."""

    def __init__(self, mechanism: str, device: str, *, held_out: bool = True) -> None:
        self.prompts: PromptSet = load_prompts(mechanism, held_out, device)
        self.model = load_model(device).model

    @torch.no_grad()
    def log_probs(self, edits: Edits | None = None) -> Tensor:
        """(B, V): log-probabilities of the token after each prompt."""
        if edits:
            with edit(self.model, edits):
                return self.log_probs()
        logits = self.model(self.prompts.ids)[self.prompts.rows, self.prompts.last]
        return logits.log_softmax(-1)

    def scores(self, edits: Edits | None = None) -> tuple[Tensor, Tensor]:
        """(B,): score and probability of the answer of each prompt."""
        log_probs = self.log_probs(edits)
        answer = log_probs.gather(1, self.prompts.answers).logsumexp(1)
        return answer - log_probs.gather(1, self.prompts.incorrect).logsumexp(1), answer.exp()

    def mean_scores(self, edits: Sequence[Edits]) -> tuple[Tensor, Tensor]:
        """Scores and probabilities, averaged over several edits."""
        scores, probabilities = zip(*map(self.scores, edits), strict=True)
        return torch.stack(scores).mean(0), torch.stack(probabilities).mean(0)

    @torch.no_grad()
    def record(self, site: str, edits: Edits | None = None) -> Tensor:
        """(layers, B, …): activations at a site of every block."""
        if edits:
            with edit(self.model, edits):
                return self.record(site)
        with trace(self.model, site) as t:
            self.model(self.prompts.ids)
        return torch.stack([t[f"blocks.{layer}.{site}"].as_subclass(Tensor) for layer in range(len(t))])

    def attention(self, queries: Tensor, keys: Tensor, edits: Edits | None = None) -> Tensor:
        """(layers, heads, B): attention from one query to one key of each prompt."""
        return self.record("attn.pattern", edits).transpose(1, 2)[:, :, self.prompts.rows, queries, keys]

    def by_group(self, values: Tensor) -> list[float]:
        """Means of the pairs of prompts."""
        means: list[float] = values.view(-1, self.prompts.group_size).mean(1).tolist()
        return means

    def knock_out(self, head: Head, *edges: tuple[Tensor, Tensor], renormalize: bool = False) -> dict[str, EditSpec]:
        """Set the attention weight of a head to zero at edges, which are pairs of query and key positions.

        With `renormalize`, the other weights are scaled to a sum of 1.
        """

        def remove(pattern: Tensor) -> Tensor:
            for query, key in edges:
                pattern[self.prompts.rows, head[1], query, key] = 0
            return pattern / pattern.sum(-1, keepdim=True).clamp(min=1e-6) if renormalize else pattern

        return {f"blocks.{head[0]}.attn.pattern": remove}

    def patch(self, layer: int, resid: Tensor, positions: Tensor) -> dict[str, EditSpec]:
        """Replace the residual stream of one token before a block by that of the other prompt of the pair."""
        rows, partner = self.prompts.rows, self.prompts.partner

        def replace(value: Tensor) -> Tensor:
            value[rows, positions] = resid[layer, partner, positions]
            return value

        return {f"blocks.{layer}.resid_pre": replace}


def ablate(heads: Sequence[Head]) -> dict[str, EditSpec]:
    """Zero ablation of heads."""
    layers = sorted({layer for layer, _ in heads})
    selected = {layer: [head for block, head in heads if block == layer] for layer in layers}
    return {f"blocks.{layer}.attn.z": {"do": "zero", "heads": indices} for layer, indices in selected.items()}


def ablate_random(heads: Sequence[Head], device: str) -> list[dict[str, EditSpec]]:
    """Zero ablation of as many other heads of the same blocks, NUM_DRAWS times."""
    _, num_heads = count_blocks_and_heads(device)
    draws = []
    for seed in range(NUM_DRAWS):
        rng, draw = random.Random(seed), []
        for layer in sorted({layer for layer, _ in heads}):
            selected = [head for block, head in heads if block == layer]
            others = [head for head in range(num_heads) if head not in selected]
            draw += [(layer, head) for head in rng.sample(others, min(len(selected), len(others)))]
        draws.append(ablate(draw))
    return draws


def top_heads(values: Tensor, count: int) -> tuple[Head, ...]:
    """Heads with the largest values. `values` is (layers, heads)."""
    indices = values.flatten().topk(count).indices.tolist()
    return tuple(divmod(index, values.shape[1]) for index in indices)


@cache
def select_heads(mechanism: str, device: str) -> tuple[Head, ...]:
    """Heads whose ablation, one at a time, decreases the score most on the prompts for selection."""
    measurement = Measurement(mechanism, device, held_out=False)
    layers, heads = count_blocks_and_heads(device)
    scores = [
        [float(measurement.scores(ablate([(layer, head)]))[0].mean()) for head in range(heads)]
        for layer in range(layers)
    ]
    return top_heads(-torch.tensor(scores), NUM_HEADS)


def measure_mechanism(mechanism: str, device: str) -> dict[str, Estimate]:
    """Score, ablation of the selected heads and knock-out of the attention of the first one to the key token.

    `decrease` is the decrease of the score: without the head with the largest effect on the prompts for selection,
    without the first NUM_HEADS, and without the attention of the first head from the last token to the key token. The
    controls are random other heads of the same blocks, and the token with the next largest weight of the first head.
    In `edge/renormalized`, the remaining attention weights of that head are scaled to a sum of 1.
    """
    measurement, heads = Measurement(mechanism, device), select_heads(mechanism, device)
    prompts, (layer, head) = measurement.prompts, heads[0]
    score, probability = measurement.scores()
    pattern = measurement.record("attn.pattern")[layer].transpose(0, 1)[:, prompts.rows, prompts.last]  # (heads, B, T)
    weights = pattern[:, prompts.rows, prompts.key]  # (heads, B)
    other_heads = [other for other in range(len(weights)) if other != head]
    next_key = pattern[head].scatter(1, prompts.key[:, None], 0).argmax(1)
    estimates = {
        "score": estimate(measurement.by_group(score)),
        "correct": estimate_share((score > 0).float().tolist()),
        "probability": estimate(measurement.by_group(probability)),
        "attention": estimate(measurement.by_group(weights[head])),
        "attention/other-heads": estimate(measurement.by_group(weights[other_heads].mean(0))),
    }
    estimates |= exact_heads("head", heads)
    interventions: dict[str, Sequence[Edits]] = {
        "head": [ablate(heads[:1])],
        "head/random-head": ablate_random(heads[:1], device),
        "heads": [ablate(heads)],
        "heads/random-heads": ablate_random(heads, device),
        "edge": [measurement.knock_out(heads[0], (prompts.last, prompts.key))],
        "edge/other-token": [measurement.knock_out(heads[0], (prompts.last, next_key))],
        "edge/renormalized": [measurement.knock_out(heads[0], (prompts.last, prompts.key), renormalize=True)],
    }
    for name, edits in interventions.items():
        edited_score, edited_probability = measurement.mean_scores(edits)
        estimates[f"decrease/{name}"] = estimate(measurement.by_group(score - edited_score))
        estimates[f"probability/{name}"] = estimate(measurement.by_group(edited_probability))
    return _add_prefix(mechanism, estimates)


def exact_heads(name: str, heads: Sequence[Head]) -> dict[str, Estimate]:
    """Layer and index of heads, by rank."""
    parts = {f"{name}/{rank}": zip(("layer", "index"), head, strict=True) for rank, head in enumerate(heads)}
    return {f"{key}/{part}": exact(value) for key, pairs in parts.items() for part, value in pairs}


def _add_prefix(mechanism: str, estimates: Mapping[str, Estimate]) -> dict[str, Estimate]:
    return {f"english/{mechanism}/{key}": value for key, value in estimates.items()}


def _transfers(measurement: Measurement, positions: Tensor) -> Tensor:
    """(layers, B): share of the score that a patch of one token before each block transfers.

    The mean is 0 without an effect, and 1 if the scores are those of the other prompts of the pairs.
    """
    resid, (score, _) = measurement.record("resid_pre"), measurement.scores()
    patched = [measurement.scores(measurement.patch(layer, resid, positions))[0] for layer in range(len(resid))]
    return torch.stack([score - row for row in patched]) / (2 * score.mean())


def measure_patching(mechanism: str, device: str) -> dict[str, Estimate]:
    """Patch the residual stream of one token with that of the other prompt of the pair, before each block.

    `transfer` is the share of the score that a patch of the key token or of the last token transfers. `patched` is the
    probability of the other prompt's answer before the last block at which a patch of the key token transfers half the
    score on the prompts for selection: without a patch, with a patch of the key token, and of another token.
    """
    selection = Measurement(mechanism, device, held_out=False)
    transferred = _transfers(selection, selection.prompts.key).mean(1) >= HALF_TRANSFER
    layer = int(transferred.nonzero().max()) if transferred.any() else 0
    measurement = Measurement(mechanism, device)
    prompts, resid = measurement.prompts, measurement.record("resid_pre")
    estimates = {"patched/block": exact(layer)}
    patches: dict[str, Edits | None] = {
        "none": None,
        "key-token": measurement.patch(layer, resid, prompts.key),
        "other-token": measurement.patch(layer, resid, prompts.other),
    }
    for name, patch in patches.items():
        probability = measurement.log_probs(patch).gather(1, prompts.incorrect).exp().sum(1)
        estimates[f"patched/{name}"] = estimate(measurement.by_group(probability))
    for name, positions in {"key-token": prompts.key, "last-token": prompts.last}.items():
        for block, values in enumerate(_transfers(measurement, positions)):
            estimates[f"transfer/{name}/{block}"] = estimate(measurement.by_group(values))
    return _add_prefix(mechanism, estimates)


def measure_name_memory(device: str) -> dict[str, Estimate]:
    """Recall of a second name of a story, `Sue … a friend named Ben … Sue and` → `Ben`, and its cause."""
    return measure_mechanism("name-memory", device) | measure_patching("name-memory", device)


def measure_quotes(device: str) -> dict[str, Estimate]:
    """Closing quotation mark at the end of a sentence after an opening mark, and its cause."""
    return measure_mechanism("quotes", device)


def measure_agreement(device: str) -> dict[str, Estimate]:
    """Agreement of a verb with its subject, and its cause: `The cat in the park was`, `The cats in the park were`."""
    return measure_mechanism("agreement", device) | measure_patching("agreement", device)


def measure_pronoun(device: str) -> dict[str, Estimate]:
    """Pronoun of a person, and its cause: `The girl was sad because she`."""
    return measure_mechanism("pronoun", device) | measure_patching("pronoun", device)


@cache
def select_induction_heads(device: str) -> tuple[Head, tuple[Head, ...]]:
    """The previous-token head, and the induction heads of later blocks, by attention on the prompts for selection.

    The previous-token head attends from a noun to its adjective. The induction heads attend from the repeated adjective
    to its noun more than to the other noun.
    """
    measurement = Measurement("induction", device, held_out=False)
    prompts = measurement.prompts
    previous = measurement.attention(prompts.key, prompts.key - 1).mean(-1)
    matching = _matching_attention(measurement).mean(-1)
    (previous_head,) = top_heads(previous, 1)
    matching[: previous_head[0] + 1] = -1
    return previous_head, top_heads(matching, NUM_HEADS)


def _matching_attention(measurement: Measurement, edits: Edits | None = None) -> Tensor:
    """(layers, heads, B): attention of the last token to the right noun minus that to the other noun."""
    prompts = measurement.prompts
    pattern = measurement.record("attn.pattern", edits).transpose(1, 2)[:, :, prompts.rows, prompts.last]
    return pattern[:, :, prompts.rows, prompts.key] - pattern[:, :, prompts.rows, prompts.other]


def measure_induction(device: str) -> dict[str, Estimate]:
    """Induction on pairs of words, `a big dog and a red ball … the big` → `dog`, and its cause.

    `decrease` is the decrease of the score without the previous-token head, without its attention from the nouns to the
    adjectives, and without the induction heads. `attention` is the attention of the induction heads to the right noun
    minus that to the other noun.
    """
    measurement, (previous_head, heads) = Measurement("induction", device), select_induction_heads(device)
    prompts, (score, probability) = measurement.prompts, measurement.scores()
    edges, other_edges = (
        measurement.knock_out(previous_head, *((noun, noun - distance) for noun in (prompts.key, prompts.other)))
        for distance in (1, 2)
    )
    interventions: dict[str, Sequence[Edits]] = {
        "previous-token-head": [ablate([previous_head])],
        "previous-token-head/random-head": ablate_random([previous_head], device),
        "edge": [edges],
        "edge/other-token": [other_edges],
        "induction-heads": [ablate(heads)],
        "induction-heads/random-heads": ablate_random(heads, device),
    }
    estimates = {
        "score": estimate(measurement.by_group(score)),
        "correct": estimate_share((score > 0).float().tolist()),
        "probability": estimate(measurement.by_group(probability)),
    }
    estimates |= exact_heads("previous-token-head", [previous_head]) | exact_heads("induction-head", heads)
    indices = tuple(torch.tensor(heads, device=device).T)
    for name, edits in {"": [None], **interventions}.items():
        if name.startswith("induction-heads"):
            continue
        weights = torch.stack([_matching_attention(measurement, change)[indices].mean(0) for change in edits]).mean(0)
        estimates[f"attention/{name}".rstrip("/")] = estimate(measurement.by_group(weights))
    for name, edits in interventions.items():
        edited_score, _ = measurement.mean_scores(edits)
        estimates[f"decrease/{name}"] = estimate(measurement.by_group(score - edited_score))
    return _add_prefix("induction", estimates)


@torch.no_grad()
def _repeated_word_losses(ids: Tensor, edits: Edits | None = None) -> Tensor:
    """(B, REPEAT_LEN − 1): loss on the repetition of a list of random words, after its first word."""
    model = load_model(str(ids.device)).model
    if edits:
        with edit(model, edits):
            return _repeated_word_losses(ids)
    losses = F.cross_entropy(model(ids)[:, :-1].mT, ids[:, 1:], reduction="none")
    return losses[:, 1 - REPEAT_LEN :]


@torch.no_grad()
def _repetition_attention(ids: Tensor, edits: Edits | None = None) -> tuple[Tensor, Tensor]:
    """(layers, heads, B) each: attention to the previous token, and to the token after the previous occurrence."""
    model = load_model(str(ids.device)).model
    if edits:
        with edit(model, edits):
            return _repetition_attention(ids)
    with trace(model, "attn.pattern") as t:
        model(ids)
    patterns = torch.stack([t[f"blocks.{layer}.attn.pattern"].as_subclass(Tensor) for layer in range(len(t))])
    previous = patterns.diagonal(-1, -2, -1).mean(-1)
    distance = ids.shape[1] - REPEAT_LEN - 1  # from a word of the repetition to the word after its first occurrence
    after_match = patterns.diagonal(-distance, -2, -1)[..., 1:].mean(-1)
    return previous.transpose(1, 2), after_match.transpose(1, 2)


def measure_repetition(device: str) -> dict[str, Estimate]:
    """Induction on a list of random words that is repeated on a new line, and its cause.

    The previous-token head and the induction heads of later blocks have the largest attention to the previous token,
    and to the token after the previous occurrence, on other lists. `increase` is that of the loss on the repetition
    without these heads, in nats, and `attention` that of the induction heads to the token after the previous
    occurrence. In `loss/same-line` the lists are not separated by a newline, unlike the lists in the training text.
    """
    previous, after_match = (each.mean(-1) for each in _repetition_attention(repeated_words(False, device)))
    (previous_head,) = top_heads(previous, 1)
    after_match[: previous_head[0] + 1] = -1
    heads = top_heads(after_match, NUM_INDUCTION_HEADS)
    ids = repeated_words(True, device)
    first = _repeated_word_losses(ids[:, :REPEAT_LEN])
    losses = {"first": first, "repeated": _repeated_word_losses(ids)}
    losses["same-line"] = _repeated_word_losses(torch.cat((ids[:, :REPEAT_LEN], ids[:, -REPEAT_LEN:]), 1))
    estimates = {f"loss/{name}": estimate(values.mean(1).tolist()) for name, values in losses.items()}
    estimates |= exact_heads("previous-token-head", [previous_head]) | exact_heads("induction-head", heads)
    interventions: dict[str, Sequence[Edits]] = {
        "previous-token-head": [ablate([previous_head])],
        "previous-token-head/random-head": ablate_random([previous_head], device),
        "induction-heads": [ablate(heads)],
        "induction-heads/random-heads": ablate_random(heads, device),
    }
    for name, edits in interventions.items():
        edited = torch.stack([_repeated_word_losses(ids, change) for change in edits]).mean(0)
        estimates[f"increase/{name}"] = estimate((edited - losses["repeated"]).mean(1).tolist())
    indices = tuple(torch.tensor(heads, device=device).T)
    for name in ("", "previous-token-head", "previous-token-head/random-head"):
        changes: Sequence[Edits | None] = interventions.get(name, [None])
        weights = torch.stack([_repetition_attention(ids, change)[1][indices].mean(0) for change in changes]).mean(0)
        estimates[f"attention/{name}".rstrip("/")] = estimate(weights.tolist())
    return _add_prefix("repetition", estimates)


def measure_specificity(device: str) -> dict[str, Estimate]:
    """Relative decrease of the score of each mechanism without the head that is selected for another mechanism.

    Key: mechanism of the head, mechanism of the score.
    """
    estimates = {}
    for mechanism in MECHANISMS:
        measurement = Measurement(mechanism, device)
        score, _ = measurement.scores()
        for other in MECHANISMS:
            edited_score, _ = measurement.scores(ablate(select_heads(other, device)[:1]))
            relative = measurement.by_group((score - edited_score) / score.mean())
            estimates[f"{other}-head/{mechanism}"] = estimate(relative)
    return _add_prefix("specificity", estimates)


PARTS: tuple[Callable[[str], dict[str, Estimate]], ...] = (
    measure_repetition,
    measure_induction,
    measure_name_memory,
    measure_quotes,
    measure_agreement,
    measure_pronoun,
    measure_specificity,
    measure_quotation_probe,
)
