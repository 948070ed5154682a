"""Adapter for transformers models: logits, cache, generation, loss, kernels, saving and loading, config variants.

Importing this module does not import transformers. The code that built the checked model has imported it.
"""

import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from copy import deepcopy
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from cutaway.check.adapters.config_variants import (
    TransformersConfig,
    changed_transformers_value,
    find_config_values,
    validate_same_shapes,
    variant_state_dict,
)
from cutaway.check.adapters.declared_config import get_module_config, set_attention_properties
from cutaway.check.adapters.module import argument_names, extract_logits, logits_by_kernel
from cutaway.check.checked_model import (
    CheckedModel,
    ConfigVariants,
    LogitsFunction,
    ModelKind,
    ReloadedModel,
    count_parameters,
    require,
)
from cutaway.check.module_state import copy_parameters
from cutaway.check.report.finding import SkipCheckError
from cutaway.errors import CutawayError
from cutaway.families.config_fields import SupportedValues
from cutaway.families.load import load
from cutaway.families.registry import families
from cutaway.model import EncoderDecoder, Transformer

TransformersModel = Any
"""A PreTrainedModel."""
_ATTN_IMPLEMENTATIONS = ("eager", "sdpa")
_MAX_REBUILT_PARAMS = 10**8
"""Maximum number of parameters of a model that is rebuilt with another attention implementation."""
_NUM_UNUSED_SLOTS = 5
"""Number of slots of a static cache that stay unused."""
_SPECIAL_TOKEN_FIELDS = tuple(f"{name}_token_id" for name in ("pad", "bos", "eos", "unk", "cls", "sep"))
_MAX_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len")
_PAD_POSITION_METHODS = (
    "create_position_ids_from_input_ids",
    "create_position_ids_from_inputs_embeds",
    "make_positions",
)
"""Methods of embeddings that derive positions from the pad token id."""
_MASK_POSITION_EMBEDDING = "embed_positions"
"""Name of a position embedding that derives positions from attention_mask, if its forward has this argument (OPT)."""
_LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")
"""RoPE scalings that change the angles of all tokens beyond the original length."""


def _add_attention_functions(checked: CheckedModel, model: TransformersModel) -> None:
    """Set `checked.logits_by_kernel` and, if cutaway supports the model family, position and window properties."""
    config = get_module_config(model)
    if config is not None:
        set_attention_properties(checked, config)
    checked.logits_by_kernel = _build_kernel_logits(model, require(checked.logits))


def _build_kernel_logits(model: TransformersModel, logits: LogitsFunction) -> dict[str, LogitsFunction]:
    """Map each attention implementation to a logits function that uses it; empty if the model supports only one."""

    @contextmanager
    def use_implementation(name: str) -> Iterator[None]:
        original = model.config._attn_implementation
        try:
            model.set_attn_implementation(name)
            if model.config._attn_implementation != name:
                raise ValueError(name)
            yield
        finally:
            model.set_attn_implementation(original)

    if getattr(model.config, "_attn_implementation", None) not in _ATTN_IMPLEMENTATIONS:
        return {}
    if not model._can_set_attn_implementation():
        return _rebuild_with_kernels(model)
    by_kernel = logits_by_kernel(logits, _ATTN_IMPLEMENTATIONS, use_implementation, Exception)
    return by_kernel if len(by_kernel) > 1 else {}


def _rebuild_with_kernels(model: TransformersModel) -> dict[str, LogitsFunction]:
    """Map each attention implementation to a logits function, for models that cannot change it after they are built.

    Each call rebuilds the model with the same weights. The result is empty for large models, models without SDPA, and
    encoder-decoders.
    """
    is_small = count_parameters(model) <= _MAX_REBUILT_PARAMS
    if not is_small or not getattr(model, "_supports_sdpa", False) or model.config.is_encoder_decoder:
        return {}

    def logits_with(name: str, tokens: Tensor) -> Tensor:
        with import_module("transformers.initialization").no_init_weights(), model.device:
            rebuilt = type(model)._from_config(deepcopy(model.config), attn_implementation=name)
        rebuilt.load_state_dict(model.state_dict(), assign=True)
        for path, submodule in rebuilt.named_modules():
            submodule._buffers = model.get_submodule(path)._buffers
        return extract_logits(rebuilt.eval()(input_ids=tokens, use_cache=False))

    return {name: partial(logits_with, name) for name in _ATTN_IMPLEMENTATIONS}


