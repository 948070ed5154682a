"""What a model of transformers offers. Its own package is not imported here: the model brings it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check import theirs_attention, theirs_learning, theirs_state
from cutaway.check.plain import logits_of, parameters
from cutaway.check.target import Target
from cutaway.check.theirs_writing import add_writing, fixed_cache

SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "cls_token_id", "sep_token_id")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
BY_PADS = ("create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds", "make_positions")
"""Methods of embeddings whose positions are counted by the padding token."""
PLACED = "embed_positions"
"""A table that numbers tokens by the mask itself, where it takes one (OPT)."""
SHORT = ("dynamic", "longrope")
"""Scalings of RoPE that turn all tokens by other angles beyond the original length."""


def is_one(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    return any(each.__module__.startswith("transformers.") for each in type(module).__mro__) and hasattr(
        module, "config"
    )


def target(model: Any, seed: int) -> Target:
    """A target by the arguments that its forward takes."""
    config = model.config.get_text_config(decoder=True) if not model.config.is_encoder_decoder else model.config
    takes = parameters(model.forward)
    found = Target(name=type(model).__name__, module=model)
    found.kind = kind_of(model, config)
    found.device, found.dtype = model.device, model.dtype
    facts(found, model, config)
    theirs_state.offer(found, model, seed)
    found.pads_counted = any(hasattr(part, name) for part in model.modules() for name in BY_PADS)
    found.source_vocab = getattr(config, "src_vocab_size", None) or config.vocab_size
    if found.kind != "encoder-decoder" and ("position_ids" in takes or found.pads_counted):
        found.counted = True
    plain: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
    theirs_learning.offer(found, model, takes, plain)
    if found.kind == "encoder-decoder":
        of_both(found, model, config, seed)
        theirs_attention.offer(found, model)
        return found
    found.logits = lambda tokens: logits_of(model(input_ids=tokens, **plain))
    theirs_attention.offer(found, model)
    if "attention_mask" in takes:
        found.padded = lambda tokens, mask: logits_of(
            model(input_ids=tokens, **masked(found, model, takes, mask), **plain)
        )
    if "position_ids" in takes and "attention_mask" in takes:
        found.unplaced = lambda tokens, mask: logits_of(model(input_ids=tokens, attention_mask=mask.long(), **plain))
    if "position_ids" in takes and not getattr(config, "alibi", False):
        found.placed = lambda tokens, positions: logits_of(model(input_ids=tokens, position_ids=positions, **plain))
    if found.kind == "decoder" and "past_key_values" in takes:
        found.cached = stepper(lambda tokens, state: model(input_ids=tokens, past_key_values=state, use_cache=True))
        if model.can_generate():
            add_writing(found, model, told)
        found.poisoned = fixed_cache(
            model,
            lambda tokens, cache: logits_of(model(input_ids=tokens, past_key_values=cache, use_cache=True)),
        )
    if "labels" in takes and found.kind == "decoder":
        found.labelled = lambda tokens, labels: logits_of(model(input_ids=tokens, labels=labels, **plain))
    return found


def kind_of(model: Any, config: Any) -> Any:
    """Decoder, encoder or both."""
    if config.is_encoder_decoder:
        return "encoder-decoder"
    if model.can_generate() or getattr(config, "is_decoder", False):
        return "decoder"
    causal = [getattr(part, "is_causal", None) for part in model.modules() if hasattr(part, "is_causal")]
    return "decoder" if causal and all(causal) else "encoder"


def facts(found: Target, model: Any, config: Any) -> None:
    """What the configuration says."""
    found.vocab = getattr(config, "decoder_vocab_size", None) or getattr(config, "vocab_size", None)
    found.layers = getattr(config, "num_hidden_layers", None)
    found.tied = getattr(config, "tie_word_embeddings", None)
    found.pad, found.eos = number(config, "pad_token_id"), number(config, "eos_token_id")
    special = [number(config, name) for name in SPECIAL]
    found.special = tuple(sorted({token for token in special if token is not None}))
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))] if isinstance(rope, dict) else []
    lengths = [getattr(config, name, None) for name in LENGTHS]
    lengths += [each.get("original_max_position_embeddings") for each in ropes if each.get("rope_type") in SHORT]
    known = [length for length in lengths if isinstance(length, int) and length > 0]
    found.longest = min(known) if known else None
    types = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in types if types else isinstance(window, int)
    slides = slides and found.kind == "decoder"  # what sees both sides counts its window in other ways
    found.windows = (window,) if slides and isinstance(window, int) else ()
    found.window = window if found.windows and types <= {"sliding_attention"} else None


def number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) else None


def masked(found: Target, model: Any, takes: list[str], mask: Tensor) -> dict[str, Any]:
    """The mask, and the positions that follow from it where they are to be told (its own `generate` does the same)."""
    told: dict[str, Any] = {"attention_mask": mask.long()}
    if "position_ids" in takes and not found.pads_counted and not by_mask(model):
        told["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return told


def by_mask(model: Any) -> bool:
    """Whether the model numbers real tokens by the mask, so that nobody else has to."""
    tables = [part for name, part in model.named_modules() if name.endswith(PLACED)]
    return any("attention_mask" in parameters(part.forward) for part in tables)


def stepper(call: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, Any], tuple[Tensor, Any]]:
    """Steps with the cache that it makes itself."""

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        out = call(tokens, state)
        return out.logits, out.past_key_values

    return step


def told(tokens: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """A text for its `generate`."""
    return {"inputs": tokens, "attention_mask": torch.ones_like(tokens) if mask is None else mask.long()}


def source_for(model: Any, config: Any, seed: int) -> Tensor:
    """A source text without special tokens."""
    low = min(5, config.vocab_size - 1)
    draw = torch.randint(low, config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(seed + 1))
    return draw.to(model.device)


def started(model: Any, source: Tensor, row: Tensor) -> Tensor:
    """The loss of one text, as training has it: what the decoder reads is made of the labels by the model itself."""
    kept = dict(model.config.__dict__)
    try:
        model.config.decoder_start_token_id = int(row[0])
        return model(input_ids=source, labels=row[None, 1:], use_cache=False).loss
    finally:
        model.config.__dict__.clear()
        model.config.__dict__.update(kept)


def of_both(found: Target, model: Any, config: Any, seed: int) -> None:
    """An encoder-decoder: a fixed source for questions about the target's tokens."""
    source = source_for(model, config, seed)

    def rows(tokens: Tensor) -> Tensor:
        return source.expand(len(tokens), -1)

    def run(tokens: Tensor, **how: Any) -> Any:
        return model(input_ids=rows(tokens), decoder_input_ids=tokens, **{"use_cache": False} | how)

    def crossed(source: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
        told = {} if mask is None else {"attention_mask": mask.long()}
        return logits_of(model(input_ids=source, decoder_input_ids=tokens, use_cache=False, **told))

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        memory, past = (None, None) if state is None else state
        memory = model.get_encoder()(input_ids=rows(tokens)) if memory is None else memory
        out = model(encoder_outputs=memory, decoder_input_ids=tokens, past_key_values=past, use_cache=True)
        return out.logits, (memory, out.past_key_values)

    found.logits = lambda tokens: logits_of(run(tokens))
    found.padded = lambda tokens, mask: logits_of(run(tokens, decoder_attention_mask=mask.long()))
    found.crossed, found.cached = crossed, step
    if "labels" in parameters(model.forward):
        found.loss = lambda tokens, labels: (
            torch.stack([started(model, source, row) for row in tokens]).mean()
            if config.pad_token_id is not None and torch.equal(tokens, labels)
            else run(tokens[:, :-1], labels=labels[:, 1:].contiguous()).loss
        )
    if model.can_generate():
        add_writing(
            found,
            model,
            lambda tokens, _: {
                "inputs": rows(tokens),
                "decoder_input_ids": tokens,
                "decoder_start_token_id": int(tokens[0, 0]),
            },
        )
