"""Mechanisms of tiny-english-encoder, a masked language model: pronouns, context on both sides, copies, categories.

Heads are selected on prompts with other words and other templates than those on which the effects are measured.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.learn.studies.mechanisms.encoder_prompts import (
    MaskBatch,
    category_prompts,
    context_prompts,
    copy_prompts,
    load_encoder,
    pronoun_prompts,
)
from cutaway.learn.studies.study import Estimate, estimate, estimate_share, exact
from cutaway.lens.edit import EditSpec, TensorFn, edit
from cutaway.lens.trace import trace
from cutaway.model import EncoderOnly

NUM_PRONOUN_HEADS, NUM_COPY_HEADS = 3, 6
NUM_DRAWS = 10
"""Number of random draws of other heads, and of shuffled labels."""
MASKED = float("-inf")
Head = tuple[int, int]
"""Block and head."""


@torch.no_grad()
def predict(model: EncoderOnly, batch: MaskBatch, edits: Mapping[str, EditSpec] | None = None) -> Tensor:
    """(B, V): logits at the mask."""
    with edit(model, edits) if edits else nullcontext():
        return model(batch.ids, batch.visible)[_rows(batch), batch.at]


@torch.no_grad()
def record(model: EncoderOnly, batch: MaskBatch, *patterns: str) -> list[Tensor]:
    """Activations at the sites, in the order of the blocks."""
    with trace(model, *patterns) as t:
        model(batch.ids, batch.visible)
    return [t[name].as_subclass(Tensor) for name in t]


def answer_margin(logits: Tensor, batch: MaskBatch) -> Tensor:
    """(B,): logit of the answer minus that of the foil."""
    rows = _rows(batch)
    return logits[rows, batch.answers] - logits[rows, batch.foils]


def share(flags: Tensor) -> Estimate:
    """Share of true flags, (B,) or (draws, B), with an interval over prompts."""
    return estimate_share(flags.float().view(-1, flags.shape[-1]).mean(0).tolist())


def _rows(batch: MaskBatch) -> Tensor:
    return torch.arange(len(batch.ids), device=batch.ids.device)


def _knock_out(batch: MaskBatch, keys: Tensor) -> dict[str, TensorFn]:
    """Edit that masks the keys, (B, T), for the query at the mask, in all blocks and heads."""
    is_query = F.one_hot(batch.at, batch.ids.shape[1]).bool()
    masked = (is_query[:, :, None] & keys[:, None])[:, None]
    return {"blocks.*.attn.scores": lambda scores: scores.masked_fill(masked, MASKED)}


def _replace_positions(batch: MaskBatch, positions: Tensor, values: Tensor, donors: Tensor) -> TensorFn:
    """Edit of activations, (B, T, d), that takes those at one position per row from the donor rows of `values`."""

    def apply(activation: Tensor) -> Tensor:
        activation[_rows(batch), positions] = values[donors, positions[donors]]
        return activation

    return apply


def _replace_heads(batch: MaskBatch, heads: Sequence[Head], values: Sequence[Tensor]) -> dict[str, TensorFn]:
    """Edit that sets the outputs of heads at the mask to `values`, by block (B, H, E)."""

    def replace(indices: list[int], block_values: Tensor) -> TensorFn:
        def apply(activation: Tensor) -> Tensor:  # (B, T, H, E)
            outputs = activation[_rows(batch), batch.at]
            outputs[:, indices] = block_values[:, indices]
            activation[_rows(batch), batch.at] = outputs
            return activation

        return apply

    by_block: dict[int, list[int]] = {}
    for block, head in heads:
        by_block.setdefault(block, []).append(head)
    return {f"blocks.{block}.attn.z": replace(indices, values[block]) for block, indices in by_block.items()}


def _head_outputs(model: EncoderOnly, batch: MaskBatch) -> list[Tensor]:
    """By block, (B, H, E): outputs of all heads at the mask."""
    return [z[_rows(batch), batch.at] for z in record(model, batch, "attn.z")]


def _draw_other_heads(heads: Sequence[Head], num_heads: int, seed: int) -> list[Head]:
    """Random heads that are not among the given ones, with the same number in each block where there are enough."""
    generator, drawn = random.Random(seed), []
    for block in sorted({block for block, _ in heads}):
        count = sum(1 for other, _ in heads if other == block)
        others = [(block, head) for head in range(num_heads) if (block, head) not in heads]
        drawn += generator.sample(others, min(count, len(others)))
    return drawn


def _top_heads(scores: Tensor, count: int) -> list[Head]:
    """The heads with the largest scores, (layers, heads)."""
    return [divmod(int(index), scores.shape[1]) for index in scores.flatten().topk(count).indices]


def measure_pronoun_patching(device: str) -> dict[str, Estimate]:
    """Share of prompts in which the pronoun changes if one token's residual stream is that of another name's prompt.

    patch/name/DEPTH and patch/mask/DEPTH: at the name or at the mask, from the prompt with a name of the other gender,
    after DEPTH blocks (0 is the embedding). patch/same-gender/DEPTH: at the name, from a name of the same gender.
    accuracy: share of prompts with the right pronoun without an edit.
    """
    model = load_encoder(device).model
    batch = pronoun_prompts(1, device)
    rows = _rows(batch)
    other_gender = rows.view(-1, 2).flip(1).flatten()  # girls and boys alternate
    same_gender = _next_with_same_answers(batch)
    baseline = answer_margin(predict(model, batch), batch) > 0
    estimates = {"encoder/pronoun/accuracy": share(baseline)}
    sites = ["embed", *(f"blocks.{block}.resid_post" for block in range(_num_blocks(model)))]
    for depth, (site, values) in enumerate(zip(sites, record(model, batch, *sites), strict=True)):
        patches = {
            "name": (batch.words, other_gender),
            "mask": (batch.at, other_gender),
            "same-gender": (batch.words, same_gender),
        }
        for name, (positions, donors) in patches.items():
            logits = predict(model, batch, {site: _replace_positions(batch, positions, values, donors)})
            changed = (answer_margin(logits, batch) > 0) != baseline
            estimates[f"encoder/pronoun/patch/{name}/{depth}"] = share(changed)
    return estimates


def _num_blocks(model: EncoderOnly) -> int:
    return len(model.encoder.blocks)


def _next_with_same_answers(batch: MaskBatch) -> Tensor:
    """(B,): for each prompt, the next one, cyclically, with the same answer and foil."""
    pairs = torch.stack([batch.answers, batch.foils], 1)
    same = (pairs[:, None] == pairs).all(-1)
    count = len(pairs)
    distance = (torch.arange(count)[None] - torch.arange(count)[:, None] - 1).to(same.device) % count
    return distance.masked_fill(~same, count).argmin(1)


def measure_pronoun_heads(device: str) -> dict[str, Estimate]:
    """Heads that carry the gender of the name to the mask.

    heads: share of prompts in which the pronoun changes if the outputs of NUM_PRONOUN_HEADS heads at the mask are those
    of the prompt with a name of the other gender. The heads with the largest effect are selected on other prompts.
    other-heads: as many random other heads of the same blocks. knock-out/name and knock-out/next-token: share of right
    pronouns if the mask does not attend to the name, or to the token after it.
    """
    model = load_encoder(device).model
    selection, batch = pronoun_prompts(0, device), pronoun_prompts(1, device)
    heads = _select_pronoun_heads(model, selection)
    donated = _donate_pairs(_head_outputs(model, batch))
    baseline = answer_margin(predict(model, batch), batch) > 0

    def changed(patched: Sequence[Head]) -> Tensor:
        logits = predict(model, batch, _replace_heads(batch, patched, donated))
        return (answer_margin(logits, batch) > 0) != baseline

    others = [changed(_draw_other_heads(heads, donated[0].shape[1], seed)) for seed in range(NUM_DRAWS)]
    estimates = {
        "encoder/pronoun/heads": share(changed(heads)),
        "encoder/pronoun/other-heads": share(torch.stack(others)),
    }
    for name, position in (("name", batch.words), ("next-token", batch.words + 1)):
        keys = F.one_hot(position, batch.ids.shape[1]).bool()
        margin = answer_margin(predict(model, batch, _knock_out(batch, keys)), batch)
        estimates[f"encoder/pronoun/knock-out/{name}"] = share(margin > 0)
    return estimates | _list_heads("encoder/pronoun", heads)


def _list_heads(key: str, heads: Sequence[Head]) -> dict[str, Estimate]:
    """Block and index of each selected head, in the order of their scores."""
    rows = enumerate(heads)
    return {
        f"{key}/head/{rank}/{name}": exact(part)
        for rank, head in rows
        for name, part in zip(("layer", "index"), head, strict=True)
    }


def _donate_pairs(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Exchange the rows of each pair of prompts."""
    return [each.unflatten(0, (-1, 2)).flip(1).flatten(0, 1) for each in outputs]


