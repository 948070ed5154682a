"""Mechanisms of tiny-dates, an encoder-decoder that converts dates to ISO 8601.

Alignment by cross-attention, the tokens that carry a field, the head that selects the field, and the use of attention
in the encoder. Blocks and heads are selected on languages other than those on which the effects are measured.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from cutaway.learn.studies.mechanisms.dates_prompts import (
    FIELDS,
    LANGUAGES,
    NUMERIC_FORMATS,
    SELECTION_LANGUAGES,
    DateBatch,
    load_date_model,
    sample_batch,
    select_rows,
)
from cutaway.learn.studies.study import Estimate, estimate, estimate_share, exact
from cutaway.lens.edit import EditSpec, TensorFn, edit
from cutaway.lens.trace import trace
from cutaway.model import EncoderDecoder

NUM_PROMPTS, SELECTION_SEED, SEED, DONOR_SEED = 200, 0, 1, 2
MASKED = float("-inf")


@torch.no_grad()
def predict(model: EncoderDecoder, batch: DateBatch, edits: Mapping[str, EditSpec] | None = None) -> Tensor:
    """(B, T): most likely token at each position of the target, given the true tokens before it."""
    with edit(model, edits) if edits else nullcontext():
        return model(batch.source, batch.decoder_input, batch.mask).argmax(-1)


@torch.no_grad()
def decode(model: EncoderDecoder, batch: DateBatch, edits: Mapping[str, EditSpec]) -> Tensor:
    """(B, T): tokens of greedy decoding."""
    tokens = batch.decoder_input[:, :1]
    with edit(model, edits):
        for _ in range(batch.target.shape[1]):
            logits = model(batch.source, tokens, batch.mask)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens[:, 1:]


@torch.no_grad()
def record(model: EncoderDecoder, batch: DateBatch, pattern: str) -> dict[str, Tensor]:
    with trace(model, pattern) as t:
        model(batch.source, batch.decoder_input, batch.mask)
    return {name: t[name].as_subclass(Tensor) for name in t}


def field_matches(tokens: Tensor, batch: DateBatch, field: str, target: Tensor | None = None) -> Tensor:
    """(B,): whether all tokens of a field are those of the target."""
    indices = batch.target_tokens[field]
    return (tokens[:, indices] == (batch.target if target is None else target)[:, indices]).all(1)


def share(flags: Tensor) -> Estimate:
    return estimate_share(flags.float().flatten().tolist())


def measure_alignment(device: str) -> dict[str, Estimate]:
    """Share of the tokens of a target field whose largest cross-attention weight is on a source token of that field.

    FIELD: mean over the heads of one block. FIELD/head: one head. Block and head are selected on other languages.
    FIELD/all-heads: mean over all heads of all blocks. FIELD/chance: a source token at random.
    """
    model = load_date_model(device).model
    selection = sample_batch(NUM_PROMPTS, SELECTION_LANGUAGES, SELECTION_SEED, device)
    batch = sample_batch(NUM_PROMPTS, LANGUAGES, SEED, device)
    selected, measured = (_cross_attention(model, each) for each in (selection, batch))
    block_scores = [_is_aligned(selected.mean(2), selection, field).float().mean((1, 2)) for field in FIELDS]
    block = int(torch.stack(block_scores).mean(0).argmax())
    estimates = {"dates/alignment/block": exact(block)}
    for field in FIELDS:
        scores = _is_aligned(selected.transpose(1, 2), selection, field).float().mean((2, 3))  # (layers, heads)
        layer, head = divmod(int(scores.argmax()), scores.shape[1])
        aligned = _is_aligned(measured.transpose(1, 2), batch, field)  # (layers, heads, B, tokens)
        estimates[f"dates/alignment/{field}"] = share(_is_aligned(measured[block].mean(1), batch, field))
        estimates[f"dates/alignment/{field}/head"] = share(aligned[layer, head])
        estimates[f"dates/alignment/{field}/all-heads"] = estimate(aligned.float().mean((0, 1, 3)).tolist())
        chance = batch.spans[field].sum(1) / batch.mask.sum(1)
        estimates[f"dates/alignment/{field}/chance"] = estimate(chance.tolist())
    return estimates


def _cross_attention(model: EncoderDecoder, batch: DateBatch) -> Tensor:
    """(layers, B, heads, T, S)"""
    return torch.stack([*record(model, batch, "cross.pattern").values()])


def _is_aligned(patterns: Tensor, batch: DateBatch, field: str) -> Tensor:
    """(…, B, tokens of the field): whether the largest weight of a pattern, (…, B, T, S), is in the field's span."""
    keys = patterns[..., batch.target_tokens[field], :].argmax(-1)
    span = batch.spans[field].expand(*keys.shape[:-1], -1)
    return span.gather(-1, keys)