def _add_training_functions(
    checked: CheckedModel, model: TransformersModel, forward_args: list[str], forward_kwargs: dict[str, bool]
) -> None:
    """Set the loss functions (not for an encoder-decoder) and `set_activation_checkpointing` of `checked`."""
    is_checkpointing = getattr(model, "is_gradient_checkpointing", False)
    if getattr(model, "supports_gradient_checkpointing", False) and not is_checkpointing:
        checked.set_activation_checkpointing = partial(_set_gradient_checkpointing, model)
    if "labels" not in forward_args or checked.kind == "encoder-decoder":
        return
    if checked.kind == "decoder" or type(model).__name__.endswith("ForMaskedLM"):
        checked.loss = lambda tokens, labels: model(input_ids=tokens, labels=labels, **forward_kwargs).loss
    if checked.kind == "decoder" and _accepts_num_items_in_batch(model):
        checked.accumulated_loss = lambda micro_batches: _accumulated_loss(model, micro_batches, forward_kwargs)


def _set_gradient_checkpointing(model: TransformersModel, enabled: bool) -> None:
    if enabled:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def _accepts_num_items_in_batch(model: TransformersModel) -> bool:
    """Whether transformers' Trainer passes the number of labels in all micro-batches to the model's forward."""
    declared = getattr(model, "accepts_loss_kwargs", None)
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds if declared is None else bool(declared)


