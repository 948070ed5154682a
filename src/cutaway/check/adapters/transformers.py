"""What a model of transformers offers. Its own package is not imported here: the model brings it."""

import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.adapters.config_variants import (
    changed_transformers_value,
    find_config_values,
    random_state_dict,
    validate_same_shapes,
)
from cutaway.check.adapters.declared_config import get_module_config, self_attention_configs
from cutaway.check.adapters.module import argument_names, extract_logits
from cutaway.check.checked_model import CheckedModel, LogitsFunction, ReloadedModel
from cutaway.check.module_state import MAX_PERTURBED_PARAMS
from cutaway.check.report.finding import SkipCheckError
from cutaway.errors import CutawayError
from cutaway.families.config_fields import SupportedValues
from cutaway.families.load import load
from cutaway.families.registry import families
from cutaway.model import EncoderDecoder, EncoderOnly, Transformer

ATTN_IMPLEMENTATIONS = ("eager", "sdpa")


MAX_REBUILT_PARAMS = 10**8
"""Weights of a model that is made anew."""


def _add_attention_functions(checked: CheckedModel, model: Any) -> None:
    """Add what its configuration says, where the family is known, and the kernels that it takes."""
    config = get_module_config(model)
    if config is not None:
        stack = config.stacks.get("decoder") or config.stacks["encoder"]
        layers = self_attention_configs(config)
        inside = {layer.position.kind for layer in layers} - {"none"}
        added = stack.embedding.position.kind != "none"
        checked.has_positions = added or bool(inside)
        checked.relative_positions = bool(inside) and not added
        windows = {layer.window for layer in layers}
        checked.windows = tuple(sorted(window for window in windows if window is not None))
        checked.window = windows.pop() if len(windows) == 1 else None
    if checked.logits is not None:
        checked.logits_by_kernel = _build_kernel_logits(model, checked.logits)


def _build_kernel_logits(model: Any, logits: LogitsFunction) -> dict[str, LogitsFunction]:
    """The logits by each kernel that the model takes; there is nothing to compare where it takes one only."""

    @contextmanager
    def switched(name: str) -> Iterator[None]:
        before = model.config._attn_implementation
        try:
            model.set_attn_implementation(name)
            yield
        finally:
            model.set_attn_implementation(before)

    def able(name: str) -> bool:
        try:
            with switched(name):
                return bool(model.config._attn_implementation == name)
        except Exception:  # however it refuses, that is no kernel of its
            return False

    def by(name: str) -> Callable[[Tensor], Tensor]:
        def run(tokens: Tensor) -> Tensor:
            with switched(name):
                return logits(tokens)

        return run

    if getattr(model.config, "_attn_implementation", None) not in ATTN_IMPLEMENTATIONS:
        return {}
    if not model._can_set_attn_implementation():
        return _rebuild_with_kernels(model)
    found: dict[str, LogitsFunction] = {name: by(name) for name in ATTN_IMPLEMENTATIONS if able(name)}
    return found if len(found) > 1 else {}


def _rebuild_with_kernels(model: Any) -> dict[str, LogitsFunction]:
    """The same for a small model that chooses its kernel when it is made: it is made anew around the same weights."""
    small = sum(each.numel() for each in model.parameters()) <= MAX_REBUILT_PARAMS
    if not small or not getattr(model, "_supports_sdpa", False) or model.config.is_encoder_decoder:
        return {}

    def by(name: str) -> LogitsFunction:
        def run(tokens: Tensor) -> Tensor:
            with import_module("transformers.initialization").no_init_weights(), model.device:
                other = type(model)._from_config(deepcopy(model.config), attn_implementation=name)
            other.load_state_dict(model.state_dict(), assign=True)
            for path, part in other.named_modules():
                part._buffers = model.get_submodule(path)._buffers
            return extract_logits(other.eval()(input_ids=tokens, use_cache=False))

        return run

    return {name: by(name) for name in ATTN_IMPLEMENTATIONS}


MicroBatches = Sequence[tuple[Tensor, Tensor]]