def _select_pronoun_heads(model: EncoderOnly, batch: MaskBatch) -> list[Head]:
    donated = _donate_pairs(_head_outputs(model, batch))
    scores = torch.zeros(len(donated), donated[0].shape[1])
    for block, head in torch.cartesian_prod(*map(torch.arange, scores.shape)).tolist():
        edits = _replace_heads(batch, [(block, head)], donated)
        scores[block, head] = -answer_margin(predict(model, batch, edits), batch).mean()
    return _top_heads(scores, NUM_PRONOUN_HEADS)


def measure_context(device: str) -> dict[str, Estimate]:
    """Accuracy of the object of a verb, among the objects of all verbs, if the mask does not attend to one side.

    SIDE/KNOCKED-OUT: the verb is on the left or right of the mask, and the attention from the mask to all tokens on the
    left or right is masked in all blocks. SIDE/none: no edit. chance: one object at random.
    """
    model = load_encoder(device).model
    estimates = {}
    for side in ("left", "right"):
        batch = context_prompts(side, device)
        objects = batch.answers.unique()
        position = torch.arange(batch.ids.shape[1], device=device)
        sides = {
            "left": position < batch.at[:, None],
            "right": position > batch.at[:, None],
            "none": torch.zeros_like(batch.visible),
        }
        for name, keys in sides.items():
            logits = predict(model, batch, _knock_out(batch, keys))
            is_right = objects[logits[:, objects].argmax(-1)] == batch.answers
            estimates[f"encoder/context/{side}/{name}"] = share(is_right)
        estimates["encoder/context/chance"] = exact(1 / len(objects))
    return estimates


