"""The model at work for many texts: prompts are read in pieces, and all rows take their next step together."""

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cutaway.errors import InputError
from cutaway.generate.engine.kv_cache import BatchKVCache
from cutaway.generate.engine.request import Request
from cutaway.generate.fast.warmup_policy import WarmupCostStore, WarmupPolicy
from cutaway.generate.sampling.sampler import Sampler, SamplerOutput
from cutaway.generate.sampling.sampling_state import SamplingFeatures
from cutaway.model import Transformer
from cutaway.model.cache import Cache
from cutaway.model.moe import MixtureOfExperts


class ModelRunner:
    """One model, its cache and its sampler on one device. Nothing else touches them."""

    @torch.inference_mode(False)  # what is made in that mode can be changed in no other
    def __init__(
        self,
        model: Transformer,
        cache: BatchKVCache,
        *,
        compile: bool | None = None,
        weight_bits: int | None = None,
    ) -> None:
        """`compile`: steps are made fast at once (True), never (False), or when it pays (None). `weight_bits`: of a
        weight in fast steps, if fewer than the model's."""
        if weight_bits not in (None, 4, 8, 16):
            raise InputError(f"weight_bits is {weight_bits!r}; steps can use weights of 16, 8 or 4 bits")
        self.model: Any = model
        self.cache = cache
        self.sampler = Sampler(cache.batch_size, model.config.vocab_size, model.device)
        self.next_tokens = torch.zeros(cache.batch_size, 1, dtype=torch.long, device=model.device)
        """Of each row, the token that its next step reads."""
        self.has_encoder = "encoder" in model.stacks
        self.active_rows = torch.zeros(cache.batch_size, dtype=torch.bool, device=model.device)
        self.weight_bits = weight_bits
        self.decode_model: Any = model
        """What takes the steps: the model, or its like made for them. Prompts are read by the model itself."""
        self.cuda_graphs: Callable[[int, SamplingFeatures], SamplerOutput] | None = None
        self.compiled_decode_logits: Callable[[Tensor, BatchKVCache, Tensor], Tensor] | None = None
        """What computes a step's logits, if it was compiled."""
        kind = model.device.type
        able = not _has_hooks(model) and kind in ("cuda", "cpu")
        if weight_bits is not None and not able:
            raise InputError(
                "weight_bits is for steps made fast, and this model has hooks or is elsewhere; leave weight_bits out"
            )
        unasked = compile is None and kind == "cpu"  # a compiler takes most of a minute, and Ctrl-C for its own affair
        self.warmup_policy = (
            WarmupPolicy(WarmupCostStore(model, cache.batch_size, weight_bits))
            if able and compile is not False and not unasked
            else None
        )
        """Measures steps: plain ones until it pays to make them fast, then what that cost."""
        if weight_bits is not None and kind == "cpu":
            self.pack_cpu_weights(weight_bits, single_row=compile is True and cache.batch_size == 1)
        if self.warmup_policy is not None and (compile or (weight_bits is not None and kind == "cuda")):
            start = time.perf_counter()
            self.enable_fast_decode()
            self.warmup_policy.record_warmup(time.perf_counter() - start)

    def enable_fast_decode(self) -> None:
        """From now on steps are fast ones."""
        if self.model.device.type == "cuda":
            self._enable_gpu_decode()
        else:
            if self.decode_model is self.model:
                self.pack_cpu_weights(None, single_row=self.cache.batch_size == 1)
            self.compiled_decode_logits = torch.compile(self._decode_logits, fullgraph=True)

    def pack_cpu_weights(self, weight_bits: int | None, *, single_row: bool) -> None:
        """Steps on the CPU by weights in the form that is read fastest."""
        from cutaway.generate.fast.cpu_blocks import build_cpu_decode_model, select_linear_class

        if weight_bits == 4:
            raise InputError("weight_bits is 4, which is for GPUs; on the CPU use 8 or 16")
        kind = select_linear_class(self.model, weight_bits, single_row_compiled=single_row)
        if kind is not None:
            self.decode_model = build_cpu_decode_model(self.model, kind).eval()

    def _enable_gpu_decode(self) -> None:
        from cutaway.generate.fast.cuda_graphs import CUDAGraphRunner
        from cutaway.generate.fast.gpu_blocks import (  # Triton, which not every machine has
            build_gpu_decode_model,
            can_build_gpu_decode_model,
        )

        if can_build_gpu_decode_model(self.model, self.cache):
            self.decode_model = build_gpu_decode_model(
                self.model, None if self.weight_bits == 16 else self.weight_bits
            ).eval()
        elif self.weight_bits is not None:
            raise InputError(
                f"weight_bits is {self.weight_bits}, which is for up to 64 texts at once and no 64-bit numbers"
            )
        if _can_capture_cuda_graph(self.model):
            self.cuda_graphs = CUDAGraphRunner(self._decode_fixed_shape, self.active_rows)

    @torch.inference_mode(False)
    @torch.no_grad()
    def init_row(self, row: int, request: Request, eos_token_ids: Collection[int]) -> None:
        """Give a row to a request; a source is read now."""
        self.cache.assign_row(row, request.num_computed_tokens, request.page_ids)
        prompt = request.input_ids[
            : len(request.input_ids) - len(request.output_prefix)
        ]  # what it begins with is said already
        self.sampler.set_row(
            row,
            request.sampling_params,
            prompt,
            request.seed,
            eos_token_ids=eos_token_ids,
            output_tokens=request.output_prefix,
        )
        if request.source_tokens is not None:
            self.encode_source(row, request.source_tokens, request.input_ids)

    def clear_row(self, row: int) -> None:
        self.cache.clear_row(row)
        self.sampler.clear_row(row)

    def release_compiled(self) -> None:
        """Forget the fast steps, which hold this runner: a cache may be most of the device's memory, and would stay
        until Python looks for such circles."""
        self.cuda_graphs = self.compiled_decode_logits = None

    @torch.no_grad()
    def prefill(self, first_row: int, chunks: Sequence[Sequence[int]], num_computed: Sequence[int]) -> None:
        """Read a piece of each of these rows' texts, of which they have read `num_computed` tokens."""
        longest = max(map(len, chunks))
        tokens = torch.tensor([[*piece, *[0] * (longest - len(piece))] for piece in chunks])
        mask = None
        if any(len(piece) < longest for piece in chunks):
            mask = torch.tensor([[True] * len(piece) + [False] * (longest - len(piece)) for piece in chunks])
            mask = mask.to(self.model.device)
        part = self.cache.view_rows(first_row, first_row + len(chunks), max_len=max(num_computed))
        self.forward_hidden(self.model, tokens.to(self.model.device), mask, part)

    @torch.no_grad()
    def encode_source(self, row: int, source_tokens: Sequence[int], decoder_tokens: Sequence[int]) -> None:
        """Let an encoder read a row's source; `decoder_tokens` are what the decoder begins with."""
        alone: Cache = self.model.new_cache(1, len(decoder_tokens))
        device = self.model.device
        with _shape_agnostic_sdpa():
            self.model.hidden_states(
                torch.tensor([list(source_tokens)], device=device),
                torch.tensor([list(decoder_tokens)], device=device),
                cache=alone,
            )
        self.cache.store_cross_cache(row, alone)

    @torch.no_grad()
    def decode(self, num_rows: int, max_len: int, steps_left: int = 1) -> SamplerOutput:
        """The next token of the first `num_rows` rows, none of which has read more than `max_len`.

        `steps_left`: how many steps are still to come, as far as is known.
        """
        if self.warmup_policy is None:
            return self._decode_once(num_rows, max_len)
        start = time.perf_counter()
        try:
            if self.warmup_policy.should_warm_up(steps_left):
                self.enable_fast_decode()
            drawn = self._decode_once(num_rows, max_len)
        except (RuntimeError, ImportError, OSError) as error:  # no compiler here, or one that fails; nothing was said
            if _is_keyboard_interrupt(error):
                raise KeyboardInterrupt from error
            if not self.warmup_policy.warmed_up or self.warmup_policy.fast_times or self.weight_bits is not None:
                raise
            warnings.warn(f"steps stay as they are, since making them fast failed: {error}", stacklevel=2)
            self.warmup_policy, self.decode_model, self.cuda_graphs, self.compiled_decode_logits = (
                None,
                self.model,
                None,
                None,
            )
            return self._decode_once(num_rows, max_len)
        drawn.tokens.cpu()
        if self.warmup_policy.record_step(time.perf_counter() - start):
            self.warmup_policy = None
        return drawn

    def _decode_once(self, num_rows: int, max_len: int) -> SamplerOutput:
        needs = self.sampler.features(num_rows)
        if self.cuda_graphs is not None:
            return self.cuda_graphs(num_rows, needs)
        # The length of a tensor is a number that a compiled step takes as it comes, if it is neither 0 nor 1.
        span = torch.empty(max(2, max_len + 1), dtype=torch.bool)
        if self.compiled_decode_logits is not None:  # else the compiler, which takes a second to import, is not needed
            torch._dynamo.mark_dynamic(span, 0)
        logits = (self.compiled_decode_logits or self._decode_logits)(
            self.next_tokens[:num_rows], self.cache.view_rows(0, num_rows, max_len=max_len), span
        )
        drawn = self.sampler.sample(logits, needs)
        self.next_tokens[:num_rows, 0] = drawn.tokens
        return drawn

    def _decode_logits(self, tokens: Tensor, cache_view: BatchKVCache, span: Tensor) -> Tensor:
        cache_view.max_len = span.shape[0] - 1
        return self.decode_model.head(self.forward_hidden(self.decode_model, tokens, None, cache_view))[:, -1]

    def _decode_fixed_shape(self, num_rows: int, features: SamplingFeatures) -> SamplerOutput:
        """A step whose shapes depend on nothing but `num_rows`; only active rows take part."""
        part = self.cache.view_rows(0, num_rows, max_len=0)
        part.static_shapes = True
        active = self.active_rows[:num_rows]
        logits = self.decode_model.head(
            self.forward_hidden(self.decode_model, self.next_tokens[:num_rows], active.unsqueeze(-1), part)
        )[:, -1]
        drawn = self.sampler.sample(logits, features, active)
        self.next_tokens[:num_rows, 0] = torch.where(active, drawn.tokens, self.next_tokens[:num_rows, 0])
        return drawn

    def forward_hidden(self, model: Any, tokens: Tensor, mask: Tensor | None, cache: BatchKVCache) -> Tensor:
        given = (None, tokens, None, mask) if self.has_encoder else (tokens, mask)
        if not tokens.is_cuda:
            return model.hidden_states(*given, cache=cache)
        with _shape_agnostic_sdpa():
            return model.hidden_states(*given, cache=cache)

    def swap_rows(self, a: int, b: int) -> None:
        """Two texts change rows."""
        if a != b:
            self.cache.swap_rows(a, b)
            self.sampler.swap_rows(a, b)
            kept = self.next_tokens[a].clone()
            self.next_tokens[a] = self.next_tokens[b]
            self.next_tokens[b] = kept