def _add_training_functions(
    checked: CheckedModel, model: Any, forward_args: list[str], forward_kwargs: dict[str, Any]
) -> None:
    """Add to a target what concerns learning; an encoder-decoder adds its own loss."""
    if getattr(model, "supports_gradient_checkpointing", False) and not getattr(
        model, "is_gradient_checkpointing", False
    ):
        checked.set_activation_checkpointing = lambda on: _set_gradient_checkpointing(model, on)
    if "labels" not in forward_args or checked.kind == "encoder-decoder":
        return
    if checked.kind == "decoder" or type(model).__name__.endswith("ForMaskedLM"):
        checked.loss = lambda tokens, labels: model(input_ids=tokens, labels=labels, **forward_kwargs).loss
    if checked.kind == "decoder" and _accepts_num_items_in_batch(model):
        checked.accumulated_loss = lambda pieces: _accumulated_loss(model, pieces, forward_kwargs)


def _set_gradient_checkpointing(model: Any, enabled: bool) -> None:
    if enabled:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def _accepts_num_items_in_batch(model: Any) -> bool:
    """Whether its Trainer would tell it how many labels all pieces have."""
    said = getattr(model, "accepts_loss_kwargs", None)
    kinds = [each.kind for each in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds if said is None else bool(said)


def _accumulated_loss(model: Any, micro_batches: MicroBatches, forward_kwargs: dict[str, Any]) -> Tensor:
    """As its Trainer has it: each piece is divided by the labels of all."""
    count = sum((labels[:, 1:] != -100).sum() for _, labels in micro_batches)
    losses = [
        model(input_ids=tokens, labels=labels, num_items_in_batch=count, **forward_kwargs).loss
        for tokens, labels in micro_batches
    ]
    return sum(losses[1:], losses[0])


def _add_state_functions(checked: CheckedModel, model: Any, seed: int) -> None:
    """Add to a target what concerns its state."""
    checked.reload = lambda: _save_and_reload(model, checked, seed)
    if getattr(model.config, "model_type", None) in families():
        checked.config_variants = lambda: _build_config_variants(model, seed)


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Without its bars and notices, which are for other occasions."""
    logging = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _save_and_reload(model: Any, checked: CheckedModel, seed: int) -> ReloadedModel:
    """Saved by its own method and loaded by it, and by cutaway where its family is known."""
    kept = dict(model.config.__dict__)  # saving writes the dtype and the class into it
    with tempfile.TemporaryDirectory(prefix="cutaway-check-") as directory, _silence_transformers():
        try:
            model.save_pretrained(directory)
        finally:
            model.config.__dict__.clear()
            model.config.__dict__.update(kept)
        how = {"dtype": model.dtype, "attn_implementation": model.config._attn_implementation}
        if getattr(model.config, "_experts_implementation", None) is not None:
            how["experts_implementation"] = model.config._experts_implementation
        back, said = type(model).from_pretrained(directory, output_loading_info=True, **how)
        back.to(model.device)
        missing = [*map(str, said["missing_keys"]), *(str(key) for key in said.get("mismatched_keys", ()))]
        again = ReloadedModel(back, sorted(missing), sorted(map(str, said["unexpected_keys"])))
        _add_cutaway_reference(again, model, checked, Path(directory), seed)
        for each in back.parameters():  # the files they are mapped from go
            each.data = each.data.clone()
    return again


# ------------------------------------------------------------------------------------------- the second implementation


def _add_cutaway_reference(
    reloaded: ReloadedModel, model: Any, checked: CheckedModel, directory: Path, seed: int
) -> None:
    """Our own reading of what was saved, or why there is none."""
    kind = type(model)
    family = families().get(getattr(model.config, "model_type", ""))
    known = family is not None and kind.__name__ in (family.architecture, family.base_architecture)
    bias = getattr(getattr(model.config, "attn_config", None), "alibi_bias_max", 8)
    if bias != 8:
        reloaded.no_reference_reason = (
            f"needs reference_logits (transformers computes every MPT as if alibi_bias_max were 8, and it is {bias})"
        )
        return
    if not known or not kind.__module__.startswith("transformers."):
        reloaded.no_reference_reason = (
            f"needs reference_logits (cutaway has no reading of a {kind.__name__} of its own)"
        )
        return
    try:
        ours = load(directory, device=model.device, dtype=torch.float32).model
    except CutawayError as error:
        reloaded.no_reference_reason = f"needs reference_logits (cutaway does not read this one: {error})"
        return
    for each in ours.parameters():
        each.data = each.data.clone()
    if isinstance(ours, EncoderDecoder):
        source = _random_source_tokens(model, model.config, seed)
        reloaded.reference_logits = lambda tokens: ours(source.expand(len(tokens), -1), tokens)
    elif isinstance(ours, EncoderOnly):
        call = ours if ours.head is not None else ours.encode
        reloaded.reference_logits = lambda tokens: call(tokens)
    else:
        reloaded.reference_logits = lambda tokens: ours(tokens)
    if checked.kind != "encoder-decoder":
        reloaded.find_divergent_layer = lambda module, tokens, noise: _find_divergent_layer(
            module, reloaded.reference_logits, ours, tokens, noise
        )


def _find_divergent_layer(
    transformers_model: Any, reference_logits: Any, cutaway_model: Transformer, tokens: Tensor, noise_ratio: float
) -> str | None:
    """The first layer whose stream is another one."""
    (stack,) = cutaway_model.stacks.values()
    names = {id(block): f"layer {n}" for n, block in enumerate(stack.blocks[:-1])}
    names = {id(stack.embed): "the embedding"} | names | {id(stack.final_norm): "the last layer"}
    seen: dict[str, Tensor] = {}
    hooks = [
        part.register_forward_hook(lambda part, _given, out: seen.setdefault(names[id(part)], out.detach()))
        for part in (stack.embed, *stack.blocks[:-1], stack.final_norm)
    ]
    try:
        reference_logits(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    states = transformers_model(input_ids=tokens, output_hidden_states=True).hidden_states
    for (name, mine), other in zip(seen.items(), states or (), strict=False):
        far = 100 * (torch.finfo(other.dtype).eps + noise_ratio) * float(other.abs().max())
        if mine.shape == other.shape and float((mine - other).abs().max()) > far:
            return name
    return None


# ------------------------------------------------------------------------------------------------- other settings


def _build_config_variants(model: Any, seed: int) -> Mapping[str, Callable[[], LogitsFunction]]:
    """For each setting that the family's table counts as used, and that must be seen: the model with another value."""
    small = sum(each.numel() for each in model.parameters()) <= MAX_PERTURBED_PARAMS
    state = (
        random_state_dict(model, seed) if small else {name: each.detach() for name, each in model.state_dict().items()}
    )
    fields = families()[model.config.model_type].fields
    used = {key for field in fields if not isinstance(field, SupportedValues) for key in field.keys}
    made: dict[str, Callable[[], LogitsFunction]] = {"": partial(_logits_with_config, model, {}, state, seed)}
    for key in sorted(used):
        for path, config, value in find_config_values(model.config, key):
            other = changed_transformers_value(config, path.rpartition(".")[2], value)
            if other is not None:
                made[path] = partial(_logits_with_config, model, {path: other}, state, seed)
    return made


def _logits_with_config(
    model: Any, changes: dict[str, Any], state_dict: Mapping[str, Tensor], seed: int
) -> LogitsFunction:
    """The logits of a model with these settings and weights."""
    config = deepcopy(model.config)
    for path, value in changes.items():
        holder, _, key = path.rpartition(".")
        setattr(getattr(config, holder) if holder else config, key, value)
    with _silence_transformers(), import_module("transformers.initialization").no_init_weights(), model.device:
        other = type(model)(config)
    validate_same_shapes(other, state_dict)
    other.load_state_dict(state_dict, assign=True)
    logits = adapt_transformers_model(other.eval(), seed).logits
    assert logits is not None
    return logits


NUM_UNUSED_SLOTS = 5
"""Slots of a fixed cache that stay unused."""


InputBuilder = Callable[[Tensor, Tensor | None], dict[str, Any]]
"""A text and its mask, as `generate` is to be told of them."""


def _add_generation_functions(checked: CheckedModel, model: Any, build_inputs: InputBuilder) -> None:
    """All that `generate` offers. `build_inputs` tells it of the text that it goes on from."""

    def write(tokens: Tensor, n: int, mask: Tensor | None = None, **how: Any) -> Tensor:
        return _run_generate(model, n, build_inputs(tokens, mask), **how)[:, -n:]

    def row_by_row(tokens: Tensor, n: int, **how: Any) -> Tensor:
        """One text at a time: those that begin otherwise have other starts, and guesses are made for one only."""
        return torch.cat([write(tokens[row : row + 1], n, **how) for row in range(len(tokens))])

    def beams(tokens: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
        how = {"num_beams": k, "num_return_sequences": k, "length_penalty": 0.0}
        told = {"return_dict_in_generate": True, "output_scores": True}
        out = _run_generate(model, n, build_inputs(tokens, None), **how, **told)
        return out.sequences[:, -n:], out.sequences_scores

    def speculate(tokens: Tensor, n: int) -> Tensor:
        try:
            return row_by_row(tokens, n, prompt_lookup_num_tokens=3)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "crop" not in str(error):  # how its rolling caches say no
                raise
            raise SkipCheckError(f"it refuses to speculate: {str(error)[:100]}") from error

    both = checked.kind == "encoder-decoder"
    checked.generate = row_by_row if both else write
    if not both:
        checked.generate_padded = lambda tokens, mask, n: write(tokens, n, mask)
    checked.beam_search, checked.generate_speculative = beams, speculate
    checked.sample = _build_sampler(model, build_inputs)


@contextmanager
def _use_plain_generation_config(model: Any) -> Iterator[Any]:
    """Without the settings that came with the checkpoint: ends, forced and forbidden tokens, penalties."""
    before = model.generation_config
    try:
        model.generation_config = type(before)(pad_token_id=0)
        yield model.generation_config
    finally:
        model.generation_config = before


def _run_generate(model: Any, max_new_tokens: int, inputs: dict[str, Any], **generate_kwargs: Any) -> Any:
    """What its own `generate` gives for n tokens more."""
    generate_kwargs = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens} | generate_kwargs
    with _use_plain_generation_config(model):
        return model.generate(**inputs, **generate_kwargs)


def _build_sampler(model: Any, build_inputs: InputBuilder) -> Callable[..., Tensor]:
    """Draws by its own `generate`, which is given known logits in place of the model's."""

    def sample(logits: Tensor, n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
        start = torch.full((n, 1), 1, device=logits.device)
        known = [lambda _, scores: logits.to(scores.dtype).expand(len(scores), -1)]
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "logits_processor": known}
        return _run_generate(model, 1, build_inputs(start, None), do_sample=True, **how)[:, -1]

    return sample


def _build_static_cache_logits(model: Any, forward: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, float], Tensor]:
    """A pass in a cache of fixed size, in whose slots something was before."""

    def poisoned(tokens: Tensor, value: float) -> Tensor:
        kind = getattr(sys.modules.get("transformers.cache_utils"), "StaticCache", None)
        if kind is None:
            raise SkipCheckError("this version of transformers has no StaticCache")
        if not getattr(model, "_can_compile_fullgraph", False):
            raise SkipCheckError("it says that it takes no cache of fixed size")
        cache = kind(config=model.config, max_cache_len=tokens.shape[1] + NUM_UNUSED_SLOTS)
        forward(tokens[:, :1], cache)  # makes its buffers
        cache.reset()
        for layer in cache.layers:
            layer.keys.fill_(value)
            layer.values.fill_(value)
        return torch.cat([forward(piece, cache) for piece in (tokens[:, :7], tokens[:, 7:])], 1)

    return poisoned