def measure_knock_out(device: str) -> dict[str, Estimate]:
    """Accuracy of a field if no decoder block attends to the source tokens of a span: SPAN/FIELD.

    The span `other` is all tokens outside of the fields, and `none` is the model without an edit.
    """
    model = load_date_model(device).model
    batch = sample_batch(NUM_PROMPTS, LANGUAGES, SEED, device)
    spans = batch.spans | {"other": batch.between, "none": torch.zeros_like(batch.mask)}
    estimates = {}
    for name, span in spans.items():
        tokens = predict(model, batch, {"decoder.blocks.*.cross.scores": _mask_keys(span)})
        for field in FIELDS:
            estimates[f"dates/knock-out/{name}/{field}"] = share(field_matches(tokens, batch, field))
    return estimates


def _mask_keys(keys: Tensor) -> TensorFn:
    """Edit of scores, (B, H, T, S), that masks the keys, (B, S)."""
    return lambda scores: scores.masked_fill(keys[:, None, None], MASKED)


def measure_field_patching(device: str) -> dict[str, Estimate]:
    """Fields of the output after the encoder's output at the tokens of one field is replaced by that of another date.

    The other date (the donor) differs in day, month, year and language. SPAN/FIELD/donor: share of outputs with the
    donor's value of the field. SPAN/FIELD/own: share with the value of the text.
    """
    model = load_date_model(device).model
    receivers = sample_batch(4 * NUM_PROMPTS, LANGUAGES[::2], SEED, device)
    donors = sample_batch(4 * NUM_PROMPTS, LANGUAGES[1::2], DONOR_SEED, device)
    differ = torch.stack([~field_matches(donors.target, receivers, field) for field in FIELDS]).all(0)
    same_size = torch.stack([receivers.spans[field].sum(1) == donors.spans[field].sum(1) for field in FIELDS]).all(0)
    rows = (differ & same_size).nonzero().flatten()[:NUM_PROMPTS]
    receivers, donors = select_rows(receivers, rows), select_rows(donors, rows)
    donated = record(model, donors, "encoder.final_norm")["encoder.final_norm"]
    estimates = {}
    for span in FIELDS:
        edits = {"encoder.final_norm": _replace_tokens(receivers.spans[span], donated[donors.spans[span]])}
        tokens = decode(model, receivers, edits)
        for field in FIELDS:
            key = f"dates/patch/{span}/{field}"
            estimates[f"{key}/donor"] = share(field_matches(tokens, receivers, field, donors.target))
            estimates[f"{key}/own"] = share(field_matches(tokens, receivers, field))
    return estimates


def _replace_tokens(span: Tensor, values: Tensor) -> TensorFn:
    """Edit of activations, (B, S, d), that sets the tokens of the span, (B, S), to the values, (tokens, d)."""

    def apply(activation: Tensor) -> Tensor:
        activation[span] = values
        return activation

    return apply


def measure_field_head(device: str) -> dict[str, Estimate]:
    """Share of prompts in which the decoder outputs the day in place of the month, or the month in place of the day.

    Both follow the token "-". head: the output of one self-attention head (selected on other languages) is that at the
    other field's position. other-heads: the same for all other heads of its block. position: the position vector is
    that of the other field; adjacent-position: that before the month or after the day. attention/month/start and
    attention/day/itself: attention weights of the head at the two positions.
    """
    model = load_date_model(device).model
    selection = sample_batch(NUM_PROMPTS, SELECTION_LANGUAGES, SELECTION_SEED, device)
    batch = sample_batch(NUM_PROMPTS, LANGUAGES, SEED, device)
    month, day = (batch.target_tokens[field][0] for field in ("month", "day"))
    swaps = {"month-to-day": (month, day), "day-to-month": (day, month)}
    outputs = record(model, selection, "decoder.*.attn.z")
    heads = range(next(iter(outputs.values())).shape[2])
    scores = {
        (site, head): sum(
            float(_copy_and_predict(model, selection, site, z, [head], *swap).float().mean()) for swap in swaps.values()
        )
        for site, z in outputs.items()
        for head in heads
    }
    site, head = max(scores, key=lambda key: scores[key])
    others = [other for other in heads if other != head]
    z, vectors = record(model, batch, site)[site], _position_vectors(model, batch)
    layer = int(site.split(".")[2])  # decoder.blocks.LAYER.attn.z
    estimates = {"dates/field-head/head/layer": exact(layer), "dates/field-head/head/index": exact(head)}
    for name, (at, source) in swaps.items():
        for kind, selected in (("head", [head]), ("other-heads", others)):
            flags = _copy_and_predict(model, batch, site, z, selected, at, source)
            estimates[f"dates/field-head/{name}/{kind}"] = share(flags)
        for kind, position in (("position", source), ("adjacent-position", month - 1 if at == month else day + 1)):
            tokens = predict(model, batch, {"decoder.embed": _add_at(at, vectors[position] - vectors[at])})
            estimates[f"dates/field-head/{name}/{kind}"] = share(tokens[:, at] == batch.target[:, source])
    pattern = record(model, batch, site.replace(".z", ".pattern")).popitem()[1][:, head]  # (B, T, T)
    estimates["dates/field-head/attention/month/start"] = estimate(pattern[:, month, 0].tolist())
    estimates["dates/field-head/attention/day/itself"] = estimate(pattern[:, day, day].tolist())
    return estimates