def measure_copying(device: str) -> dict[str, Estimate]:
    """Accuracy of a noun that occurs earlier in the text, with and without the heads that attend to it from the mask.

    The NUM_COPY_HEADS heads with the most attention from the mask to the noun are selected on other prompts. ablated:
    their outputs at the mask are replaced by the mean over all prompts. ablated/other-heads: as many random other heads
    of the same blocks. donor: share of prompts with the noun of another prompt as the output, if the heads' outputs are
    those of that prompt; donor/other-heads: as many others. knock-out/noun and knock-out/previous-token: accuracy
    if the mask does not attend to the noun, or to the token before it.
    """
    model = load_encoder(device).model
    selection, batch = copy_prompts(0, device), copy_prompts(1, device)
    rows = _rows(selection)
    patterns = record(model, selection, "attn.pattern")
    attention = torch.stack([each[rows, :, selection.at, selection.words].mean(0) for each in patterns])
    heads = _top_heads(attention, NUM_COPY_HEADS)
    outputs = _head_outputs(model, batch)
    means = [each.mean(0, keepdim=True).expand_as(each) for each in outputs]
    num_nouns = len(batch.answers.unique())  # the foil is the next noun with the same template
    donated = [each.unflatten(0, (-1, num_nouns)).roll(-1, 1).flatten(0, 1) for each in outputs]
    others = [_draw_other_heads(heads, attention.shape[1], seed) for seed in range(NUM_DRAWS)]

    def matches(targets: Tensor, edits: Mapping[str, EditSpec] | None = None) -> Tensor:
        return predict(model, batch, edits).argmax(-1) == targets

    def others_share(targets: Tensor, values: Sequence[Tensor]) -> Estimate:
        flags = [matches(targets, _replace_heads(batch, each, values)) for each in others]
        return share(torch.stack(flags))

    estimates = {
        "encoder/copy/accuracy": share(matches(batch.answers)),
        "encoder/copy/ablated": share(matches(batch.answers, _replace_heads(batch, heads, means))),
        "encoder/copy/ablated/other-heads": others_share(batch.answers, means),
        "encoder/copy/donor": share(matches(batch.foils, _replace_heads(batch, heads, donated))),
        "encoder/copy/donor/other-heads": others_share(batch.foils, donated),
    }
    for name, position in (("noun", batch.words), ("previous-token", batch.words - 1)):
        keys = F.one_hot(position, batch.ids.shape[1]).bool()
        estimates[f"encoder/copy/knock-out/{name}"] = share(matches(batch.answers, _knock_out(batch, keys)))
    return estimates | _list_heads("encoder/copy", heads)


def measure_categories(device: str) -> dict[str, Estimate]:
    """Share of nouns whose nearest other noun is of the same category, after DEPTH blocks (0 is the embedding).

    A noun's vector is the mean of the residual stream at the noun over equal contexts for all nouns, minus the mean of
    all nouns; the similarity is the cosine. DEPTH/shuffled: categories in random order.
    """
    model = load_encoder(device).model
    batches, categories = category_prompts(device)
    names = sorted(set(categories))
    labels = torch.tensor([names.index(category) for category in categories])
    recorded = [
        torch.stack([each[_rows(batch), batch.words] for each in record(model, batch, "embed", "resid_post")])
        for batch in batches
    ]
    vectors = torch.stack(recorded).mean(0).cpu()  # (depths, nouns, d)
    vectors = F.normalize(vectors - vectors.mean(1, keepdim=True), dim=-1)
    similarity = vectors @ vectors.mT
    similarity.diagonal(dim1=1, dim2=2).fill_(MASKED)
    generator = torch.Generator().manual_seed(0)
    shuffled = [labels[torch.randperm(len(labels), generator=generator)] for _ in range(NUM_DRAWS)]
    estimates = {}
    for depth, nearest in enumerate(similarity.argmax(-1)):
        estimates[f"encoder/categories/{depth}"] = share(labels[nearest] == labels)
        shares = [float((each[nearest] == each).float().mean()) for each in shuffled]
        estimates[f"encoder/categories/{depth}/shuffled"] = estimate(shares)
    return estimates


PARTS: tuple[Callable[[str], dict[str, Estimate]], ...] = (
    measure_pronoun_patching,
    measure_pronoun_heads,
    measure_context,
    measure_copying,
    measure_categories,
)