SPECIAL_TOKEN_FIELDS = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "cls_token_id", "sep_token_id")


MAX_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len")


PAD_POSITION_METHODS = (
    "create_position_ids_from_input_ids",
    "create_position_ids_from_inputs_embeds",
    "make_positions",
)
"""Methods of embeddings whose positions are counted by the padding token."""


MASK_POSITION_EMBEDDING = "embed_positions"
"""A table that numbers tokens by the mask itself, where it takes one (OPT)."""


LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")
"""Scalings of RoPE that turn all tokens by other angles beyond the original length."""


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    return any(each.__module__.startswith("transformers.") for each in type(module).__mro__) and hasattr(
        module, "config"
    )


def adapt_transformers_model(model: Any, seed: int) -> CheckedModel:
    """A target by the arguments that its forward takes."""
    config = model.config.get_text_config(decoder=True) if not model.config.is_encoder_decoder else model.config
    takes = argument_names(model.forward)
    found = CheckedModel(name=type(model).__name__, module=model)
    found.kind = _infer_kind(model, config)
    found.device, found.dtype = model.device, model.dtype
    _set_config_properties(found, model, config)
    _add_state_functions(found, model, seed)
    found.positions_from_pad_token = any(
        hasattr(part, name) for part in model.modules() for name in PAD_POSITION_METHODS
    )
    found.source_vocab_size = getattr(config, "src_vocab_size", None) or config.vocab_size
    if found.kind != "encoder-decoder" and ("position_ids" in takes or found.positions_from_pad_token):
        found.positions_skip_padding = True
    plain: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
    _add_training_functions(found, model, takes, plain)
    if found.kind == "encoder-decoder":
        _adapt_encoder_decoder(found, model, config, seed)
        _add_attention_functions(found, model)
        return found
    found.logits = lambda tokens: extract_logits(model(input_ids=tokens, **plain))
    _add_attention_functions(found, model)
    if "attention_mask" in takes:
        found.logits_with_mask = lambda tokens, mask: extract_logits(
            model(input_ids=tokens, **_build_mask_inputs(found, model, takes, mask), **plain)
        )
    if "position_ids" in takes and "attention_mask" in takes:
        found.logits_with_mask_only = lambda tokens, mask: extract_logits(
            model(input_ids=tokens, attention_mask=mask.long(), **plain)
        )
    if "position_ids" in takes and not getattr(config, "alibi", False):
        found.logits_with_positions = lambda tokens, positions: extract_logits(
            model(input_ids=tokens, position_ids=positions, **plain)
        )
    if found.kind == "decoder" and "past_key_values" in takes:
        found.logits_with_cache = _build_cached_forward(
            lambda tokens, state: model(input_ids=tokens, past_key_values=state, use_cache=True)
        )
        if model.can_generate():
            _add_generation_functions(found, model, _build_generate_inputs)
        found.logits_with_filled_cache = _build_static_cache_logits(
            model,
            lambda tokens, cache: extract_logits(model(input_ids=tokens, past_key_values=cache, use_cache=True)),
        )
    if "labels" in takes and found.kind == "decoder":
        found.logits_with_labels = lambda tokens, labels: extract_logits(
            model(input_ids=tokens, labels=labels, **plain)
        )
    return found