def _accumulated_loss(
    model: TransformersModel, micro_batches: Sequence[tuple[Tensor, Tensor]], forward_kwargs: dict[str, bool]
) -> Tensor:
    """Loss with gradient accumulation, as in transformers' Trainer: the sum of all losses divided by the number of
    labels in all micro-batches."""
    count = sum((labels[:, 1:] != -100).sum() for _, labels in micro_batches)
    losses = [
        model(input_ids=tokens, labels=labels, num_items_in_batch=count, **forward_kwargs).loss
        for tokens, labels in micro_batches
    ]
    return sum(losses[1:], losses[0])


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars and log messages, and all output to stderr, while the context is active."""
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


def _save_and_reload(model: TransformersModel, seed: int) -> ReloadedModel:
    """Save with save_pretrained; load with from_pretrained, and also with cutaway if it supports the model family."""
    with tempfile.TemporaryDirectory(prefix="cutaway-check-") as directory, silence_transformers():
        with patch.dict(model.config.__dict__):  # save_pretrained writes the dtype and the class into the config
            model.save_pretrained(directory)
        kwargs = {"dtype": model.dtype, "attn_implementation": model.config._attn_implementation}
        if getattr(model.config, "_experts_implementation", None) is not None:
            kwargs["experts_implementation"] = model.config._experts_implementation
        module, info = type(model).from_pretrained(directory, output_loading_info=True, **kwargs)
        module.to(model.device)
        missing = map(str, (*info["missing_keys"], *info.get("mismatched_keys", ())))
        reloaded = ReloadedModel(module, sorted(missing), sorted(map(str, info["unexpected_keys"])))
        _add_cutaway_reference(reloaded, model, Path(directory), seed)
        copy_parameters(module)
    return reloaded


def _add_cutaway_reference(reloaded: ReloadedModel, model: TransformersModel, directory: Path, seed: int) -> None:
    """Load the saved model with cutaway; set `reloaded.reference_logits`, or `no_reference_reason` if that fails."""
    try:
        reference = _load_cutaway_model(model, directory)
    except CutawayError as error:
        reloaded.no_reference_reason = f"needs reference_logits ({error})"
        return
    copy_parameters(reference)
    if isinstance(reference, EncoderDecoder):
        source = _random_source_tokens(model, model.config, seed)
        reloaded.reference_logits = lambda tokens: reference(source.expand(len(tokens), -1), tokens)
        return
    logits: LogitsFunction = reference if reference.has_lm_head else reference.per_token_output
    reloaded.reference_logits = logits
    reloaded.find_divergent_layer = partial(_find_divergent_layer, logits, reference)


def _load_cutaway_model(model: TransformersModel, directory: Path) -> Transformer:
    """Load the saved model with cutaway; raise CutawayError if cutaway has no comparable implementation."""
    name, family = type(model).__name__, families().get(getattr(model.config, "model_type", ""))
    is_supported = family is not None and name in (family.architecture, family.base_architecture)
    alibi_bias_max = getattr(getattr(model.config, "attn_config", None), "alibi_bias_max", 8)
    if alibi_bias_max != 8:
        reason = "transformers computes MPT with alibi_bias_max=8 and ignores the configuration"
        raise CutawayError(f"{reason}, where it is {alibi_bias_max}")
    if not is_supported or not type(model).__module__.startswith("transformers."):
        raise CutawayError(f"cutaway has no implementation of {name}")
    try:
        return load(directory, device=model.device, dtype=torch.float32).model
    except CutawayError as error:
        raise CutawayError(f"cutaway cannot load this model: {error}") from error


def _find_divergent_layer(
    reference_logits: LogitsFunction,
    cutaway_model: Transformer,
    transformers_model: TransformersModel,
    tokens: Tensor,
    noise_ratio: float,
) -> str | None:
    """The first layer after which the residual streams of the two implementations differ; None if there is none."""
    (stack,) = cutaway_model.stacks.values()
    layers = {"the embedding": stack.embed} | {f"layer {n}": block for n, block in enumerate(stack.blocks[:-1])}
    outputs: dict[str, Tensor] = {}

    def record(name: str, _module: nn.Module, _inputs: object, out: Tensor) -> None:
        outputs.setdefault(name, out.detach())

    with ExitStack() as hooks:
        for name, module in (layers | {"the last layer": stack.final_norm}).items():
            hooks.enter_context(module.register_forward_hook(partial(record, name)))
        reference_logits(tokens)
    hidden_states = transformers_model(input_ids=tokens, output_hidden_states=True).hidden_states
    for (name, resid), hidden in zip(outputs.items(), hidden_states or (), strict=False):
        tolerance = 100 * (torch.finfo(hidden.dtype).eps + noise_ratio) * float(hidden.abs().max())
        if resid.shape == hidden.shape and float((resid - hidden).abs().max()) > tolerance:
            return name
    return None


def _build_config_variants(model: TransformersModel, seed: int) -> ConfigVariants:
    """Map each config field that affects the logits to a function that builds the model with another value of it.

    Only the fields in cutaway's table of the model family are used.
    """
    state_dict = variant_state_dict(model, seed)
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
    model: TransformersModel, changes: dict[str, object], state_dict: Mapping[str, Tensor], seed: int
) -> LogitsFunction:
    """Build a copy of the model with these config changes and weights; return its function tokens → logits."""
    config = deepcopy(model.config)
    for path, value in changes.items():
        parent, _, key = path.rpartition(".")
        setattr(getattr(config, parent) if parent else config, key, value)
    with silence_transformers(), import_module("transformers.initialization").no_init_weights(), model.device:
        variant = type(model)(config)
    validate_same_shapes(variant, state_dict)
    variant.load_state_dict(state_dict, assign=True)
    return require(adapt_transformers_model(variant.eval(), seed).logits)


_InputBuilder = Callable[[Tensor, Tensor | None], dict[str, object]]
"""tokens, mask → keyword arguments of `generate`."""


def _add_generation_functions(checked: CheckedModel, model: TransformersModel, build_inputs: _InputBuilder) -> None:
    """Set the functions of `checked` that call `model.generate`. `build_inputs(tokens, mask)` returns its arguments."""

    def generate(tokens: Tensor, n: int, mask: Tensor | None = None, **generate_kwargs: int) -> Tensor:
        return _run_generate(model, n, build_inputs(tokens, mask), **generate_kwargs)[:, -n:]

    def generate_row_by_row(tokens: Tensor, n: int, **generate_kwargs: int) -> Tensor:
        """Generate row by row: decoder_start_token_ids can differ, and prompt lookup supports only a batch of one."""
        return torch.cat([generate(tokens[row : row + 1], n, None, **generate_kwargs) for row in range(len(tokens))])

    def search_beams(tokens: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
        beams = {"num_beams": k, "num_return_sequences": k, "length_penalty": 0.0}
        scores = {"return_dict_in_generate": True, "output_scores": True}
        out = _run_generate(model, n, build_inputs(tokens, None), **beams, **scores)
        return out.sequences[:, -n:], out.sequences_scores

    def speculate(tokens: Tensor, n: int) -> Tensor:
        try:
            return generate_row_by_row(tokens, n, prompt_lookup_num_tokens=3)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "crop" not in str(error):
                raise  # only rolling caches cannot be cropped
            raise SkipCheckError(f"the model does not support speculative decoding: {str(error)[:100]}") from error

    has_encoder = checked.kind == "encoder-decoder"
    checked.generate = generate_row_by_row if has_encoder else generate
    if not has_encoder:
        checked.generate_padded = lambda tokens, mask, n: generate(tokens, n, mask)
        checked.padding_side = "left"
    checked.beam_search, checked.generate_speculative = search_beams, speculate
    checked.sample = _build_sampler(model, build_inputs)


def _run_generate(
    model: TransformersModel, max_new_tokens: int, inputs: dict[str, object], **generate_kwargs: object
) -> Any:
    """Call the model's `generate`, with greedy decoding by default."""
    generate_kwargs = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens} | generate_kwargs
    # Ignore the checkpoint's generation config: eos token, forced and suppressed tokens, penalties.
    plain = type(model.generation_config)(pad_token_id=0)
    with patch.object(model, "generation_config", plain):
        return model.generate(**inputs, **generate_kwargs)


