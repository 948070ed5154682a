"""What attention heads look at: how widely, and by which rule."""

from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.evaluate import functional
from cutaway.lens.adapters import require_cutaway_model
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, eval_mode, prepare_inputs, upcast_float32
from cutaway.lens.analysis.labeled_tensor import LabeledTensor
from cutaway.lens.trace import trace
from cutaway.model import EncoderDecoder, Transformer

HEAD_TYPES = ("previous_token", "duplicate_token", "induction", "first_token")
DEFAULT_REPEAT_LEN = 32
"""Random tokens before they are repeated."""


def attention_entropy(model: Any, tokens: TextOrTokens, *, source: TextOrTokens | None = None) -> LabeledTensor:
    """How widely each head looks: the entropy of its pattern's rows, averaged over the text; 0 is one place alone.

    What a sink takes counts as one more place.
    """
    this = prepare_inputs(model, tokens, source)
    patterns = _attention_patterns(this)
    return _build_result(
        [pattern_entropy(pattern) for _, pattern in patterns],
        [name for name, _ in patterns],
        "entropy of attention",
        "bits",
    )


def pattern_entropy(pattern: Tensor) -> Tensor:
    """(B, H, T, S) → (H,), in bits."""
    return pattern_entropy_by_query(pattern).mean((0, 2))


def pattern_entropy_by_query(pattern: Tensor) -> Tensor:
    """(…, T, S) → (…, T), in bits."""
    bits: Tensor = functional.entropy(functional.append_missing_mass(pattern)) / functional.NATS_PER_UNIT["bits"]
    return bits


def _attention_patterns(inputs: AnalysisInputs) -> list[tuple[str, Tensor]]:
    """Every attention's pattern (B, H, T, S) by its layer, and by its stack and kind where there are several."""
    with (
        eval_mode(inputs.model),
        trace(inputs.model, "attn.pattern", *(["cross.pattern"] if inputs.site_prefix else [])) as t,
    ):
        inputs.run()
    return [(_layer_label(name), upcast_float32(t[name])) for name in t]


def _layer_label(name: str) -> str:
    return name.removesuffix(".pattern").removesuffix(".attn").replace("blocks.", "")


def _build_result(scores: list[Tensor], names: list[str], title: str, unit: str, note: str = "") -> LabeledTensor:
    """A row a layer; where layers differ in their heads, the places without one are not a number."""
    most = max(len(row) for row in scores)
    values = scores[0].new_full((len(scores), most, *scores[0].shape[1:]), float("nan"))
    for at, row in enumerate(scores):
        values[at, : len(row)] = row
    labels = (tuple(names), tuple(str(head) for head in range(most)))
    if values.ndim == 3:
        return LabeledTensor(title, values, ("layer", "head", "head_type"), (*labels, HEAD_TYPES), unit, note)
    return LabeledTensor(title, values, ("layer", "head"), labels, unit, note)


def head_scores(model: Any, *, repeat_len: int | None = None, batch_size: int = 8, seed: int = 0) -> LabeledTensor:
    """How much of its attention each head spends by four rules, on random tokens that are then repeated.

    previous_token: the token before · duplicate_token: where this token stood the first time · induction: what came
    after it then · first_token: the first token of all, where heads rest. 1 is always.
    """
    inner = require_cutaway_model(model)
    if isinstance(inner, EncoderDecoder):
        raise InputError(
            "kinds of heads are scored on one text, and this model reads two; take a decoder or an encoder"
        )
    tokens = repeated_random_tokens(inner, getattr(model, "tokenizer", None), repeat_len, batch_size, seed)
    half = tokens.shape[1] // 2
    scores, names = [], []
    for name, pattern in _attention_patterns(AnalysisInputs(inner, None, tokens, None)):
        names.append(name)
        scores.append(torch.stack(pattern_head_scores(pattern, half), -1))
    later = torch.arange(half + 1, 2 * half + 1)
    chance = float((1.0 / later).mean()) if inner.stacks.keys() == {"decoder"} else 1 / (2 * half)
    note = f"{batch_size} rows of {half} random tokens, twice; a head that looks everywhere alike spends {chance:.3f}"
    return _build_result(scores, names, "kinds of heads", "share of attention", note)


def pattern_head_scores(pattern: Tensor, repeat_len: int) -> list[Tensor]:
    """(H,) for each kind, in the second half only, where they can be told apart."""
    back = {
        gap: pattern.diagonal(-gap, -2, -1) for gap in (1, repeat_len, repeat_len - 1)
    }  # (B, H, T − gap): row t looks at t − gap
    previous = back[1][..., repeat_len - 1 :].mean((0, 2))
    duplicate = back[repeat_len].mean((0, 2))
    induction = back[repeat_len - 1][..., 1:].mean((0, 2))  # from the second half's first token on
    first = pattern[..., repeat_len + 1 :, 0].mean((0, 2))
    return [previous, duplicate, induction, first]


def repeated_random_tokens(
    model: Transformer, tokenizer: Any, repeat_len: int | None, batch_size: int, seed: int
) -> Tensor:
    """(rows, 2·length): random tokens, no two alike in a half, and once more."""
    size = model.config.vocab_size
    special = set(getattr(tokenizer, "all_special_ids", ()))
    usual = torch.tensor([token for token in range(size) if token not in special])
    stack = next(iter(model.stacks.values()))
    context = getattr(stack.embed.position, "max_positions", None) or model.config.context or 2 * DEFAULT_REPEAT_LEN
    repeat_len = min(DEFAULT_REPEAT_LEN, context // 2, len(usual)) if repeat_len is None else repeat_len
    if isinstance(repeat_len, bool) or not isinstance(repeat_len, int) or not 3 <= repeat_len <= len(usual):
        raise InputError(
            f"repeat_len is {repeat_len!r}; give 3 to {len(usual)}, as the tokens that are repeated are all different"
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size is {batch_size!r}; give at least 1")
    draw = torch.Generator().manual_seed(seed)
    once = torch.stack([usual[torch.randperm(len(usual), generator=draw)[:repeat_len]] for _ in range(batch_size)])
    return torch.cat((once, once), 1).to(model.device)