def _infer_kind(model: Any, config: Any) -> Any:
    """Decoder, encoder or both."""
    if config.is_encoder_decoder:
        return "encoder-decoder"
    if model.can_generate() or getattr(config, "is_decoder", False):
        return "decoder"
    causal = [getattr(part, "is_causal", None) for part in model.modules() if hasattr(part, "is_causal")]
    return "decoder" if causal and all(causal) else "encoder"


def _set_config_properties(checked: CheckedModel, model: Any, config: Any) -> None:
    """What the configuration says."""
    checked.vocab_size = getattr(config, "decoder_vocab_size", None) or getattr(config, "vocab_size", None)
    checked.num_layers = getattr(config, "num_hidden_layers", None)
    checked.tied_embeddings = getattr(config, "tie_word_embeddings", None)
    checked.pad_token_id, checked.eos_token_id = (
        _get_token_id(config, "pad_token_id"),
        _get_token_id(config, "eos_token_id"),
    )
    special = [_get_token_id(config, name) for name in SPECIAL_TOKEN_FIELDS]
    checked.special_token_ids = tuple(sorted({token for token in special if token is not None}))
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))] if isinstance(rope, dict) else []
    lengths = [getattr(config, name, None) for name in MAX_LENGTH_FIELDS]
    lengths += [
        each.get("original_max_position_embeddings")
        for each in ropes
        if each.get("rope_type") in LENGTH_DEPENDENT_ROPE_TYPES
    ]
    known = [length for length in lengths if isinstance(length, int) and length > 0]
    checked.max_seq_len = min(known) if known else None
    types = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in types if types else isinstance(window, int)
    slides = slides and checked.kind == "decoder"  # what sees both sides counts its window in other ways
    checked.windows = (window,) if slides and isinstance(window, int) else ()
    checked.window = window if checked.windows and types <= {"sliding_attention"} else None