def _build_sampler(model: TransformersModel, build_inputs: _InputBuilder) -> Callable[..., Tensor]:
    """Return a function that samples tokens from given logits with the model's `generate`.

    A logits processor replaces the model's logits by the given ones.
    """

    def sample(logits: Tensor, n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
        inputs = build_inputs(torch.full((n, 1), 1, device=logits.device), None)
        filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        processors = [lambda _, scores: logits.to(scores.dtype).expand(len(scores), -1)]
        return _run_generate(model, 1, inputs, do_sample=True, logits_processor=processors, **filters)[:, -1]

    return sample


def _logits_with_filled_cache(model: TransformersModel, tokens: Tensor, value: float) -> Tensor:
    """Logits of a forward pass with a StaticCache whose slots are filled with `value`."""

    def forward(chunk: Tensor) -> Tensor:
        return extract_logits(model(input_ids=chunk, past_key_values=cache, use_cache=True))

    cache_class = getattr(sys.modules.get("transformers.cache_utils"), "StaticCache", None)
    if cache_class is None:
        raise SkipCheckError("this version of transformers has no StaticCache")
    if not getattr(model, "_can_compile_fullgraph", False):
        raise SkipCheckError("the model does not support StaticCache (_can_compile_fullgraph is False)")
    cache = cache_class(config=model.config, max_cache_len=tokens.shape[1] + _NUM_UNUSED_SLOTS)
    forward(tokens[:, :1])  # allocates the buffers
    cache.reset()
    for layer in cache.layers:
        if not hasattr(layer, "keys"):  # the state of a convolution or of linear attention has no unused slots
            continue
        layer.keys.fill_(value)
        layer.values.fill_(value)
    return torch.cat([forward(chunk) for chunk in (tokens[:, :7], tokens[:, 7:])], 1)


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a transformers model."""
    is_derived = any(base.__module__.startswith("transformers.") for base in type(module).__mro__)
    return is_derived and hasattr(module, "config")


def adapt_transformers_model(model: TransformersModel, seed: int) -> CheckedModel:
    """Build the `CheckedModel` of a transformers model. Its functions depend on the arguments of `model.forward`."""
    config = model.config.get_text_config(decoder=True) if not model.config.is_encoder_decoder else model.config
    forward_args = argument_names(model.forward)
    checked = CheckedModel(name=type(model).__name__, module=model, kind=_infer_kind(model, config))
    checked.device, checked.dtype = model.device, model.dtype
    _set_config_properties(checked, config)
    checked.reload = partial(_save_and_reload, model, seed)
    if getattr(model.config, "model_type", None) in families():
        checked.config_variants = lambda: _build_config_variants(model, seed)
    checked.positions_from_pad_token = any(
        hasattr(module, name) for module in model.modules() for name in _PAD_POSITION_METHODS
    )
    checked.source_vocab_size = getattr(config, "src_vocab_size", None) or config.vocab_size
    forward_kwargs = {"use_cache": False} if "use_cache" in forward_args else {}
    _add_training_functions(checked, model, forward_args, forward_kwargs)
    if checked.kind == "encoder-decoder":
        _adapt_encoder_decoder(checked, model, config, seed)
        _add_attention_functions(checked, model)
        return checked
    if checked.positions_from_pad_token and checked.max_seq_len is not None:
        checked.max_seq_len -= (checked.pad_token_id or 0) + 1  # positions start after the pad token id
    if "position_ids" in forward_args or checked.positions_from_pad_token:
        checked.positions_skip_padding = True

    def forward(tokens: Tensor, **kwargs: Tensor) -> Tensor:
        return extract_logits(model(input_ids=tokens, **kwargs, **forward_kwargs))

    checked.logits = forward
    _add_attention_functions(checked, model)
    if "attention_mask" in forward_args:
        pass_positions = (
            "position_ids" in forward_args
            and not checked.positions_from_pad_token
            and not _numbers_positions_by_mask(model)
        )

        def logits_with_mask(tokens: Tensor, mask: Tensor) -> Tensor:
            """If forward takes positions, derive them from the mask, as transformers' `generate` does."""
            positions = {"position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)} if pass_positions else {}
            return forward(tokens, attention_mask=mask.long(), **positions)

        checked.logits_with_mask = logits_with_mask
        if "position_ids" in forward_args:
            checked.logits_with_mask_only = lambda tokens, mask: forward(tokens, attention_mask=mask.long())
    uses_position_ids = not getattr(config, "alibi", False) and getattr(config, "position_biased_input", True)
    if "position_ids" in forward_args and uses_position_ids:
        checked.logits_with_positions = lambda tokens, positions: forward(tokens, position_ids=positions)
    if checked.kind == "decoder" and "past_key_values" in forward_args:

        def step(tokens: Tensor, cache: object) -> tuple[Tensor, object]:
            out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
            return out.logits, out.past_key_values

        def padded_step(tokens: Tensor, mask: Tensor, cache: object) -> tuple[Tensor, object]:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            kwargs = {"position_ids": positions} if pass_positions else {}
            out = model(input_ids=tokens, attention_mask=mask.long(), past_key_values=cache, use_cache=True, **kwargs)
            return out.logits, out.past_key_values

        checked.logits_with_cache = step
        if checked.logits_with_mask is not None:
            checked.logits_with_padded_cache = padded_step
        checked.logits_with_filled_cache = partial(_logits_with_filled_cache, model)
        if model.can_generate():
            _add_generation_functions(checked, model, _build_generate_inputs)
    if "labels" in forward_args and checked.kind == "decoder":
        checked.logits_with_labels = lambda tokens, labels: forward(tokens, labels=labels)
    return checked


def _infer_kind(model: TransformersModel, config: TransformersConfig) -> ModelKind:
    """Decoder, encoder or encoder-decoder, by the configuration and the attention modules."""
    if config.is_encoder_decoder:
        return "encoder-decoder"
    if model.can_generate() or getattr(config, "is_decoder", False):
        return "decoder"
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return "decoder" if causal and all(causal) else "encoder"


def _set_config_properties(checked: CheckedModel, config: TransformersConfig) -> None:
    """Set vocabulary size, layer count, tied embeddings, special tokens, maximum length and windows of `checked`."""
    checked.vocab_size = getattr(config, "decoder_vocab_size", None) or getattr(config, "vocab_size", None)
    checked.num_layers = getattr(config, "num_hidden_layers", None)
    checked.tied_embeddings = getattr(config, "tie_word_embeddings", None)
    special = {name: _get_token_id(config, name) for name in _SPECIAL_TOKEN_FIELDS}
    checked.pad_token_id, checked.eos_token_id = special["pad_token_id"], special["eos_token_id"]
    checked.special_token_ids = tuple(sorted({token for token in special.values() if token is not None}))
    rope = getattr(config, "rope_parameters", None)
    rope = rope if isinstance(rope, dict) else {}
    ropes = [rope, *(nested for nested in rope.values() if isinstance(nested, dict))]
    ropes = [rope for rope in ropes if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE_TYPES]
    lengths = [getattr(config, name, None) for name in _MAX_LENGTH_FIELDS]
    lengths += [rope.get("original_max_position_embeddings") for rope in ropes]
    checked.max_seq_len = min((n for n in lengths if isinstance(n, int) and n > 0), default=None)
    layer_types = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    has_window = not layer_types or "sliding_attention" in layer_types
    # The window of an encoder extends to both sides, so its size is counted differently.
    checked.windows = (window,) if has_window and isinstance(window, int) and checked.kind == "decoder" else ()
    checked.window = window if checked.windows and layer_types <= {"sliding_attention"} else None


def _get_token_id(config: TransformersConfig, name: str) -> int | None:
    """The token id in a config field, or the first one if the field is a list; None if it is not set."""
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) else None


def _numbers_positions_by_mask(model: TransformersModel) -> bool:
    """Whether the model itself derives position ids from attention_mask, as OPT does."""
    embeddings = [module for name, module in model.named_modules() if name.endswith(_MASK_POSITION_EMBEDDING)]
    return any("attention_mask" in argument_names(module.forward) for module in embeddings)


def _build_generate_inputs(tokens: Tensor, mask: Tensor | None) -> dict[str, object]:
    """Arguments of `generate` for a decoder: tokens and mask."""
    return {"inputs": tokens, "attention_mask": torch.ones_like(tokens) if mask is None else mask.long()}


def _random_source_tokens(model: TransformersModel, config: TransformersConfig, seed: int) -> Tensor:
    """A random source sequence (1, 9) without special tokens."""
    low = min(5, config.vocab_size - 1)
    tokens = torch.randint(low, config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(seed + 1))
    return tokens.to(model.device)


def _seq2seq_loss(model: TransformersModel, source: Tensor, labels: Tensor) -> Tensor:
    """Training loss of one sequence, for which the model derives decoder_input_ids from the labels."""
    with patch.dict(model.config.__dict__, {"decoder_start_token_id": int(labels[0])}):
        return model(input_ids=source, labels=labels[None, 1:], use_cache=False).loss


def _starts_with_configured_token(model: TransformersModel) -> bool:
    """Whether the decoder tokens that the model derives from labels start with `decoder_start_token_id`.

    mBART moves the last label, which is the language, to the start.
    """
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    return shift is None or "decoder_start_token_id" in argument_names(shift)


def _adapt_encoder_decoder(
    checked: CheckedModel, model: TransformersModel, config: TransformersConfig, seed: int
) -> None:
    """Set the functions of `checked` for an encoder-decoder. Functions without a source argument use a fixed
    random source sequence."""
    source = _random_source_tokens(model, config, seed)

    def expand_source(tokens: Tensor) -> Tensor:
        return source.expand(len(tokens), -1)

    def forward(tokens: Tensor, **kwargs: Tensor) -> Any:
        return model(input_ids=expand_source(tokens), decoder_input_ids=tokens, use_cache=False, **kwargs)

    def logits_with_source(source: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
        kwargs = {} if mask is None else {"attention_mask": mask.long()}
        return extract_logits(model(input_ids=source, decoder_input_ids=tokens, use_cache=False, **kwargs))

    def step(tokens: Tensor, state: tuple[object, object] | None) -> tuple[Tensor, tuple[object, object]]:
        memory, past = state or (model.get_encoder()(input_ids=expand_source(tokens)), None)
        out = model(encoder_outputs=memory, decoder_input_ids=tokens, past_key_values=past, use_cache=True)
        return out.logits, (memory, out.past_key_values)

    shifts_labels = config.pad_token_id is not None and _starts_with_configured_token(model)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        if shifts_labels and torch.equal(tokens, labels):
            return torch.stack([_seq2seq_loss(model, source, row) for row in tokens]).mean()
        return forward(tokens[:, :-1], labels=labels[:, 1:].contiguous()).loss

    def build_inputs(tokens: Tensor, _: Tensor | None) -> dict[str, object]:
        inputs = {"inputs": expand_source(tokens), "decoder_input_ids": tokens}
        return {**inputs, "decoder_start_token_id": int(tokens[0, 0])}

    checked.logits = lambda tokens: extract_logits(forward(tokens))
    checked.logits_with_mask = lambda tokens, mask: extract_logits(forward(tokens, decoder_attention_mask=mask.long()))
    checked.logits_with_source, checked.logits_with_cache = logits_with_source, step
    if "labels" in argument_names(model.forward):
        checked.loss = loss
    if model.can_generate():
        _add_generation_functions(checked, model, build_inputs)
