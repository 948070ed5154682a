"""What an engine is set up with: a model, the shape of its cache, and the tokens at which its texts begin and end."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from cutaway.errors import InputError
from cutaway.generate.engine.kv_cache import (
    CACHE_IMPLEMENTATIONS,
    PAGE_SIZE,
    BatchKVCache,
    CacheImplementation,
    cross_cache_shapes,
)
from cutaway.generate.engine.output import OutputProcessor
from cutaway.generate.engine.request import Request
from cutaway.generate.generation_config import GenerationConfig
from cutaway.generate.sampling.sampling_params import (
    SamplingParams,
    as_float,
    as_int,
    check_int,
    check_token_ids,
    format_value,
)
from cutaway.model import Transformer
from cutaway.model.device import GIB, free_memory
from cutaway.model.inputs import FLOAT_DTYPES
from cutaway.model.rope import Rope
from cutaway.model.stack import Stack
from cutaway.tokenizer import Tokenizer

DEFAULT_MAX_MODEL_LEN = 4096
"""Tokens of context that are taken for a model that names none."""


@dataclass
class EngineConfig:
    """How many texts at once, how long, and in which kind of cache. It is checked when it is made."""

    model: Transformer
    max_num_seqs: int = 8
    max_model_len: int | None = None
    """Tokens of a text, prompt and answer together; the model's own unless told."""
    cache_implementation: CacheImplementation | Literal["auto"] = "auto"
    """'full', 'ring' (sliding windows keep no more than they see), 'paged' (texts share what they begin alike with)."""
    kv_cache_dtype: torch.dtype | None = None
    """torch.int8 halves a cache of 16-bit numbers; the model's own dtype unless told."""
    prefill_chunk_size: int = 512
    """Prompt tokens that are read between two steps."""
    kv_cache_memory_bytes: float | None = None
    """Bytes for the pages of a paged cache; for all rows in full unless told."""
    max_source_len: int = 512
    """The longest source of an encoder-decoder."""
    weight_bits: int | None = None
    """Bits of a weight in steps: 8, or on a GPU 4, where fewer bytes are worth a little rounding."""
    compile: bool | None = None
    """Whether steps are made fast at once: recorded on a GPU, compiled on the CPU. Unless told, when it pays."""
    eos_token_ids: Collection[int] = field(default_factory=frozenset)
    """Each of these ends a text. `generate` takes them from a checkpoint's files."""
    decoder_start_token_id: int | None = None
    forced_eos_token_id: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, Transformer):
            raise InputError(f"model is a {type(self.model).__name__}; give a model, such as a checkpoint's .model")
        if "decoder" not in self.model.stacks:
            raise InputError("this model is an encoder, which continues no text; use fill_mask, or model.encode")
        if self.model.device.type == "meta":
            raise InputError("this model is on the meta device, where it has shapes and no values; load its weights")
        for name in ("max_num_seqs", "prefill_chunk_size", "max_source_len"):
            value = as_int(getattr(self, name))
            if value is None or value < 1:
                raise InputError(f"{name} is {format_value(getattr(self, name))}; give a whole number from 1")
            setattr(self, name, value)
        if self.compile is not None and not isinstance(self.compile, bool):
            raise InputError(f"compile is {format_value(self.compile)}; give True, False or None (when it pays)")
        if self.cache_implementation != "auto" and self.cache_implementation not in CACHE_IMPLEMENTATIONS:
            raise InputError(
                f"cache_implementation is {format_value(self.cache_implementation)}; use auto,"
                f" {', '.join(CACHE_IMPLEMENTATIONS)}"
            )
        if self.kv_cache_dtype is not None and self.kv_cache_dtype not in (*FLOAT_DTYPES, torch.int8):
            raise InputError(
                f"kv_cache_dtype is {format_value(self.kv_cache_dtype)}; use torch.int8 or a dtype of floats"
            )
        if self.kv_cache_memory_bytes is not None and (
            as_float(self.kv_cache_memory_bytes) is None or not 0 < self.kv_cache_memory_bytes < math.inf
        ):
            raise InputError(
                f"kv_cache_memory_bytes is {format_value(self.kv_cache_memory_bytes)}; give a number of bytes above 0"
            )
        self.num_slots = self._resolve_max_model_len()
        self.prefill_chunk_size = min(self.prefill_chunk_size, self.num_slots)
        if self.cache_implementation == "auto":
            windows = any(window is not None and window < self.num_slots for window in self.decoder.windows)
            self.cache_implementation = "ring" if windows and self.dynamic_rope_len is None else "full"
        if self.cache_implementation == "ring" and self.dynamic_rope_len is not None:
            raise InputError(
                f"texts of over {self.dynamic_rope_len} tokens are read as a whole by this model's scaling of RoPE,"
                f" which a ring cannot hold; use a full or paged cache, or max_model_len={self.dynamic_rope_len}"
            )
        self.num_pages()  # says so if the memory is not enough for one text
        size = self.model.config.vocab_size
        self.eos_token_ids = frozenset(
            token for token in check_token_ids("eos_token_ids", self.eos_token_ids) if token < size
        )
        if "encoder" in self.model.stacks and self.decoder_start_token_id is None:
            raise InputError("an encoder-decoder's answer begins with a token of its own; give decoder_start_token_id")
        for name in ("decoder_start_token_id", "forced_eos_token_id"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < size:
                raise InputError(f"{name} is the id {token}; the vocabulary has ids 0 to {size - 1}")

    @property
    def decoder(self) -> Stack:
        return self.model.stacks["decoder"]

    @property
    def rope_switch_lengths(self) -> list[int]:
        """Lengths at which LongRoPE turns a text's tokens by other angles, so that it must be read again."""
        return [turn for turn in self.decoder.rope_switch_lengths if turn < self.num_slots]

    @property
    def dynamic_rope_len(self) -> int | None:
        """Longer texts than this turn by angles that depend on their length, so they are read in one piece."""
        ropes = [position for position in self.decoder.positions.values() if isinstance(position, Rope)]
        switches = [
            rope.switch_length
            for rope in ropes
            if rope.switch_length is not None and rope.switch_length < self.num_slots
        ]
        return min(switches, default=None)

    @property
    def max_position_embeddings(self) -> int | None:
        """What the model can read: learned positions end, others do not."""
        return getattr(self.decoder.embed.position, "max_positions", None)

    def _resolve_max_model_len(self) -> int:
        own = self.model.config.context
        context = (
            self.max_model_len
            if self.max_model_len is not None
            else min(own or DEFAULT_MAX_MODEL_LEN, self.max_position_embeddings or own or DEFAULT_MAX_MODEL_LEN)
        )
        found = as_int(context)
        if found is None or found < 2:
            raise InputError(f"max_model_len is {format_value(context)}; give a whole number of tokens from 2")
        if self.max_position_embeddings is not None and found > self.max_position_embeddings:
            raise InputError(
                f"max_model_len is {found}, but the model has learned {self.max_position_embeddings} positions;"
                " lower it"
            )
        return found

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return min(PAGE_SIZE, self.num_slots)

    def num_pages(self) -> int | None:
        """How many pages the memory is enough for, beside the one that belongs to nobody."""
        if self.cache_implementation != "paged" or self.kv_cache_memory_bytes is None:
            return None
        each, one = self.bytes_for_slots(self.page_size), -(-self.num_slots // self.page_size)
        count = int(self.kv_cache_memory_bytes // max(1, each)) - 1
        if count < one:
            raise InputError(
                f"{self.kv_cache_memory_bytes / GIB:.3g} GiB holds no text of {self.num_slots} tokens; give"
                f" {(one + 1) * each / GIB:.3g} or more, or lower max_model_len"
            )
        return min(count, self.max_num_seqs * one)

    def bytes_for_slots(self, num_slots: int) -> int:
        """What so many tokens of one text take."""
        stack = self.decoder
        dtype = self.kv_cache_dtype or self.model.dtype
        total = 0
        for widths, window in zip(stack.cache_shapes, stack.windows, strict=True):
            room = (
                num_slots
                if window is None or self.cache_implementation != "ring"
                else min(num_slots, window + self.prefill_chunk_size - 1)
            )
            per_head = 2 if dtype == torch.int8 else 0
            total += room * sum(heads * (width * dtype.itemsize + per_head) for heads, width in widths)
        return total

    @property
    def cache_bytes(self) -> int:
        """What the cache takes."""
        own = self.max_num_seqs * self.bytes_for_slots(self.num_slots)
        if self.cache_implementation == "paged":
            pages = self.num_pages() or self.max_num_seqs * -(-self.num_slots // self.page_size)
            own = (pages + 1) * self.bytes_for_slots(self.page_size)
        cross = 0
        if "encoder" in self.model.stacks:
            for heads, width in cross_cache_shapes(self.model):
                cross += 2 * heads * width * self.model.dtype.itemsize
        return own + self.max_num_seqs * self.max_source_len * cross

    @torch.inference_mode(False)  # what is made in that mode can be changed in no other, as by another thread
    def build_cache(self) -> BatchKVCache:
        """The cache, if there is memory for it."""
        free = free_memory(self.model.device)
        if free is not None and self.cache_bytes > free:
            raise InputError(
                f"a {self.cache_implementation} cache of {self.max_num_seqs} texts of {self.num_slots} tokens takes"
                f" {self.cache_bytes / GIB:.3g} GiB, and {free / GIB:.3g} are free; lower max_num_seqs or"
                " max_model_len, or keep it in int8"
            )
        assert self.cache_implementation != "auto"  # settled above
        return BatchKVCache(
            self.model,
            self.max_num_seqs,
            self.num_slots,
            implementation=self.cache_implementation,
            dtype=self.kv_cache_dtype,
            chunk_size=self.prefill_chunk_size,
            num_pages=self.num_pages(),
            max_source_len=self.max_source_len,
        )

    def build_model_inputs(
        self, prompt: Sequence[int], output_prefix: Sequence[int]
    ) -> tuple[list[int], list[int] | None]:
        """What the decoder reads first, and the source if there is an encoder."""
        config = self.model.config
        encodes = "encoder" in self.model.stacks
        size = getattr(config, "source_vocab_size", None) or config.vocab_size
        tokens, first = (
            check_ids_in_vocab("the prompt", prompt, size),
            check_ids_in_vocab("output_prefix", output_prefix, config.vocab_size),
        )
        if not tokens:
            raise InputError("the prompt is empty; give at least one token, such as the beginning-of-text token")
        if not encodes:
            if len(tokens) + len(first) >= self.num_slots:
                raise InputError(
                    f"the prompt has {len(tokens)} tokens, and max_model_len is {self.num_slots}, answer included;"
                    " shorten it"
                )
            return tokens + first, None
        learned = getattr(self.model.stacks["encoder"].embed.position, "max_positions", None)
        room = self.max_source_len if learned is None else min(self.max_source_len, learned)
        if len(tokens) > room:
            raise InputError(f"the source has {len(tokens)} tokens, and room is for {room}; shorten it")
        assert self.decoder_start_token_id is not None
        return [self.decoder_start_token_id, *first], tokens

    def build_request(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        seed: int,
        output_prefix: Sequence[int] = (),
    ) -> Request:
        """A request that was checked, with what its answer is begun with told already."""
        if sampling_params.stop and tokenizer is None:
            raise InputError(
                "stop strings are found in text, and there is no tokenizer to make any; give stop_token_ids"
            )
        seed = check_int("seed", seed, 0, 2**63 - 1)
        tokens, source = self.build_model_inputs(prompt, output_prefix)
        limit = self.resolve_max_tokens(tokens, sampling_params, output_prefix)
        answer = OutputProcessor(
            sampling_params, limit, tokenizer, self.eos_token_ids, prompt_tokens=() if source else prompt
        )
        ticket = Request(tokens, sampling_params, seed, answer)
        ticket.source_tokens, ticket.output_prefix, ticket.num_launched_tokens = (
            source,
            list(output_prefix),
            len(output_prefix),
        )
        for token in ticket.output_prefix:  # certain, so with log-probability 0
            ticket.add_chunk(answer.append_token(token, 0.0, {token: 0.0} if sampling_params.logprobs else None))
        return ticket

    def resolve_max_tokens(
        self, input_ids: Sequence[int], sampling_params: SamplingParams, output_prefix: Sequence[int]
    ) -> int:
        """Tokens of the answer at most: those asked for, or what the context has room for."""
        sampling_params.check_vocab(self.model.config.vocab_size)
        room = self.num_slots - len(input_ids) + len(output_prefix)
        return max(1, min(sampling_params.max_new_tokens or room, room))

    def max_slots(self, request: Request) -> int:
        """Slots that a request takes at most."""
        return len(request.input_ids) + request.output.max_tokens - len(request.output_prefix) - 1

    def format_invalid_logits(self, request: Request) -> str:
        place = len(request.output.tokens)
        return (
            f"the model's logits for token {place} of the answer hold NaN, or nothing is left to choose from; check the"
            " weights (ct.load(..., check=True)), the dtype (float16 overflows in some models) and suppress_tokens"
        )


def check_ids_in_vocab(name: str, tokens: Sequence[int], vocab_size: int) -> list[int]:
    """Ids of this vocabulary, as integers."""
    found = []
    for token in tokens:
        number = token if type(token) is int else as_int(token)
        if number is None or not 0 <= number < vocab_size:
            raise InputError(f"{name} holds the id {format_value(token)}; the vocabulary has ids 0 to {vocab_size - 1}")
        found.append(number)
    return found


def build_engine_config(
    model: Transformer,
    generation_config: GenerationConfig,
    *,
    required_len: int | None = None,
    max_model_len: int | None = None,
    **options: Any,
) -> EngineConfig:
    """An engine's configuration for this model; with a cache no longer than `required_len`."""
    if options.get("max_source_len") == 0:
        raise InputError("the prompt is empty; give at least one token, such as the beginning-of-text token")
    both = len(model.stacks) == 2
    own: dict[str, Any] = {
        "eos_token_ids": generation_config.eos_token_ids,
        "decoder_start_token_id": generation_config.decoder_start_token_id if both else None,
        "forced_eos_token_id": min(generation_config.forced_eos_token_ids)
        if generation_config.forced_eos_token_ids and both
        else None,
    }
    plan = EngineConfig(model, max_model_len=max_model_len, **own)
    slots = plan.num_slots
    if required_len is not None:
        endless = max_model_len is None and plan.max_position_embeddings is None and model.config.context is None
        slots = max(2, required_len if endless else min(required_len, slots))
    return EngineConfig(model, max_model_len=slots, **own, **options)


def reduce_num_seqs_to_fit(engine_config: EngineConfig) -> EngineConfig:
    """The same, or with fewer sequences at once if there is no memory for so many."""
    free = free_memory(engine_config.model.device)
    while free is not None and engine_config.cache_bytes > free and engine_config.max_num_seqs > 1:
        engine_config = replace(engine_config, max_num_seqs=engine_config.max_num_seqs // 2)
    return engine_config
