"""Adapter for transformers models: logits, cache, generation, loss, kernels, saving and loading, config variants.

It does not import transformers: the checked model has imported it.
"""

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
"""Largest model, in parameters, that is rebuilt with another attention implementation."""


def _add_attention_functions(checked: CheckedModel, model: Any) -> None:
    """Set position and window properties (if the family is supported) and the logits per attention implementation."""
    config = get_module_config(model)
    if config is not None:
        stack = config.stacks.get("decoder") or config.stacks["encoder"]
        layers = self_attention_configs(config)
        attention_kinds = {layer.position.kind for layer in layers} - {"none"}
        has_absolute = stack.embedding.position.kind != "none"
        checked.has_positions = has_absolute or bool(attention_kinds)
        checked.relative_positions = bool(attention_kinds) and not has_absolute
        windows = {layer.window for layer in layers}
        checked.windows = tuple(sorted(window for window in windows if window is not None))
        checked.window = windows.pop() if len(windows) == 1 else None
    if checked.logits is not None:
        checked.logits_by_kernel = _build_kernel_logits(model, checked.logits)


def _build_kernel_logits(model: Any, logits: LogitsFunction) -> dict[str, LogitsFunction]:
    """Logits function per supported attention implementation; empty if there is only one."""

    @contextmanager
    def use_implementation(name: str) -> Iterator[None]:
        original = model.config._attn_implementation
        try:
            model.set_attn_implementation(name)
            yield
        finally:
            model.set_attn_implementation(original)

    def is_supported(name: str) -> bool:
        try:
            with use_implementation(name):
                return bool(model.config._attn_implementation == name)
        except Exception:  # any exception means that it is not supported
            return False

    def logits_with(name: str) -> Callable[[Tensor], Tensor]:
        def run(tokens: Tensor) -> Tensor:
            with use_implementation(name):
                return logits(tokens)

        return run

    if getattr(model.config, "_attn_implementation", None) not in ATTN_IMPLEMENTATIONS:
        return {}
    if not model._can_set_attn_implementation():
        return _rebuild_with_kernels(model)
    by_kernel: dict[str, LogitsFunction] = {
        name: logits_with(name) for name in ATTN_IMPLEMENTATIONS if is_supported(name)
    }
    return by_kernel if len(by_kernel) > 1 else {}


def _rebuild_with_kernels(model: Any) -> dict[str, LogitsFunction]:
    """The same for models that fix the attention implementation when built: rebuild with the same weights."""
    is_small = sum(param.numel() for param in model.parameters()) <= MAX_REBUILT_PARAMS
    if not is_small or not getattr(model, "_supports_sdpa", False) or model.config.is_encoder_decoder:
        return {}

    def logits_with(name: str) -> LogitsFunction:
        def run(tokens: Tensor) -> Tensor:
            with import_module("transformers.initialization").no_init_weights(), model.device:
                rebuilt = type(model)._from_config(deepcopy(model.config), attn_implementation=name)
            rebuilt.load_state_dict(model.state_dict(), assign=True)
            for path, submodule in rebuilt.named_modules():
                submodule._buffers = model.get_submodule(path)._buffers
            return extract_logits(rebuilt.eval()(input_ids=tokens, use_cache=False))

        return run

    return {name: logits_with(name) for name in ATTN_IMPLEMENTATIONS}


MicroBatches = Sequence[tuple[Tensor, Tensor]]


def _add_training_functions(
    checked: CheckedModel, model: Any, forward_args: list[str], forward_kwargs: dict[str, Any]
) -> None:
    """Set the loss and activation checkpointing; an encoder-decoder sets its loss in `_adapt_encoder_decoder`."""
    if getattr(model, "supports_gradient_checkpointing", False) and not getattr(
        model, "is_gradient_checkpointing", False
    ):
        checked.set_activation_checkpointing = lambda enabled: _set_gradient_checkpointing(model, enabled)
    if "labels" not in forward_args or checked.kind == "encoder-decoder":
        return
    if checked.kind == "decoder" or type(model).__name__.endswith("ForMaskedLM"):
        checked.loss = lambda tokens, labels: model(input_ids=tokens, labels=labels, **forward_kwargs).loss
    if checked.kind == "decoder" and _accepts_num_items_in_batch(model):
        checked.accumulated_loss = lambda micro_batches: _accumulated_loss(model, micro_batches, forward_kwargs)


