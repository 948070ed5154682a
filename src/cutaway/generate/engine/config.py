"""Engine configuration: model, batch and KV cache sizes, start and end tokens. It builds requests and the cache."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict, Unpack

import torch

from cutaway.argument_checks import FLOAT_DTYPES
from cutaway.device import GIB, free_memory
from cutaway.errors import InputError
from cutaway.generate.engine.kv_cache import CACHE_IMPLEMENTATIONS, PAGE_SIZE, BatchKVCache, CacheImplementation
from cutaway.generate.engine.output import OutputProcessor
from cutaway.generate.engine.page_allocator import PagePool
from cutaway.generate.engine.request import Request
from cutaway.generate.generation_config import GenerationConfig
from cutaway.generate.sampling.sampling_params import (
    MAX_TOKENS,
    SamplingParams,
    as_float,
    check_ids_in_vocab,
    check_int,
    check_token_ids,
    format_value,
)
from cutaway.generate.structured_output.grammar import Grammar, get_grammar_compiler
from cutaway.model import Transformer
from cutaway.model.adapters.adapter_methods import BASE_ADAPTER
from cutaway.model.rope import Rope
from cutaway.model.stack import Stack
from cutaway.tokenizer import Tokenizer

DEFAULT_MAX_MODEL_LEN = 4096
"""max_model_len of a model whose config has no context length."""
GPU_MEMORY_UTILIZATION, CPU_MEMORY_UTILIZATION = 0.9, 0.5
"""Default values of memory_utilization. Other programs share the memory of the CPU."""
GROWTH_STEP_BYTES = 256 * 2**20
"""Number of bytes by which a paged cache on the CPU grows."""
SchedulingPolicy = Literal["round-robin", "priority"]
SCHEDULING_POLICIES: tuple[SchedulingPolicy, ...] = ("round-robin", "priority")


@dataclass
class EngineConfig:
    """Engine options, validated on construction: batch size, sequence length, KV cache."""

    model: Transformer
    max_num_seqs: int = 8
    """Maximum number of sequences per batch, which is the number of rows of the KV cache."""
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and completion together. The default is the model's context length."""
    cache_implementation: CacheImplementation | Literal["auto"] = "auto"
    """Layout of the KV cache: 'full', 'ring' or 'paged'; 'auto' chooses 'full' or 'ring'.

    'ring' has ring buffers in layers with a sliding window. 'paged' has pages that sequences with equal prefixes share.
    """
    kv_cache_dtype: torch.dtype | None = None
    """dtype of keys and values; default: the model dtype. torch.int8 takes about half the memory of a 16-bit dtype."""
    prefill_chunk_size: int | None = None
    """Maximum number of prompt tokens per prefill step (chunked prefill). Decode steps run between prefill steps.

    Default: 512 on the CPU; on a GPU 8192, or 2048 with a ring cache and while requests decode."""
    kv_cache_memory_bytes: float | None = None
    """Maximum number of bytes for the pages of a paged cache.

    The default is enough for max_num_seqs sequences of max_model_len tokens, but at most `memory_utilization`."""
    memory_utilization: float | None = None
    """Fraction of the free memory that the pages of a paged cache may take. Default: 0.9 on a GPU, 0.5 on the CPU.

    On a GPU the pages are allocated at once, on the CPU they grow with the number of tokens of the running requests."""
    scheduling_policy: SchedulingPolicy = "round-robin"
    """Order of admission: 'round-robin' alternates between clients, 'priority' admits smaller `priority` first.

    Requests of equal priority, too, are admitted round-robin."""
    max_seqs_per_request: int | None = None
    """Maximum number of rows that the completions of one API request (`RequestGroup`) take at the same time.

    The default is three quarters of max_num_seqs, which leaves rows to other requests."""
    max_source_len: int = 512
    """Maximum number of source tokens of an encoder-decoder."""
    weight_bits: int | None = None
    """16, 8 or 4 bits per weight in decode steps. The default is the model's dtype.

    With fewer bits a step reads fewer bytes, but the weights have a larger rounding error."""
    compile: bool | None = None
    """Whether to use fast decode steps: CUDA graphs on a GPU, torch.compile on the CPU.

    True: from the first step on. False: never, only the kernels of the model. None: on a GPU, as soon as they are
    expected to save more time than their warm-up takes; on the CPU, C kernels, and never torch.compile."""
    eos_token_ids: Collection[int] = field(default_factory=frozenset)
    """Tokens that end a sequence. `generate` reads them from the checkpoint's files."""
    decoder_start_token_id: int | None = None
    forced_eos_token_id: int | None = None
    adapters: Sequence[str | None] | None = None
    """Names of the adapters that requests may use; None in the sequence is the base model. The first is the default.

    The default is the model's active adapter. With several adapters, requests of different adapters decode in one
    batch. Fast decode steps have the adapter merged into the weights, and adapters of experts need the same adapter in
    all rows: requests of another adapter then wait until the running ones are finished."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, Transformer):
            raise InputError(f"model is a {type(self.model).__name__}; pass a model, such as a checkpoint's .model")
        if "decoder" not in self.model.stacks:
            raise InputError("this model is encoder-only, so it cannot generate; use fill_mask, or model.encode")
        if not self.model.has_lm_head:
            raise InputError(
                f"this model has a head of kind '{self.model.config.head.kind}', so it cannot generate; call"
                " model(tokens, mask) for the output of its head, or load a model with an LM head"
            )
        if self.model.device.type == "meta":
            raise InputError("this model is on the meta device, which holds shapes without values; load its weights")
        for name in ("max_num_seqs", "max_source_len"):
            setattr(self, name, check_int(name, getattr(self, name), 1, MAX_TOKENS))
        for name in ("prefill_chunk_size", "max_seqs_per_request"):
            if getattr(self, name) is not None:
                setattr(self, name, check_int(name, getattr(self, name), 1, MAX_TOKENS))
        if self.compile is not None and not isinstance(self.compile, bool):
            raise InputError(f"compile is {format_value(self.compile)}; pass True, False or None (automatic)")
        layouts, layout, dtype = ("auto", *CACHE_IMPLEMENTATIONS), self.cache_implementation, self.kv_cache_dtype
        if layout not in layouts:
            raise InputError(f"cache_implementation is {format_value(layout)}; use {', '.join(layouts)}")
        if dtype is not None and dtype not in (*FLOAT_DTYPES, torch.int8):
            raise InputError(f"kv_cache_dtype is {format_value(dtype)}; use torch.int8 or a floating-point dtype")
        memory = self.kv_cache_memory_bytes
        if memory is not None and (as_float(memory) is None or not 0 < memory < math.inf):
            raise InputError(f"kv_cache_memory_bytes is {format_value(memory)}; pass a number of bytes above 0")
        share = self.memory_utilization
        if share is not None and not 0 < (as_float(share) or 0) <= 1:
            raise InputError(f"memory_utilization is {format_value(share)}; pass a fraction above 0, at most 1")
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            policies = ", ".join(SCHEDULING_POLICIES)
            raise InputError(f"scheduling_policy is {format_value(self.scheduling_policy)}; use {policies}")
        self.free_bytes = free_memory(self.model.device)
        """Free memory when the configuration was built, from which the number of pages is computed; None: unknown."""
        self.num_slots = self._resolve_max_model_len()
        if self.cache_implementation == "auto":
            windows = any(window is not None and window < self.num_slots for window in self.decoder.windows)
            self.cache_implementation = "ring" if windows and self.dynamic_rope_len is None else "full"
        if self.cache_implementation == "ring" and self.dynamic_rope_len is not None:
            raise InputError(
                f"cache_implementation is 'ring', but this model's RoPE scaling needs all keys of a sequence over"
                f" {self.dynamic_rope_len} tokens; use 'full' or 'paged', or max_model_len={self.dynamic_rope_len}"
            )
        self.adapters = (self.model.active_adapter,) if self.adapters is None else tuple(self.adapters)
        for adapter in self.adapters:
            self.model.check_adapter(adapter)
            if self.model.has_merged_adapter and adapter != self.model.active_adapter:
                raise InputError("an adapter is merged into the weights; call model.unmerge_adapter() to use another")
        self.num_pages()  # raises if kv_cache_memory_bytes is too small for one sequence
        size = self.model.config.vocab_size
        self.eos_token_ids = frozenset(
            token for token in check_token_ids("eos_token_ids", self.eos_token_ids) if token < size
        )
        if "encoder" in self.model.stacks and self.decoder_start_token_id is None:
            raise InputError("an encoder-decoder needs a first target token; pass decoder_start_token_id")
        for name in ("decoder_start_token_id", "forced_eos_token_id"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < size:
                raise InputError(f"{name} is {token}; the vocabulary has ids 0 to {size - 1}")

    @property
    def decoder(self) -> Stack:
        return self.model.stacks["decoder"]

    @property
    def rope_switch_lengths(self) -> list[int]:
        """Sequence lengths at which LongRoPE changes the frequencies, so that the sequence must be prefilled again."""
        return [length for length in self.decoder.rope_switch_lengths if length < self.num_slots]

    @property
    def dynamic_rope_len(self) -> int | None:
        """Length above which RoPE frequencies depend on the sequence length, so that chunked prefill is impossible.

        None if no sequence of this engine reaches such a length."""
        ropes = [position for position in self.decoder.positions.values() if isinstance(position, Rope)]
        lengths = [rope.switch_length for rope in ropes if rope.switch_length is not None]
        return min((length for length in lengths if length < self.num_slots), default=None)

    @property
    def max_position_embeddings(self) -> int | None:
        """Number of rows of the decoder's table of position embeddings; None if there is no table, hence no limit."""
        return getattr(self.decoder.embed.position, "max_positions", None)

    def _resolve_max_model_len(self) -> int:
        context, max_positions = self.model.config.context or DEFAULT_MAX_MODEL_LEN, self.max_position_embeddings
        requested = self.max_model_len if self.max_model_len is not None else min(context, max_positions or context)
        max_model_len = check_int("max_model_len", requested, 2, MAX_TOKENS)
        if max_positions is not None and max_model_len > max_positions:
            raise InputError(
                f"max_model_len is {max_model_len}, but the model has {max_positions} positions; lower max_model_len"
            )
        return max_model_len

    @property
    def page_size(self) -> int:
        """Number of tokens per page of a paged KV cache."""
        return min(PAGE_SIZE, self.num_slots)

    @property
    def resolved_prefill_chunk_size(self) -> int:
        """`prefill_chunk_size`, or its default for the device of the model and the cache."""
        if self.prefill_chunk_size is not None:
            return self.prefill_chunk_size
        if self.model.device.type == "cpu":
            return 512
        return 2048 if self.cache_implementation == "ring" else 8192  # a ring has slots for the chunk

    @property
    def resolved_max_seqs_per_request(self) -> int:
        """`max_seqs_per_request`, or its default."""
        return self.max_seqs_per_request or max(1, self.max_num_seqs * 3 // 4)

    @property
    def resolved_memory_utilization(self) -> float:
        """`memory_utilization`, or its default for the device of the model."""
        default = CPU_MEMORY_UTILIZATION if self.model.device.type == "cpu" else GPU_MEMORY_UTILIZATION
        return default if self.memory_utilization is None else self.memory_utilization

    def num_pages(self) -> int | None:
        """Maximum number of pages that fit in memory, but at most the number that max_num_seqs sequences need.

        The memory is kv_cache_memory_bytes, or else memory_utilization of the free memory. The null page is not
        counted. None if the cache is not paged."""
        if self.cache_implementation != "paged":
            return None
        page_bytes, pages_per_seq = self.bytes_for_slots(self.page_size), -(-self.num_slots // self.page_size)
        needed, available = self.max_num_seqs * pages_per_seq, self.kv_cache_memory_bytes
        if available is None and self.free_bytes is not None:
            available = self.resolved_memory_utilization * self.free_bytes
        if available is None:
            return needed
        count = int(available // max(1, page_bytes)) - 1
        if count < pages_per_seq:
            required = f"{(pages_per_seq + 1) * page_bytes / GIB:.3g} GiB"
            too_small = f"{available / GIB:.3g} GiB, too small for a sequence of {self.num_slots} tokens"
            if self.kv_cache_memory_bytes is None:
                raise InputError(
                    f"memory_utilization is {self.resolved_memory_utilization:g} of the free memory, {too_small}, which"
                    f" takes {required}; increase memory_utilization, lower max_model_len, or set"
                    " kv_cache_dtype=torch.int8"
                )
            raise InputError(f"kv_cache_memory_bytes is {too_small}; pass {required} or more, or lower max_model_len")
        return min(count, needed)

    @property
    def is_limited_by_memory(self) -> bool:
        """Whether memory, not max_num_seqs and max_model_len, limits the number of pages of a paged cache."""
        return (self.num_pages() or 0) < self.max_num_seqs * -(-self.num_slots // self.page_size)

    def can_grow_cache(self, num_pages: int) -> bool:
        """Whether `num_pages` more pages fit in memory_utilization of the memory that is free now."""
        free = free_memory(self.model.device)
        num_bytes = num_pages * self.bytes_for_slots(self.page_size)
        return free is None or num_bytes <= self.resolved_memory_utilization * free

    @property
    def growth_step(self) -> int | None:
        """Number of pages by which a paged cache grows; None: all pages at once.

        CUDA graphs hold the addresses of the pages, and GPU memory is not provided on first use."""
        if self.model.device.type != "cpu":
            return None
        return max(1, GROWTH_STEP_BYTES // max(1, self.bytes_for_slots(self.page_size)))

    def bytes_for_slots(self, num_slots: int) -> int:
        """Number of bytes that `num_slots` cache slots of one sequence take in all layers."""
        stack = self.decoder
        dtype = self.kv_cache_dtype or self.model.dtype
        scale_bytes = 2 if dtype == torch.int8 else 0  # one float16 scale per head and slot
        total = 0
        for cache_shape, window in zip(stack.cache_shapes, stack.windows, strict=True):
            layer_slots = num_slots
            if window is not None and self.cache_implementation == "ring":
                # A ring holds the window and the chunk that is being written: see model.cache.Cache.
                layer_slots = min(num_slots, window + self.resolved_prefill_chunk_size - 1)
            total += layer_slots * sum(heads * (width * dtype.itemsize + scale_bytes) for heads, width in cache_shape)
        return total

    @property
    def cache_bytes(self) -> int:
        """Number of bytes of the KV cache, including the keys and values of cross-attention."""
        if "encoder" in self.model.stacks:
            return self._allocate_cache(torch.device("meta")).num_bytes
        if self.cache_implementation == "paged":
            return (1 + (self.num_pages() or 0)) * self.bytes_for_slots(self.page_size)
        return self.max_num_seqs * self.bytes_for_slots(self.num_slots)

    def build_cache(self) -> BatchKVCache:
        """Allocate the KV cache; raise if it exceeds the free memory."""
        free = free_memory(self.model.device)
        if free is not None and self.cache_bytes > free:
            raise InputError(
                f"a {self.cache_implementation} cache of {self.max_num_seqs} sequences of {self.num_slots} tokens takes"
                f" {self.cache_bytes / GIB:.3g} GiB, but only {free / GIB:.3g} GiB are free; lower max_num_seqs or"
                " max_model_len, or set kv_cache_dtype=torch.int8"
            )
        return self._allocate_cache(self.model.device)

    @torch.inference_mode(False)  # inference tensors could not be updated in place outside inference mode
    def _allocate_cache(self, device: torch.device) -> BatchKVCache:
        assert self.cache_implementation != "auto"  # resolved in __post_init__
        return BatchKVCache(
            self.model,
            self.max_num_seqs,
            self.num_slots,
            device=device,
            implementation=self.cache_implementation,
            dtype=self.kv_cache_dtype,
            chunk_size=self.resolved_prefill_chunk_size,
            num_pages=self.num_pages(),
            max_source_len=self.max_source_len,
        )

    def build_model_inputs(
        self, prompt: Sequence[int], output_prefix: Sequence[int]
    ) -> tuple[list[int], list[int] | None]:
        """Return (decoder input tokens, source tokens). The source tokens are None if the model has no encoder."""
        config = self.model.config
        size = getattr(config, "source_vocab_size", None) or config.vocab_size
        tokens = check_ids_in_vocab("the prompt", prompt, size)
        prefix = check_ids_in_vocab("output_prefix", output_prefix, config.vocab_size)
        if not tokens:
            raise InputError("the prompt is empty; pass at least one token, such as the BOS token")
        if "encoder" not in self.model.stacks:
            if len(tokens) + len(prefix) >= self.num_slots:
                lengths = f"{len(tokens)} tokens, but prompt and completion together may have at most {self.num_slots}"
                raise InputError(f"the prompt has {lengths} (max_model_len); shorten the prompt")
            return tokens + prefix, None
        max_positions = getattr(self.model.stacks["encoder"].embed.position, "max_positions", None)
        limit = self.max_source_len if max_positions is None else min(self.max_source_len, max_positions)
        if len(tokens) > limit:
            raise InputError(f"the source has {len(tokens)} tokens, but the limit is {limit}; shorten the source")
        assert self.decoder_start_token_id is not None
        return [self.decoder_start_token_id, *prefix], tokens

    def build_request(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        seed: int,
        output_prefix: Sequence[int] = (),
        adapter: str | None = None,
    ) -> Request:
        """Build and validate a request, whose output starts with the tokens of `output_prefix`.

        `adapter`: one of `adapters`, or None for the first of them."""
        if sampling_params.stop and tokenizer is None:
            raise InputError("stop strings are matched in decoded text, but there is no tokenizer; pass stop_token_ids")
        grammar = self.compile_grammar(sampling_params, tokenizer)
        seed = check_int("seed", seed, 0, 2**63 - 1)
        tokens, source = self.build_model_inputs(prompt, output_prefix)
        max_tokens = self.resolve_max_tokens(tokens, sampling_params, output_prefix)
        output = OutputProcessor(
            sampling_params, max_tokens, tokenizer, self.eos_token_ids, prompt_tokens=() if source else prompt
        )
        if sampling_params.prompt_logprobs is not None:
            if source is not None:
                raise InputError(
                    "prompt_logprobs needs a decoder, but the prompt of this model is the source of an encoder, which"
                    " predicts no tokens; leave it out"
                )
            output.prompt_logprobs = [None]
        request = Request(tokens, sampling_params, seed, output)
        request.adapter, request.grammar = self.resolve_adapter(adapter), grammar
        request.source_tokens, request.output_prefix = source, list(output_prefix)
        request.num_launched_tokens = len(output_prefix)
        if grammar is not None:
            grammar.skip(request.output_prefix)
            if grammar.error is not None:
                raise InputError(f"output_prefix does not match the grammar ({grammar.error}); pass a prefix that does")
        for token in request.output_prefix:  # forced, so log-probability 0
            request.add_chunk(output.append_token(token, 0.0, {token: 0.0} if sampling_params.logprobs else None))
        return request

    def compile_grammar(self, sampling_params: SamplingParams, tokenizer: Tokenizer | None) -> Grammar | None:
        """Grammar of a request's schema, regex, choice or grammar; None if there is none."""
        constraint = sampling_params.constraint
        if constraint is None:
            return None
        if tokenizer is None:
            raise InputError(
                f"{constraint.kind} is matched in the text of the completion, but there is no tokenizer; pass a"
                " checkpoint with a tokenizer"
            )
        compiler = get_grammar_compiler(tokenizer, self.model.config.vocab_size, self.eos_token_ids)
        return compiler.compile(constraint)

    def resolve_adapter(self, adapter: str | None) -> str | None:
        """Adapter of a request: None is the first of `adapters`, and '__base__' the base model."""
        assert self.adapters is not None
        if adapter is None:
            return self.adapters[0]
        name = None if adapter == BASE_ADAPTER else adapter
        if name not in self.adapters:
            names = ", ".join(BASE_ADAPTER if each is None else each for each in self.adapters)
            raise InputError(f"adapter '{adapter}' is not one of this engine, which has {names}; use one of them")
        return name

    def resolve_max_tokens(
        self, input_ids: Sequence[int], sampling_params: SamplingParams, output_prefix: Sequence[int]
    ) -> int:
        """Maximum number of completion tokens: max_new_tokens, limited by the slots that `input_ids` leaves free."""
        sampling_params.check_vocab(self.model.config.vocab_size)
        available = self.num_slots - len(input_ids) + len(output_prefix)
        return max(1, min(sampling_params.max_new_tokens or available, available))

    def build_page_pool(self, num_pages: int, *, prefix_caching: bool) -> PagePool:
        """Build the allocator of a paged cache of `num_pages` pages, including the null page."""
        return PagePool(
            num_pages,
            self.page_size,
            prefix_caching=prefix_caching,
            growth_step=self.growth_step,
            can_grow=self.can_grow_cache,
        )

    def max_slots(self, request: Request) -> int:
        """Maximum number of KV cache slots that a request uses. Its last sampled token is never written to them."""
        return len(request.input_ids) + request.output.max_tokens - len(request.output_prefix) - 1


class EngineOptions(TypedDict, total=False):
    """Options of `EngineConfig` that `generate` and the server pass on unchanged."""

    cache_implementation: CacheImplementation | Literal["auto"]
    kv_cache_dtype: torch.dtype | None
    kv_cache_memory_bytes: float | None
    memory_utilization: float | None
    scheduling_policy: SchedulingPolicy
    prefill_chunk_size: int | None
    weight_bits: int | None
    compile: bool | None


def build_engine_config(
    model: Transformer,
    generation_config: GenerationConfig,
    *,
    max_num_seqs: int = 8,
    required_len: int | None = None,
    max_model_len: int | None = None,
    max_source_len: int = 512,
    adapters: Sequence[str | None] | None = None,
    **options: Unpack[EngineOptions],
) -> EngineConfig:
    """Build an engine configuration with the checkpoint's special tokens.

    `required_len`: number of tokens of the longest sequence to generate, prompt included. If it is less than
    max_model_len, the KV cache has only this many slots per sequence."""
    if max_source_len == 0:
        raise InputError("the prompt is empty; pass at least one token, such as the BOS token")
    has_encoder = len(model.stacks) == 2
    forced_eos = min(generation_config.forced_eos_token_ids, default=None)
    config = EngineConfig(
        model,
        max_num_seqs,
        max_model_len,
        max_source_len=max_source_len,
        adapters=adapters,
        eos_token_ids=generation_config.eos_token_ids,
        decoder_start_token_id=generation_config.decoder_start_token_id if has_encoder else None,
        forced_eos_token_id=forced_eos if has_encoder else None,
    )
    slots = config.num_slots
    if required_len is not None:
        unbounded = max_model_len is None and config.max_position_embeddings is None and model.config.context is None
        slots = max(2, required_len if unbounded else min(required_len, slots))
    options.setdefault("cache_implementation", "auto")  # resolved again for this number of slots
    return replace(config, max_model_len=slots, **options)


def reduce_num_seqs_to_fit(engine_config: EngineConfig) -> EngineConfig:
    """Return a copy with max_num_seqs halved until the KV cache fits in the free memory, or max_num_seqs is 1."""
    free = free_memory(engine_config.model.device)
    while free is not None and engine_config.cache_bytes > free and engine_config.max_num_seqs > 1:
        engine_config = replace(engine_config, max_num_seqs=engine_config.max_num_seqs // 2)
    return engine_config