def _shape_agnostic_sdpa() -> AbstractContextManager[None]:
    """Attention by kernels that are ready for every shape: cuDNN plans for each anew, which takes longer than reading,
    and texts have all lengths."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@contextmanager
def eval_mode(*models: Transformer) -> Iterator[None]:
    """Models that are being trained answer without dropout, and go on being trained."""
    training = [module for model in models for module in model.modules() if module.training]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _is_keyboard_interrupt(error: BaseException | None) -> bool:
    """Whether it was the user who stopped this: a compiler takes that for a failure of its own."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _has_hooks(model: Transformer) -> bool:
    """Whether somebody looks at the model's modules, or changes what they do."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _can_capture_cuda_graph(model: Transformer) -> bool:
    """Experts in other numbers than bf16 are computed one by one, by counts that only the host can read."""
    experts = any(isinstance(module, MixtureOfExperts) for module in model.modules())
    return not experts or model.dtype == torch.bfloat16


class PendingTokens:
    """Tokens that were drawn for these requests. Looking at them waits for the device; sending them off does not."""

    def __init__(self, sampler_output: SamplerOutput, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.copy_event = None
        if sampler_output.tokens.device.type == "cuda":
            copies = [None if part is None else _copy_to_pinned(part) for part in sampler_output]
            sampler_output = SamplerOutput(*copies)  # type: ignore[arg-type]
            self.copy_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copy_event.record()
        self.host_output = sampler_output

    def results(self) -> Iterator[tuple[Request, int, bool, float | None, dict[int, float] | None]]:
        """For each request its token, whether its logits were bad, and log-probabilities if there are any."""
        if self.copy_event is not None:
            self.copy_event.synchronize()
        host = self.host_output
        tokens, bad = host.tokens.tolist(), host.invalid.tolist()
        logprobs = None if host.logprobs is None else host.logprobs.tolist()
        names = None if host.top_tokens is None else host.top_tokens.tolist()
        values = None if host.top_logprobs is None else host.top_logprobs.tolist()
        for place, ticket in enumerate(self.requests):
            top = None
            if names is not None and values is not None and ticket.sampling_params.logprobs:
                count = ticket.sampling_params.logprobs
                top = dict(zip(names[place][:count], values[place][:count], strict=True))
            yield ticket, tokens[place], bad[place], None if logprobs is None else logprobs[place], top


def _copy_to_pinned(tensor: Tensor) -> Tensor:
    """A copy on the host, complete once the device gets there."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