def _set_gradient_checkpointing(model: Any, enabled: bool) -> None:
    if enabled:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def _accepts_num_items_in_batch(model: Any) -> bool:
    """Whether transformers' Trainer passes `num_items_in_batch`, the number of labels in all micro-batches."""
    declared = getattr(model, "accepts_loss_kwargs", None)
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds if declared is None else bool(declared)


def _accumulated_loss(model: Any, micro_batches: MicroBatches, forward_kwargs: dict[str, Any]) -> Tensor:
    """Loss with gradient accumulation, as in transformers' Trainer: sums divided by the labels of all micro-batches."""
    count = sum((labels[:, 1:] != -100).sum() for _, labels in micro_batches)
    losses = [
        model(input_ids=tokens, labels=labels, num_items_in_batch=count, **forward_kwargs).loss
        for tokens, labels in micro_batches
    ]
    return sum(losses[1:], losses[0])


def _add_state_functions(checked: CheckedModel, model: Any, seed: int) -> None:
    """Set the functions that save, load and rebuild the model."""
    checked.reload = lambda: _save_and_reload(model, checked, seed)
    if getattr(model.config, "model_type", None) in families():
        checked.config_variants = lambda: _build_config_variants(model, seed)


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars and log messages."""
    logging = import_module("transformers.utils.logging")
    verbosity, progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if progress_bar:
            logging.enable_progress_bar()


def _save_and_reload(model: Any, checked: CheckedModel, seed: int) -> ReloadedModel:
    """Save with save_pretrained, load with from_pretrained, and with cutaway if it supports the family."""
    original = dict(model.config.__dict__)  # save_pretrained writes the dtype and the class into it
    with tempfile.TemporaryDirectory(prefix="cutaway-check-") as directory, _silence_transformers():
        try:
            model.save_pretrained(directory)
        finally:
            model.config.__dict__.clear()
            model.config.__dict__.update(original)
        kwargs = {}
        if getattr(model.config, "_experts_implementation", None) is not None:
            kwargs["experts_implementation"] = model.config._experts_implementation
        module, info = type(model).from_pretrained(
            directory,
            output_loading_info=True,
            dtype=model.dtype,
            attn_implementation=model.config._attn_implementation,
            **kwargs,
        )
        module.to(model.device)
        missing = [*map(str, info["missing_keys"]), *(str(key) for key in info.get("mismatched_keys", ()))]
        reloaded = ReloadedModel(module, sorted(missing), sorted(map(str, info["unexpected_keys"])))
        _add_cutaway_reference(reloaded, model, checked, Path(directory), seed)
        for param in module.parameters():  # memory-mapped from files that are deleted below
            param.data = param.data.clone()
    return reloaded


def _add_cutaway_reference(
    reloaded: ReloadedModel, model: Any, checked: CheckedModel, directory: Path, seed: int
) -> None:
    """Set the logits of cutaway's implementation of the saved model, or the reason why there is none."""
    model_class = type(model)
    family = families().get(getattr(model.config, "model_type", ""))
    is_supported = family is not None and model_class.__name__ in (family.architecture, family.base_architecture)
    alibi_bias_max = getattr(getattr(model.config, "attn_config", None), "alibi_bias_max", 8)
    if alibi_bias_max != 8:
        reloaded.no_reference_reason = (
            "needs reference_logits (transformers computes MPT with alibi_bias_max=8, whatever the configuration says; "
            f"here it is {alibi_bias_max})"
        )
        return
    if not is_supported or not model_class.__module__.startswith("transformers."):
        reloaded.no_reference_reason = (
            f"needs reference_logits (cutaway has no implementation of {model_class.__name__})"
        )
        return
    try:
        reference = load(directory, device=model.device, dtype=torch.float32).model
    except CutawayError as error:
        reloaded.no_reference_reason = f"needs reference_logits (cutaway cannot load this model: {error})"
        return
    for param in reference.parameters():  # memory-mapped from files that the caller deletes
        param.data = param.data.clone()
    if isinstance(reference, EncoderDecoder):
        source = _random_source_tokens(model, model.config, seed)
        reloaded.reference_logits = lambda tokens: reference(source.expand(len(tokens), -1), tokens)
    elif isinstance(reference, EncoderOnly):
        forward = reference if reference.head is not None else reference.encode
        reloaded.reference_logits = lambda tokens: forward(tokens)
    else:
        reloaded.reference_logits = lambda tokens: reference(tokens)
    if checked.kind != "encoder-decoder":
        reloaded.find_divergent_layer = lambda module, tokens, noise: _find_divergent_layer(
            module, reloaded.reference_logits, reference, tokens, noise
        )