def _copy_and_predict(
    model: EncoderDecoder, batch: DateBatch, site: str, z: Tensor, heads: list[int], at: int, source: int
) -> Tensor:
    """(B,): whether the token at one position is the target of another, with the outputs of the heads at the other.

    `z` is the outputs of all heads at the site, (B, T, H, E).
    """

    def apply(activation: Tensor) -> Tensor:
        activation[:, at, heads] = z[:, source, heads]
        return activation

    return predict(model, batch, {site: apply})[:, at] == batch.target[:, source]


def _add_at(position: int, vector: Tensor) -> TensorFn:
    def apply(activation: Tensor) -> Tensor:
        activation[:, position] += vector
        return activation

    return apply


@torch.no_grad()
def _position_vectors(model: EncoderDecoder, batch: DateBatch) -> Tensor:
    """(T + 1, d): decoder embeddings of one token at all positions, which differ by the position vectors."""
    tokens = batch.decoder_input[:1, :1].expand(1, batch.target.shape[1] + 1)
    with trace(model, "decoder.embed") as t:
        model(batch.source[:1], tokens, batch.mask[:1])
    return t["decoder.embed"].as_subclass(Tensor)[0]


def measure_previous_tokens(device: str) -> dict[str, Estimate]:
    """Accuracy of month and day if the earlier output tokens are wrong: PREFIX/FIELD.

    other-date: the tokens of another date. dashes: only "-" after the start token, so that the number of "-" is wrong.
    digits: the token "-" directly before the field is replaced by the digits before it.
    """
    model = load_date_model(device).model
    batch = sample_batch(NUM_PROMPTS, LANGUAGES, SEED, device)
    estimates = {}
    for field in ("month", "day"):
        index = batch.target_tokens[field][0]
        prefixes = {name: batch.decoder_input.clone() for name in ("other-date", "dashes", "digits")}
        prefixes["other-date"][:, 1:] = batch.decoder_input[:, 1:].roll(1, 0)
        prefixes["dashes"][:, 1:] = batch.decoder_input[:, index, None]
        prefixes["digits"][:, index] = batch.decoder_input[:, index - 1]
        for name, prefix in prefixes.items():
            with torch.no_grad():
                tokens = model(batch.source, prefix, batch.mask).argmax(-1)
            estimates[f"dates/previous-tokens/{name}/{field}"] = share(field_matches(tokens, batch, field))
    return estimates


def measure_encoder_attention(device: str) -> dict[str, Estimate]:
    """Accuracy of a field if each source token attends to itself only, in all encoder blocks: FORMAT/FIELD.

    two-digit-day and one-digit-day: the month is a name. A day of one digit may be the same token as the last digit of
    the year. numeric: the month is a number. FORMAT/FIELD/zero: the outputs of attention are zero instead.
    FORMAT/FIELD/intact: without an edit.
    """
    model = load_date_model(device).model
    named = sample_batch(3 * NUM_PROMPTS, LANGUAGES, SEED, device)
    is_one_digit = torch.tensor([int(iso[-2:]) < 10 for iso in _iso_texts(named, device)], device=device)
    batches = {
        "two-digit-day": select_rows(named, (~is_one_digit).nonzero().flatten()[:NUM_PROMPTS]),
        "one-digit-day": select_rows(named, is_one_digit.nonzero().flatten()[:NUM_PROMPTS]),
        "numeric": sample_batch(NUM_PROMPTS, [*NUMERIC_FORMATS], SEED, device),
    }
    estimates = {}
    for name, batch in batches.items():
        tokens = {
            "": predict(model, batch, {"encoder.blocks.*.attn.scores": _mask_others(batch.mask)}),
            "/zero": predict(model, batch, {"encoder.blocks.*.attn.out": "zero"}),
            "/intact": predict(model, batch),
        }
        for field in FIELDS:
            for suffix, each in tokens.items():
                key = f"dates/encoder-attention/{name}/{field}{suffix}"
                estimates[key] = share(field_matches(each, batch, field))
    return estimates


def _iso_texts(batch: DateBatch, device: str) -> list[str]:
    tokenizer = load_date_model(device).tokenizer
    return [tokenizer.decode(ids) for ids in batch.target.tolist()]


def _mask_others(mask: Tensor) -> TensorFn:
    """Edit of scores, (B, H, S, S), that masks all keys but the query itself. Queries of padding are unchanged."""
    others = ~torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device) & mask[:, :, None]
    return lambda scores: scores.masked_fill(others[:, None], MASKED)


PARTS: tuple[Callable[[str], dict[str, Estimate]], ...] = (
    measure_alignment,
    measure_knock_out,
    measure_field_patching,
    measure_field_head,
    measure_previous_tokens,
    measure_encoder_attention,
)
