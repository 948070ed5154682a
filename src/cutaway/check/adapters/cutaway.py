"""Adapter for cutaway models: logits, KV cache, generation, saving and loading, config variants."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.adapters.config_variants import iter_config_changes, validate_same_shapes, variant_state_dict
from cutaway.check.adapters.declared_config import self_attention_configs, set_attention_properties
from cutaway.check.adapters.module import logits_by_kernel
from cutaway.check.checked_model import CheckedModel, ConfigVariants, LogitsFunction, ReloadedModel, require
from cutaway.check.module_state import copy_parameters
from cutaway.config import Config, DynamicNTK, LatentAttention, LongRope, MultiHead, to_dict
from cutaway.config import config as read_config
from cutaway.errors import ConfigError, KernelError
from cutaway.eval_mode import eval_mode
from cutaway.families.load import load
from cutaway.families.save import save
from cutaway.families.weight_loader import set_module_tensor
from cutaway.generate import Engine, EngineConfig, SamplingParams
from cutaway.generate.sampling.sampler import Sampler
from cutaway.generate.search.beam_logits_processors import BeamSearchParams
from cutaway.generate.search.beam_search import beam_search
from cutaway.generate.speculative.ngram_draft import NgramConfig
from cutaway.generate.speculative.speculative_decoder import SpeculativeDecoder
from cutaway.lens.adapters import unwrap_model
from cutaway.model import Cache, EncoderDecoder, EncoderOnly, Transformer, build
from cutaway.model.head import PoolingHead, TokenClassificationHead
from cutaway.model.layers import ConstantBuffers


def _save_and_reload(model: Transformer) -> ReloadedModel:
    """Save the model in the format of the first matching model family (or in cutaway's own format) and load it."""
    with tempfile.TemporaryDirectory(prefix="cutaway-check-") as directory:
        path = Path(directory) / "model"
        try:
            save(model, path)
        except ConfigError:  # no model family supports this configuration
            save(model, path, family="cutaway")
        reloaded = load(path, device=model.device, dtype=model.dtype)
        copy_parameters(reloaded.model)
    report = require(reloaded.load_report)
    return ReloadedModel(reloaded.model, report.missing_keys, report.unexpected_keys)


def _without_adapters(model: Transformer) -> Transformer:
    """The model, or if it has adapters, a copy with the active adapter merged into the weights."""
    return model.merge_and_unload() if model.adapters else model


def _load_from_meta(model: Transformer) -> nn.Module:
    """Build a copy of `model` on the meta device, allocate it with to_empty, and load the weights of `model`."""
    loaded = build(model.config, device="meta", dtype=model.dtype)
    loaded.to_empty(device=model.device)
    loaded.load_state_dict(model.state_dict())
    return loaded.eval()


def _build_config_variants(model: Transformer, seed: int) -> ConfigVariants:
    """Map each config field that affects the logits to a function that builds the model with another value of it."""
    state_dict = variant_state_dict(model, seed)
    full_config = model.config.model_dump(mode="json")
    variants = {"": partial(_logits_with_config, model, to_dict(model.config), state_dict, seed)}
    for path, value in iter_config_changes(full_config, (), model.config.d_model):
        changed = deepcopy(full_config)
        node: Any = changed
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        variants[".".join(map(str, path))] = partial(_logits_with_config, model, changed, state_dict, seed)
    return variants


def _logits_with_config(
    model: Transformer, config: dict[str, object], state_dict: Mapping[str, Tensor], seed: int
) -> LogitsFunction:
    """Build a model with this configuration and these weights; return its function tokens → logits."""
    variant = build(read_config(config), device="meta", dtype=model.dtype)
    validate_same_shapes(variant, state_dict)
    for name, tensor in state_dict.items():
        set_module_tensor(variant, name, tensor)
    for submodule in variant.modules():
        if isinstance(submodule, ConstantBuffers):
            submodule.register_constants(model.device)
    return require(adapt_cutaway_model(variant.eval(), seed).logits)


def _add_activation_checkpointing(checked: CheckedModel, model: Transformer) -> None:
    """Set `checked.set_activation_checkpointing`.

    `checked.loss` is not set, because the preflight of training passes its own loss function as `loss=`.
    """
    original = {name: stack.activation_checkpointing for name, stack in model.stacks.items()}

    def set_enabled(enabled: bool) -> None:
        for name, stack in model.stacks.items():
            stack.activation_checkpointing = ["full"] * len(stack.blocks) if enabled else original[name]

    checked.set_activation_checkpointing = set_enabled


_NUM_UNUSED_SLOTS = 5
"""Number of cache slots that stay unused."""


_ForwardWithCache = Callable[[Tensor, Cache], Tensor]
_DraftModel = Transformer | NgramConfig


def _add_cache_functions(
    checked: CheckedModel, model: Transformer, forward: _ForwardWithCache, source: Tensor | None = None
) -> None:
    """Set the functions of `checked` that use a KV cache or generate tokens (from `source` in an encoder-decoder)."""
    source_row = None if source is None else source[0].tolist()

    def step(tokens: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        cache = model.new_cache(len(tokens), 512) if cache is None else cache
        return forward(tokens, cache), cache

    def search_beams(tokens: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
        row = tokens[0].tolist()
        prompt, start = (row, None) if source_row is None else (source_row, row[0])
        with eval_mode(model):
            params = BeamSearchParams(
                num_beams=k, max_new_tokens=n, n=k, length_penalty=0.0, decoder_start_token_id=start
            )
            (beams,) = beam_search(model, [prompt], params)
        return torch.tensor([beam.tokens for beam in beams]), torch.tensor([beam.score for beam in beams])

    def speculate(tokens: Tensor, n: int) -> Tensor:
        """Decode speculatively, with n-gram drafts in even rows, and drafts of the model (all accepted) in odd rows."""
        drafts = [model if index % 2 else NgramConfig() for index in range(len(tokens))]
        rows = zip(tokens.tolist(), drafts, strict=True)
        return torch.cat([_generate(model, [row], n, source_row, draft) for row, draft in rows])

    checked.logits_with_cache = step
    checked.generate = lambda tokens, n: torch.cat([_generate(model, [row], n, source_row) for row in tokens.tolist()])
    if source_row is None:

        def padded_step(tokens: Tensor, mask: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
            cache = model.new_cache(len(tokens), 512) if cache is None else cache
            return model(tokens, mask[:, -tokens.shape[1] :], cache=cache), cache

        checked.logits_with_padded_cache, checked.padding_side = padded_step, "both"
        checked.generate_padded = lambda tokens, mask, n: _generate(
            model, [row[real].tolist() for row, real in zip(tokens, mask, strict=True)], n
        )
    checked.beam_search, checked.generate_speculative, checked.sample = search_beams, speculate, _sample_tokens
    checked.logits_with_filled_cache = lambda tokens, value: _logits_with_filled_cache(model, forward, tokens, value)
    if checked.windows:
        checked.logits_with_rolling_cache = lambda tokens, chunk_size: _forward_in_chunks(
            forward, tokens, model.new_cache(len(tokens), tokens.shape[1], chunk_size=chunk_size), chunk_size
        )


def _generate(
    model: Transformer,
    prompts: list[list[int]],
    max_new_tokens: int,
    source: list[int] | None = None,
    draft_model: _DraftModel | None = None,
) -> Tensor:
    """Generate greedily from prompts of any lengths in one batch; return the new tokens (B, max_new_tokens).

    For an encoder-decoder, `source` is the input of the encoder, and a prompt is the start of the decoder's sequence.
    All prompts must then start with the same token.
    """
    config = EngineConfig(
        model,
        max_num_seqs=len(prompts),
        max_model_len=max(map(len, prompts)) + max_new_tokens,
        max_source_len=len(source or [0]),
        compile=False,
        decoder_start_token_id=None if source is None else prompts[0][0],
    )
    engine = Engine(config) if draft_model is None else SpeculativeDecoder(config, draft_model=draft_model)
    requests = []
    for prompt in prompts:
        prefix = [] if source is None else prompt[1:]
        params = SamplingParams(max_new_tokens=max_new_tokens + len(prefix), ignore_eos=True)
        requests.append(engine.submit(source or prompt, params, seed=0, output_prefix=prefix))
    try:
        with eval_mode(model):
            while engine.step():
                continue
    finally:
        engine.model_runner.release_compiled()
    return torch.tensor([request.result().tokens[-max_new_tokens:] for request in requests], device=model.device)


def _sample_tokens(
    logits: Tensor, num_samples: int, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Draw `num_samples` tokens from softmax(logits / temperature) after top_k and top_p, each with its own seed."""
    sampler = Sampler(num_samples, len(logits), logits.device)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    sampler.set_row(0, params, [], seed=0)
    for tensor in sampler.sampling_state.tensors():
        tensor[1:] = tensor[0].clone()
    sampler.sampling_state.int_params[:, 0] = torch.arange(num_samples)  # the seeds
    return sampler.sample(logits.expand(num_samples, -1), sampler.features(1)).tokens


def _forward_in_chunks(forward: _ForwardWithCache, tokens: Tensor, cache: Cache, chunk_size: int) -> Tensor:
    """Logits of a prefill of `cache` with `tokens`, in chunks of `chunk_size` tokens."""
    return torch.cat(
        [forward(tokens[:, start : start + chunk_size], cache) for start in range(0, tokens.shape[1], chunk_size)], 1
    )


def _logits_with_filled_cache(
    model: Transformer, forward: _ForwardWithCache, tokens: Tensor, fill_value: float
) -> Tensor:
    """Logits of a chunked prefill in a cache filled with `fill_value`.

    With a finite value, the forward pass has static shapes: attention reads all slots, and unused ones have weight 0.
    NaN is not tested with static shapes, because 0 times NaN is NaN. The engine therefore clears slots before it reuses
    them.
    """
    cache = model.new_cache(len(tokens), tokens.shape[1] + _NUM_UNUSED_SLOTS)
    for layer in cache.layers:
        layer.k.fill_(fill_value)
        layer.v.fill_(fill_value)
    cache.static_shapes = math.isfinite(fill_value)
    return _forward_in_chunks(forward, tokens, cache, 7)


def adapt_cutaway_model(model: nn.Module, seed: int) -> CheckedModel:
    """Build the `CheckedModel` of a cutaway decoder, encoder or encoder-decoder."""
    inner = unwrap_model(model)
    assert isinstance(inner, Transformer)
    config = inner.config
    checked = CheckedModel(name=f"cutaway {config.form}", kind=config.form, module=inner, vocab_size=config.vocab_size)
    checked.device, checked.dtype = inner.device, inner.dtype
    _set_config_properties(checked, config)
    checked.positions_skip_padding = True
    checked.source_vocab_size = getattr(config, "source_vocab_size", None)
    if isinstance(inner, EncoderDecoder):
        _adapt_encoder_decoder(checked, inner, seed)
    else:
        forward = inner if inner.has_lm_head else partial(_token_outputs, inner)
        checked.logits = model if inner.has_lm_head and not isinstance(inner, EncoderOnly) else forward
        checked.logits_with_mask = forward
        checked.logits_with_positions = lambda tokens, positions: forward(tokens, positions=positions)
        checked.logits_with_documents = lambda tokens, documents: forward(tokens, document_ids=documents)
        if not isinstance(inner, EncoderOnly) and inner.has_lm_head:
            _add_cache_functions(checked, inner, lambda tokens, cache: inner(tokens, cache=cache))
    checked.logits_by_kernel = _build_kernel_logits(inner, require(checked.logits))
    if inner.is_mergeable(inner.active_adapter):  # otherwise these checks are skipped
        checked.reload = lambda: _save_and_reload(inner)
        checked.load_from_meta = lambda: _load_from_meta(_without_adapters(inner))
        checked.config_variants = lambda: _build_config_variants(_without_adapters(inner), seed)
    _add_activation_checkpointing(checked, inner)
    return checked


def _token_outputs(model: Transformer, *inputs: Tensor | None, **options: Any) -> Tensor:
    """Output of a head for a task, for each token; hidden states without a head.

    A head that pools a sequence is applied to each token as a sequence of its own, so that the outputs depend on the
    same tokens as logits of an LM head.
    """
    x, head = model.per_token_output(*inputs, **options), model.head
    if isinstance(head, TokenClassificationHead):
        return head(x)
    if not isinstance(head, PoolingHead):
        return x
    outputs: Tensor = head(x.flatten(0, 1).unsqueeze(1), None)
    return outputs.reshape(*x.shape[:2], -1)


def _set_config_properties(checked: CheckedModel, config: Config) -> None:
    """Set `num_layers`, `max_seq_len`, `tied_embeddings`, and the window and position properties of `checked`."""
    checked.num_layers = len(self_attention_configs(config))
    set_attention_properties(checked, config)
    lengths = [getattr(stack_config.embedding.position, "length", None) for stack_config in config.stacks.values()]
    lengths += [_rope_switch_length(layer) for layer in self_attention_configs(config)]
    checked.max_seq_len = min((length for length in lengths if length is not None), default=None)
    checked.tied_embeddings = getattr(config.head, "tied", None)


def _rope_switch_length(attention: MultiHead | LatentAttention) -> int | None:
    """The length beyond which a RoPE scaling changes the angles of all tokens; None without such a scaling."""
    scaling = getattr(attention.position, "scaling", None)
    return scaling.original_length if isinstance(scaling, DynamicNTK | LongRope) else None


def _adapt_encoder_decoder(checked: CheckedModel, model: EncoderDecoder, seed: int) -> None:
    """Set the functions of `checked` for an encoder-decoder. Functions without a source argument use a fixed
    random source sequence."""
    size = model.config.source_vocab_size or model.config.vocab_size  # type: ignore[union-attr]
    source = torch.randint(size, (1, 9), generator=torch.Generator().manual_seed(seed + 1)).to(model.device)

    def expand_source(tokens: Tensor) -> Tensor:
        return source.expand(len(tokens), -1)

    forward = model if model.has_lm_head else partial(_token_outputs, model)
    checked.logits = lambda tokens: forward(expand_source(tokens), tokens)
    checked.logits_with_mask = lambda tokens, mask: forward(expand_source(tokens), tokens, None, mask)
    checked.logits_with_source = lambda source, mask, tokens: forward(source, tokens, mask)

    def step(tokens: Tensor, cache: Cache) -> Tensor:
        return model(expand_source(tokens) if cache.memory_positions is None else None, tokens, cache=cache)

    if model.has_lm_head:
        _add_cache_functions(checked, model, step, source)


def _build_kernel_logits(model: Transformer, logits: LogitsFunction) -> dict[str, LogitsFunction]:
    """Map each supported attention kernel to a logits function that uses it. Flex is left out: it must be compiled."""

    @contextmanager
    def use_kernel(name: str) -> Iterator[None]:
        original = [(module, module.kernel) for module in model.modules() if hasattr(module, "build_kernel")]
        try:
            model.use_kernel(name)
            yield
        finally:
            for module, kernel in original:
                module.kernel = kernel

    return logits_by_kernel(logits, ("explicit", "sdpa"), use_kernel, KernelError)