def _find_divergent_layer(
    transformers_model: Any, reference_logits: Any, cutaway_model: Transformer, tokens: Tensor, noise_ratio: float
) -> str | None:
    """The first layer after which the residual streams of the two implementations differ."""
    (stack,) = cutaway_model.stacks.values()
    names = {id(block): f"layer {index}" for index, block in enumerate(stack.blocks[:-1])}
    names = {id(stack.embed): "the embedding"} | names | {id(stack.final_norm): "the last layer"}
    outputs: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda module, _inputs, out: outputs.setdefault(names[id(module)], out.detach()))
        for module in (stack.embed, *stack.blocks[:-1], stack.final_norm)
    ]
    try:
        reference_logits(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    hidden_states = transformers_model(input_ids=tokens, output_hidden_states=True).hidden_states
    for (name, resid), hidden in zip(outputs.items(), hidden_states or (), strict=False):
        tolerance = 100 * (torch.finfo(hidden.dtype).eps + noise_ratio) * float(hidden.abs().max())
        if resid.shape == hidden.shape and float((resid - hidden).abs().max()) > tolerance:
            return name
    return None


def _build_config_variants(model: Any, seed: int) -> Mapping[str, Callable[[], LogitsFunction]]:
    """For each config field that the family table uses and that affects the logits: the model with another value."""
    is_small = sum(param.numel() for param in model.parameters()) <= MAX_PERTURBED_PARAMS
    if is_small:
        state_dict = random_state_dict(model, seed)
    else:
        state_dict = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    fields = families()[model.config.model_type].fields
    used = {key for field in fields if not isinstance(field, SupportedValues) for key in field.keys}
    variants: dict[str, Callable[[], LogitsFunction]] = {"": partial(_logits_with_config, model, {}, state_dict, seed)}
    for key in sorted(used):
        for path, config, value in find_config_values(model.config, key):
            changed = changed_transformers_value(config, path.rpartition(".")[2], value)
            if changed is not None:
                variants[path] = partial(_logits_with_config, model, {path: changed}, state_dict, seed)
    return variants


def _logits_with_config(
    model: Any, changes: dict[str, Any], state_dict: Mapping[str, Tensor], seed: int
) -> LogitsFunction:
    """Logits function of a model with these config changes and weights."""
    config = deepcopy(model.config)
    for path, value in changes.items():
        parent, _, key = path.rpartition(".")
        setattr(getattr(config, parent) if parent else config, key, value)
    with _silence_transformers(), import_module("transformers.initialization").no_init_weights(), model.device:
        variant = type(model)(config)
    validate_same_shapes(variant, state_dict)
    variant.load_state_dict(state_dict, assign=True)
    logits = adapt_transformers_model(variant.eval(), seed).logits
    assert logits is not None
    return logits


NUM_UNUSED_SLOTS = 5
"""Number of slots of a static cache that stay unused."""


InputBuilder = Callable[[Tensor, Tensor | None], dict[str, Any]]
"""tokens, mask → keyword arguments of `generate`."""


def _add_generation_functions(checked: CheckedModel, model: Any, build_inputs: InputBuilder) -> None:
    """Set the functions that call the model's `generate`; `build_inputs` builds its arguments from tokens and mask."""

    def generate(tokens: Tensor, n: int, mask: Tensor | None = None, **generate_kwargs: Any) -> Tensor:
        return _run_generate(model, n, build_inputs(tokens, mask), **generate_kwargs)[:, -n:]

    def generate_row_by_row(tokens: Tensor, n: int, **generate_kwargs: Any) -> Tensor:
        """Rows can have different decoder_start_token_ids, and prompt lookup supports a batch of one only."""
        return torch.cat([generate(tokens[row : row + 1], n, **generate_kwargs) for row in range(len(tokens))])

    def search_beams(tokens: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
        out = _run_generate(
            model,
            n,
            build_inputs(tokens, None),
            num_beams=k,
            num_return_sequences=k,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return out.sequences[:, -n:], out.sequences_scores

    def speculate(tokens: Tensor, n: int) -> Tensor:
        try:
            return generate_row_by_row(tokens, n, prompt_lookup_num_tokens=3)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "crop" not in str(
                error
            ):  # raised by rolling caches, which cannot be cropped
                raise
            raise SkipCheckError(f"it does not support speculative decoding: {str(error)[:100]}") from error

    has_encoder = checked.kind == "encoder-decoder"
    checked.generate = generate_row_by_row if has_encoder else generate
    if not has_encoder:
        checked.generate_padded = lambda tokens, mask, n: generate(tokens, n, mask)
    checked.beam_search, checked.generate_speculative = search_beams, speculate
    checked.sample = _build_sampler(model, build_inputs)


@contextmanager
def _use_plain_generation_config(model: Any) -> Iterator[Any]:
    """Ignore the checkpoint's generation config: eos token, forced and suppressed tokens, penalties."""
    original = model.generation_config
    try:
        model.generation_config = type(original)(pad_token_id=0)
        yield model.generation_config
    finally:
        model.generation_config = original


def _run_generate(model: Any, max_new_tokens: int, inputs: dict[str, Any], **generate_kwargs: Any) -> Any:
    """Call the model's `generate`; default greedy decoding."""
    generate_kwargs = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens} | generate_kwargs
    with _use_plain_generation_config(model):
        return model.generate(**inputs, **generate_kwargs)


def _build_sampler(model: Any, build_inputs: InputBuilder) -> Callable[..., Tensor]:
    """Sample with the model's `generate`; a logits processor replaces its logits by the given ones."""

    def sample(logits: Tensor, n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
        prompts = torch.full((n, 1), 1, device=logits.device)
        sequences = _run_generate(
            model,
            1,
            build_inputs(prompts, None),
            do_sample=True,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            logits_processor=[lambda _, scores: logits.to(scores.dtype).expand(len(scores), -1)],
        )
        return sequences[:, -1]

    return sample


def _build_static_cache_logits(model: Any, forward: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, float], Tensor]:
    """Build a cached forward pass in a StaticCache whose slots hold a value."""

    def logits_with_filled_cache(tokens: Tensor, value: float) -> Tensor:
        cache_class = getattr(sys.modules.get("transformers.cache_utils"), "StaticCache", None)
        if cache_class is None:
            raise SkipCheckError("this version of transformers has no StaticCache")
        if not getattr(model, "_can_compile_fullgraph", False):
            raise SkipCheckError("it does not support StaticCache (_can_compile_fullgraph is False)")
        cache = cache_class(config=model.config, max_cache_len=tokens.shape[1] + NUM_UNUSED_SLOTS)
        forward(tokens[:, :1], cache)  # allocates the buffers
        cache.reset()
        for layer in cache.layers:
            layer.keys.fill_(value)
            layer.values.fill_(value)
        return torch.cat([forward(chunk, cache) for chunk in (tokens[:, :7], tokens[:, 7:])], 1)

    return logits_with_filled_cache


SPECIAL_TOKEN_FIELDS = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "cls_token_id", "sep_token_id")


MAX_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len")


PAD_POSITION_METHODS = (
    "create_position_ids_from_input_ids",
    "create_position_ids_from_inputs_embeds",
    "make_positions",
)
"""Methods of embeddings that derive positions from the pad token id."""


MASK_POSITION_EMBEDDING = "embed_positions"
"""Name of a position embedding that derives positions from attention_mask, if its forward takes one (OPT)."""


LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")
"""RoPE scalings that change the angles of all tokens beyond the original length."""


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a transformers model."""
    return any(base.__module__.startswith("transformers.") for base in type(module).__mro__) and hasattr(
        module, "config"
    )


def adapt_transformers_model(model: Any, seed: int) -> CheckedModel:
    """Adapt a transformers model by the arguments of its forward."""
    config = model.config.get_text_config(decoder=True) if not model.config.is_encoder_decoder else model.config
    forward_args = argument_names(model.forward)
    checked = CheckedModel(name=type(model).__name__, module=model)
    checked.kind = _infer_kind(model, config)
    checked.device, checked.dtype = model.device, model.dtype
    _set_config_properties(checked, model, config)
    _add_state_functions(checked, model, seed)
    checked.positions_from_pad_token = any(
        hasattr(module, name) for module in model.modules() for name in PAD_POSITION_METHODS
    )
    checked.source_vocab_size = getattr(config, "src_vocab_size", None) or config.vocab_size
    if checked.kind != "encoder-decoder" and ("position_ids" in forward_args or checked.positions_from_pad_token):
        checked.positions_skip_padding = True
    forward_kwargs: dict[str, Any] = {"use_cache": False} if "use_cache" in forward_args else {}
    _add_training_functions(checked, model, forward_args, forward_kwargs)
    if checked.kind == "encoder-decoder":
        _adapt_encoder_decoder(checked, model, config, seed)
        _add_attention_functions(checked, model)
        return checked
    checked.logits = lambda tokens: extract_logits(model(input_ids=tokens, **forward_kwargs))
    _add_attention_functions(checked, model)
    if "attention_mask" in forward_args:
        checked.logits_with_mask = lambda tokens, mask: extract_logits(
            model(input_ids=tokens, **_build_mask_inputs(checked, model, forward_args, mask), **forward_kwargs)
        )
    if "position_ids" in forward_args and "attention_mask" in forward_args:
        checked.logits_with_mask_only = lambda tokens, mask: extract_logits(
            model(input_ids=tokens, attention_mask=mask.long(), **forward_kwargs)
        )
    if "position_ids" in forward_args and not getattr(config, "alibi", False):
        checked.logits_with_positions = lambda tokens, positions: extract_logits(
            model(input_ids=tokens, position_ids=positions, **forward_kwargs)
        )
    if checked.kind == "decoder" and "past_key_values" in forward_args:
        checked.logits_with_cache = _build_cached_forward(
            lambda tokens, state: model(input_ids=tokens, past_key_values=state, use_cache=True)
        )
        if model.can_generate():
            _add_generation_functions(checked, model, _build_generate_inputs)
        checked.logits_with_filled_cache = _build_static_cache_logits(
            model,
            lambda tokens, cache: extract_logits(model(input_ids=tokens, past_key_values=cache, use_cache=True)),
        )
    if "labels" in forward_args and checked.kind == "decoder":
        checked.logits_with_labels = lambda tokens, labels: extract_logits(
            model(input_ids=tokens, labels=labels, **forward_kwargs)
        )
    return checked


def _infer_kind(model: Any, config: Any) -> Any:
    """Decoder, encoder or encoder-decoder, by the configuration and the attention modules."""
    if config.is_encoder_decoder:
        return "encoder-decoder"
    if model.can_generate() or getattr(config, "is_decoder", False):
        return "decoder"
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return "decoder" if causal and all(causal) else "encoder"


def _set_config_properties(checked: CheckedModel, model: Any, config: Any) -> None:
    """Set vocabulary, layers, special tokens, lengths and windows from the configuration."""
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
    ropes = [rope, *(nested for nested in rope.values() if isinstance(nested, dict))] if isinstance(rope, dict) else []
    lengths = [getattr(config, name, None) for name in MAX_LENGTH_FIELDS]
    lengths += [
        parameters.get("original_max_position_embeddings")
        for parameters in ropes
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE_TYPES
    ]
    known = [length for length in lengths if isinstance(length, int) and length > 0]
    checked.max_seq_len = min(known) if known else None
    layer_types = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    has_window = "sliding_attention" in layer_types if layer_types else isinstance(window, int)
    has_window = has_window and checked.kind == "decoder"  # bidirectional windows are counted differently
    checked.windows = (window,) if has_window and isinstance(window, int) else ()
    checked.window = window if checked.windows and layer_types <= {"sliding_attention"} else None


def _get_token_id(config: Any, name: str) -> int | None:
    """A token id of the configuration; the first one of a list."""
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) else None


def _build_mask_inputs(checked: CheckedModel, model: Any, forward_args: list[str], mask: Tensor) -> dict[str, Any]:
    """attention_mask, and position_ids derived from it if forward takes them (as transformers' `generate` does)."""
    inputs: dict[str, Any] = {"attention_mask": mask.long()}
    if (
        "position_ids" in forward_args
        and not checked.positions_from_pad_token
        and not _numbers_positions_by_mask(model)
    ):
        inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return inputs


def _numbers_positions_by_mask(model: Any) -> bool:
    """Whether the model derives positions from attention_mask itself."""
    embeddings = [module for name, module in model.named_modules() if name.endswith(MASK_POSITION_EMBEDDING)]
    return any("attention_mask" in argument_names(module.forward) for module in embeddings)


def _build_cached_forward(forward: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, Any], tuple[Tensor, Any]]:
    """Decode with a cache built from the model's own past_key_values."""

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        out = forward(tokens, state)
        return out.logits, out.past_key_values

    return step


def _build_generate_inputs(tokens: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """Arguments of `generate` for a decoder: tokens and mask."""
    return {"inputs": tokens, "attention_mask": torch.ones_like(tokens) if mask is None else mask.long()}


def _random_source_tokens(model: Any, config: Any, seed: int) -> Tensor:
    """A random source sequence (1, 9) without special tokens."""
    low = min(5, config.vocab_size - 1)
    tokens = torch.randint(low, config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(seed + 1))
    return tokens.to(model.device)


def _seq2seq_loss(model: Any, source: Tensor, labels: Tensor) -> Tensor:
    """Training loss of one sequence, for which the model derives decoder_input_ids from the labels."""
    original = dict(model.config.__dict__)
    try:
        model.config.decoder_start_token_id = int(labels[0])
        return model(input_ids=source, labels=labels[None, 1:], use_cache=False).loss
    finally:
        model.config.__dict__.clear()
        model.config.__dict__.update(original)


def _adapt_encoder_decoder(checked: CheckedModel, model: Any, config: Any, seed: int) -> None:
    """Set the functions of an encoder-decoder; checks of the decoder use a fixed random source."""
    source = _random_source_tokens(model, config, seed)

    def expand_source(tokens: Tensor) -> Tensor:
        return source.expand(len(tokens), -1)

    def forward(tokens: Tensor, **kwargs: Any) -> Any:
        return model(input_ids=expand_source(tokens), decoder_input_ids=tokens, use_cache=False, **kwargs)

    def logits_with_source(source: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
        kwargs = {} if mask is None else {"attention_mask": mask.long()}
        return extract_logits(model(input_ids=source, decoder_input_ids=tokens, use_cache=False, **kwargs))

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        memory, past = (None, None) if state is None else state
        memory = model.get_encoder()(input_ids=expand_source(tokens)) if memory is None else memory
        out = model(encoder_outputs=memory, decoder_input_ids=tokens, past_key_values=past, use_cache=True)
        return out.logits, (memory, out.past_key_values)

    checked.logits = lambda tokens: extract_logits(forward(tokens))
    checked.logits_with_mask = lambda tokens, mask: extract_logits(forward(tokens, decoder_attention_mask=mask.long()))
    checked.logits_with_source, checked.logits_with_cache = logits_with_source, step
    if "labels" in argument_names(model.forward):
        checked.loss = lambda tokens, labels: (
            torch.stack([_seq2seq_loss(model, source, row) for row in tokens]).mean()
            if config.pad_token_id is not None and torch.equal(tokens, labels)
            else forward(tokens[:, :-1], labels=labels[:, 1:].contiguous()).loss
        )
    if model.can_generate():
        _add_generation_functions(
            checked,
            model,
            lambda tokens, _: {
                "inputs": expand_source(tokens),
                "decoder_input_ids": tokens,
                "decoder_start_token_id": int(tokens[0, 0]),
            },
        )