def _get_token_id(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) else None


def _build_mask_inputs(checked: CheckedModel, model: Any, forward_args: list[str], mask: Tensor) -> dict[str, Any]:
    """The mask, and the positions that follow from it where they are to be told (its own `generate` does the same)."""
    told: dict[str, Any] = {"attention_mask": mask.long()}
    if (
        "position_ids" in forward_args
        and not checked.positions_from_pad_token
        and not _numbers_positions_by_mask(model)
    ):
        told["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return told


def _numbers_positions_by_mask(model: Any) -> bool:
    """Whether the model numbers real tokens by the mask, so that nobody else has to."""
    tables = [part for name, part in model.named_modules() if name.endswith(MASK_POSITION_EMBEDDING)]
    return any("attention_mask" in argument_names(part.forward) for part in tables)


def _build_cached_forward(forward: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, Any], tuple[Tensor, Any]]:
    """Steps with the cache that it makes itself."""

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        out = forward(tokens, state)
        return out.logits, out.past_key_values

    return step


def _build_generate_inputs(tokens: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """A text for its `generate`."""
    return {"inputs": tokens, "attention_mask": torch.ones_like(tokens) if mask is None else mask.long()}


def _random_source_tokens(model: Any, config: Any, seed: int) -> Tensor:
    """A source text without special tokens."""
    low = min(5, config.vocab_size - 1)
    draw = torch.randint(low, config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(seed + 1))
    return draw.to(model.device)


def _seq2seq_loss(model: Any, source: Tensor, labels: Tensor) -> Tensor:
    """The loss of one text, as training has it: what the decoder reads is made of the labels by the model itself."""
    kept = dict(model.config.__dict__)
    try:
        model.config.decoder_start_token_id = int(labels[0])
        return model(input_ids=source, labels=labels[None, 1:], use_cache=False).loss
    finally:
        model.config.__dict__.clear()
        model.config.__dict__.update(kept)


def _adapt_encoder_decoder(checked: CheckedModel, model: Any, config: Any, seed: int) -> None:
    """An encoder-decoder: a fixed source for questions about the target's tokens."""
    source = _random_source_tokens(model, config, seed)

    def rows(tokens: Tensor) -> Tensor:
        return source.expand(len(tokens), -1)

    def run(tokens: Tensor, **how: Any) -> Any:
        return model(input_ids=rows(tokens), decoder_input_ids=tokens, **{"use_cache": False} | how)

    def crossed(source: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
        told = {} if mask is None else {"attention_mask": mask.long()}
        return extract_logits(model(input_ids=source, decoder_input_ids=tokens, use_cache=False, **told))

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        memory, past = (None, None) if state is None else state
        memory = model.get_encoder()(input_ids=rows(tokens)) if memory is None else memory
        out = model(encoder_outputs=memory, decoder_input_ids=tokens, past_key_values=past, use_cache=True)
        return out.logits, (memory, out.past_key_values)

    checked.logits = lambda tokens: extract_logits(run(tokens))
    checked.logits_with_mask = lambda tokens, mask: extract_logits(run(tokens, decoder_attention_mask=mask.long()))
    checked.logits_with_source, checked.logits_with_cache = crossed, step
    if "labels" in argument_names(model.forward):
        checked.loss = lambda tokens, labels: (
            torch.stack([_seq2seq_loss(model, source, row) for row in tokens]).mean()
            if config.pad_token_id is not None and torch.equal(tokens, labels)
            else run(tokens[:, :-1], labels=labels[:, 1:].contiguous()).loss
        )
    if model.can_generate():
        _add_generation_functions(
            checked,
            model,
            lambda tokens, _: {
                "inputs": rows(tokens),
                "decoder_input_ids": tokens,
                "decoder_start_token_id": int(tokens[0, 0]),
            },
        )
