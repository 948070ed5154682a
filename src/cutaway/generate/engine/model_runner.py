"""Model runner: prefill and decode forward passes over the batched KV cache, sampling, and fast decode steps."""

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.eval_mode import iter_modules
from cutaway.generate.engine.kv_cache import BatchKVCache
from cutaway.generate.engine.request import Request
from cutaway.generate.engine.workers import get_workers
from cutaway.generate.fast.cuda_graphs import CUDAGraphRunner
from cutaway.generate.fast.warmup_policy import WarmupCostStore, WarmupPolicy
from cutaway.generate.sampling.prompt_logprobs import compute_prompt_logprobs
from cutaway.generate.sampling.sampler import Sampler, SamplerOutput, swap_tensor_rows
from cutaway.generate.sampling.sampling_state import SamplingFeatures
from cutaway.generate.structured_output.constraint import bitmask_width
from cutaway.model import DecoderOnly, EncoderDecoder, Transformer
from cutaway.model.adapters.lora import use_row_adapters
from cutaway.model.kernels import shape_agnostic_sdpa
from cutaway.model.moe import MixtureOfExperts
from cutaway.quantization.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from cutaway.generate.fast.packed_prefill import PackedPrefill

_GenerativeModel: TypeAlias = DecoderOnly | EncoderDecoder


class ModelRunner:
    """Runs the prefill and decode steps of a model, with its KV cache and its sampler on one device.

    Decode runs in one of four ways: eager; C kernels, with packed weights if asked for (CPU); torch.compile (CPU); CUDA
    graphs, with Triton kernels where they support the model (GPU). Prefill runs with the original model and padded
    chunks, or on a GPU with the fused kernels, without padding.
    """

    @torch.inference_mode(False)  # inference tensors could not be updated in place outside inference mode
    def __init__(
        self,
        model: Transformer,
        cache: BatchKVCache,
        *,
        compile: bool | None = None,
        weight_bits: int | None = None,
        adapters: Sequence[str | None] | None = None,
    ) -> None:
        """`compile`, `weight_bits`, `adapters`: see `EngineConfig`."""
        if weight_bits not in (None, 4, 8, 16):
            raise InputError(f"weight_bits is {weight_bits!r}; decode steps support 16, 8 or 4 bits per weight")
        assert isinstance(model, DecoderOnly | EncoderDecoder)
        self.model: _GenerativeModel = model
        self.cache = cache
        self.sampler = Sampler(cache.batch_size, model.config.vocab_size, model.device)
        self.next_tokens = torch.zeros(cache.batch_size, 1, dtype=torch.long, device=model.device)
        """(batch_size, 1): input token of each row's next decode step."""
        width = bitmask_width(model.config.vocab_size)
        self.host_bitmask = torch.zeros(
            cache.batch_size, width, dtype=torch.int32, pin_memory=model.device.type == "cuda"
        )
        """(batch_size, width): tokens that the grammars allow next, before they are copied to the device."""
        self.adapters = (model.active_adapter,) if adapters is None else tuple(adapters)
        self.row_adapters = [self.adapters[0]] * cache.batch_size
        """Adapter of each row."""
        self.merged_adapter = self.adapters[0]
        """Adapter that is merged into the weights of the decode model, and that CUDA graphs apply."""
        self.active_rows = torch.zeros(cache.batch_size, dtype=torch.bool, device=model.device)
        self.weight_bits = weight_bits
        self.decode_model: _GenerativeModel = model
        """Model of the decode steps: the model itself, or a variant with packed weights or fused kernels."""
        self.cuda_graphs: CUDAGraphRunner | None = None
        self.compiled_decode_logits: Callable[[Tensor, BatchKVCache, Tensor], Tensor] | None = None
        """`_decode_logits` after torch.compile."""
        device_type = model.device.type
        supported = not _has_hooks(model) and device_type in ("cuda", "cpu")
        self.workers = get_workers(model, cache)
        """The processes that repeat the forward passes, if the model is split over several."""
        if model.tensor_parallel is not None:
            supported = False  # the kernels and packed weights of fast decode steps have no collectives
            if weight_bits is not None or compile:
                option = "weight_bits" if weight_bits is not None else "compile"
                raise InputError(f"a model on several processes does not support {option}; leave it out")
        if weight_bits is not None and not supported:
            raise InputError(
                "weight_bits needs fast decode steps, which support CUDA and CPU models without hooks and offloaded"
                " weights; leave out weight_bits, or remove the hooks"
            )
        is_packed = any(isinstance(weight, QuantizedTensor) for weight in model.parameters())
        if is_packed and (weight_bits is not None or (compile and device_type == "cpu")):
            option = "weight_bits" if weight_bits is not None else "compile"
            raise InputError(
                f"the weights are packed in the format of their file, which {option} does not support; leave it out, or"
                " load the checkpoint with dequantize=True"
            )
        # Compiling on the CPU takes most of a minute, in which Ctrl-C may have no effect.
        skip_cpu_compile = compile is None and device_type == "cpu"
        self.is_merged = model.has_merged_adapter
        self.has_expert_adapters = model.has_expert_adapters
        if weight_bits is not None or compile:
            for adapter in self.adapters:
                model.check_mergeable(adapter)
        elif len(set(self.adapters)) > 1 or not model.is_mergeable(self.adapters[0]):
            supported = False  # fast decode steps have one adapter, which is merged into the weights
        self.warmup_policy = None
        if supported and compile is not False and not skip_cpu_compile:
            self.warmup_policy = WarmupPolicy(WarmupCostStore(model, cache.batch_size, weight_bits))
        """Measures the time of decode steps, to decide when fast steps save time and to record the cost of their
        warm-up. None when there is nothing to decide."""
        self.packed_prefill = self._build_packed_prefill() if supported and compile is not False else None
        """Prefill steps without padding, on a GPU."""
        if device_type == "cpu" and (weight_bits is not None or (supported and compile is None)):
            self.build_cpu_decode_model(weight_bits, compiled=compile is True)
        if self.warmup_policy is not None and (compile or (weight_bits is not None and device_type == "cuda")):
            start = time.perf_counter()
            self.enable_fast_decode()
            self.warmup_policy.record_warmup(time.perf_counter() - start)

    def enable_fast_decode(self) -> None:
        """Switch to fast decode steps: CUDA graphs on a GPU, torch.compile on the CPU."""
        if self.model.device.type == "cuda":
            self._enable_gpu_decode()
        else:
            if self.decode_model is self.model:
                self.build_cpu_decode_model(None, compiled=True)
            if self.decode_model is self.model:
                self.decode_model = self._without_adapters()
            self.compiled_decode_logits = torch.compile(self._decode_logits, fullgraph=True)

    def build_cpu_decode_model(self, weight_bits: int | None, *, compiled: bool) -> None:
        """Use a variant of the model in CPU decode steps: with C kernels, or for torch.compile with packed weights.

        Raise if `weight_bits` is 4 and there are no kernels."""
        from cutaway.generate.fast.cpu_decode_block import can_use_decode_blocks
        from cutaway.generate.fast.cpu_decode_model import build_cpu_decode_model, select_linear_class

        if weight_bits is None and self.model.adapters and not compiled:
            return  # rows may have different adapters
        model = self._without_adapters()
        if not compiled and weight_bits != 16 and can_use_decode_blocks(model, self.cache):
            self.decode_model = build_cpu_decode_model(model, weight_bits=weight_bits, use_kernels=True)
            return
        if weight_bits == 4:
            raise InputError(
                "weight_bits is 4, which needs a GPU, or on a CPU a C compiler (gcc or clang), a model in float32 and"
                " compile=None; otherwise use 8 or 16"
            )
        if compiled or weight_bits is not None:
            is_single_row = compiled and self.cache.batch_size == 1
            linear_class = select_linear_class(self.model, weight_bits, single_row_compiled=is_single_row)
            if linear_class is not None:
                self.decode_model = build_cpu_decode_model(model, linear_class)

    @property
    def can_mix_adapters(self) -> bool:
        """Whether rows with different adapters can be in one batch: not with fast decode steps or expert adapters."""
        is_fast = self.decode_model is not self.model or self.cuda_graphs is not None
        return not is_fast and self.compiled_decode_logits is None and not self.has_expert_adapters

    def _without_adapters(self) -> _GenerativeModel:
        """The model, or if it has adapters, a copy with `merged_adapter` merged into the weights."""
        if not self.model.adapters:
            return self.model
        if self.model.has_merged_adapter:
            return self.model.merge_and_unload()
        with self.model.use_adapter(self.merged_adapter):
            return self.model.merge_and_unload()

    def _merge_other_adapter(self, adapter: str | None) -> None:
        """Build the fast decode steps again, for another adapter. Do nothing if decode steps are not fast."""
        is_packed, is_compiled = self.decode_model is not self.model, self.compiled_decode_logits is not None
        if not (is_packed or is_compiled or self.cuda_graphs is not None):
            return
        is_cuda = self.model.device.type == "cuda"
        self.merged_adapter, self.decode_model = adapter, self.model
        self.release_compiled()
        if is_packed and not is_cuda:
            self.build_cpu_decode_model(self.weight_bits, compiled=is_compiled)
        if is_cuda or is_compiled:
            self.enable_fast_decode()

    def _enable_gpu_decode(self) -> None:
        from cutaway.generate.fast.gpu_decode_model import (  # imports Triton, which is not installed everywhere
            build_gpu_decode_model,
            can_build_gpu_decode_model,
            loops_over_experts,
        )

        can_capture = _can_capture_cuda_graph(self.model)
        if can_build_gpu_decode_model(self.model, self.cache):
            bits = None if self.weight_bits == 16 else self.weight_bits
            if bits is None and self.packed_prefill is not None:
                self.decode_model = self.packed_prefill.decode_model
            else:
                self.decode_model = build_gpu_decode_model(self._without_adapters(), bits)
            can_capture = can_capture or not loops_over_experts(self.decode_model)
        elif self.weight_bits is not None:
            raise InputError(
                f"weight_bits is {self.weight_bits}, which supports at most 64 sequences and not float64; lower"
                " max_num_seqs, or leave weight_bits out"
            )
        if can_capture:
            self.cuda_graphs = CUDAGraphRunner(self._forward_fixed_shape, self._sample_fixed_shape, self.active_rows)

    @torch.inference_mode(False)
    @torch.no_grad()
    def init_row(self, row: int, request: Request, eos_token_ids: Collection[int]) -> None:
        """Initialize a row of the cache and the sampler for a request, and encode the source of an encoder-decoder.

        The request may have sampled tokens before it was preempted: the sampler continues after them."""
        self.cache.assign_row(row, request.num_computed_tokens, request.page_ids)
        self.row_adapters[row] = request.adapter
        params, prefix = request.sampling_params, request.output_prefix  # the prefix counts as output
        prompt = request.input_ids[: len(request.input_ids) - len(prefix)]
        output = request.output.tokens
        self.sampler.set_row(row, params, prompt, request.seed, eos_token_ids=eos_token_ids, output_tokens=output)
        if request.source_tokens is not None:
            self.encode_source(row, request.source_tokens, request.input_ids)

    def clear_row(self, row: int) -> None:
        self.cache.clear_row(row)
        self.sampler.clear_row(row)

    def release_compiled(self) -> None:
        """Drop CUDA graphs and compiled functions. They hold a reference to this runner, and the cycle would keep the
        KV cache allocated until the garbage collector runs."""
        self.cuda_graphs = self.compiled_decode_logits = None
        if self.packed_prefill is not None:
            self.packed_prefill.graphs = None

    def _build_packed_prefill(self) -> "PackedPrefill | None":
        """Build the prefill without padding, if the Triton kernels implement the attention of this model."""
        if self.model.device.type != "cuda" or not isinstance(self.model, DecoderOnly) or self.model.adapters:
            return None
        from cutaway.generate.fast.gpu_decode_model import can_pack_prefill  # imports Triton
        from cutaway.generate.fast.packed_prefill import PackedPrefill

        return PackedPrefill(self.model, self.cache) if can_pack_prefill(self.model) else None

    @torch.no_grad()
    def prefill(self, first_row: int, chunks: Sequence[Sequence[int]], num_computed: Sequence[int]) -> Sequence[Tensor]:
        """Run one chunk of tokens per request and write its keys and values to cache rows first_row, first_row + 1, …

        `num_computed`: number of tokens already in each row. No logits are computed; the result is the input of the LM
        head for each chunk: (length, d).
        """
        if self.packed_prefill is not None:
            return self.packed_prefill(first_row, chunks, num_computed)
        longest = max(map(len, chunks))
        tokens = torch.tensor([[*chunk, *[0] * (longest - len(chunk))] for chunk in chunks])
        mask = None
        if any(len(chunk) < longest for chunk in chunks):
            mask = torch.tensor([[True] * len(chunk) + [False] * (longest - len(chunk)) for chunk in chunks])
            mask = mask.to(self.model.device)
        view = self.cache.view_rows(first_row, first_row + len(chunks), max_len=max(num_computed))
        x = self.forward_hidden(self.model, tokens.to(self.model.device), mask, view)
        return [row[: len(chunk)] for row, chunk in zip(x, chunks, strict=True)]

    @torch.no_grad()
    def add_prompt_logprobs(
        self,
        requests: Sequence[Request],
        x: Sequence[Tensor],
        chunks: Sequence[Sequence[int]],
        num_computed: Sequence[int],
    ) -> None:
        """Add the log-probabilities of the tokens that follow those of the prefilled chunks to the requests that ask
        for them. `x` is the result of `prefill`."""
        for i, (request, chunk, start) in enumerate(zip(requests, chunks, num_computed, strict=True)):
            known = request.output.prompt_logprobs
            if known is None:
                continue
            assert start < len(known), "tokens before this chunk have no log-probabilities"
            # A prompt that is prefilled again (LongRoPE) or with its last token (dynamic RoPE) has fewer targets.
            targets = request.input_ids[max(start + 1, len(known)) : start + 1 + len(chunk)]
            rows = x[i][len(known) - 1 - start :][: len(targets)]
            num_top = request.sampling_params.prompt_logprobs or 0
            known += compute_prompt_logprobs(
                self.compute_logits,
                rows,
                torch.tensor(targets, dtype=torch.int64, device=rows.device),
                num_top,
                self.model.config.vocab_size,
            )

    @torch.no_grad()
    def sample_after_prefill(
        self, x: Tensor, first_row: int, before_sampling: Callable[[], object] | None
    ) -> SamplerOutput:
        """Sample the token after a prompt for the rows first_row, … from the hidden states x of its last token: (n, d).

        `before_sampling`: see `decode`."""
        logits = self.compute_logits(x.unsqueeze(1))[:, 0]
        if before_sampling is not None:
            before_sampling()
        stop = first_row + len(x)
        output = self.sampler.sample(logits, self.sampler.features(stop, first_row), first_row=first_row)
        self.next_tokens[first_row:stop, 0] = output.tokens
        return output

    @torch.no_grad()
    def encode_source(self, row: int, source_tokens: Sequence[int], decoder_tokens: Sequence[int]) -> None:
        """Encode a row's source tokens and store the cross-attention keys and values in the cache.

        `decoder_tokens`: the decoder tokens before the first sampled token."""
        assert isinstance(self.model, EncoderDecoder)
        source_cache = self.model.new_cache(1, len(decoder_tokens))
        source, target = (torch.tensor([list(x)], device=self.model.device) for x in (source_tokens, decoder_tokens))
        workers = self.workers
        shared = nullcontext() if workers is None else workers.encode_source(row, source_tokens, decoder_tokens)
        with shared, shape_agnostic_sdpa(), self._use_row_adapters(self.model, row, row + 1):
            self.model.hidden_states(source, target, cache=source_cache)
        self.cache.store_cross_cache(row, source_cache)

    @torch.no_grad()
    def decode(
        self,
        num_rows: int,
        max_len: int,
        steps_left: int = 1,
        before_sampling: Callable[[], object] | None = None,
    ) -> SamplerOutput:
        """Decode one token for each of the first `num_rows` rows.

        `max_len`: upper bound of the rows' lengths. `steps_left`: upper bound of the number of remaining steps,
        from which the warm-up policy decides whether fast steps save time. `before_sampling` is called between the
        forward pass and sampling, which a GPU may still be executing.
        """
        if num_rows and not self.can_mix_adapters and self.row_adapters[0] != self.merged_adapter:
            self._merge_other_adapter(self.row_adapters[0])
        if self.warmup_policy is None:
            return self._decode_once(num_rows, max_len, before_sampling)
        start = time.perf_counter()
        try:
            if self.warmup_policy.should_warm_up(steps_left):
                self.enable_fast_decode()
            output = self._decode_once(num_rows, max_len, before_sampling)
        except (RuntimeError, ImportError, OSError) as error:  # compiler missing or failing; no token was emitted yet
            if _is_keyboard_interrupt(error):
                raise KeyboardInterrupt from error
            if not self.warmup_policy.warmed_up or self.warmup_policy.fast_times or self.weight_bits is not None:
                raise
            warnings.warn(f"fast decode steps are disabled because compiling them failed: {error}", stacklevel=2)
            self.warmup_policy, self.decode_model = None, self.model
            self.release_compiled()
            return self._decode_once(num_rows, max_len, before_sampling)
        output.tokens.cpu()  # wait for the device, so that the whole step is measured
        if self.warmup_policy.record_step(time.perf_counter() - start):
            self.warmup_policy = None
        return output

    def _decode_once(
        self, num_rows: int, max_len: int, before_sampling: Callable[[], object] | None = None
    ) -> SamplerOutput:
        features = self.sampler.features(num_rows)
        if self.cuda_graphs is not None:
            return self.cuda_graphs(num_rows, features, before_sampling)
        # max_len changes in every step. Passed as a Python int, it would recompile the step each time. Passed as the
        # size of a tensor, it is a dynamic dimension, except for the sizes 0 and 1, which torch.compile specializes.
        length_carrier = torch.empty(max(2, max_len + 1), dtype=torch.bool)
        if self.compiled_decode_logits is not None:  # torch._dynamo takes a second to import
            torch._dynamo.mark_dynamic(length_carrier, 0)
        logits = (self.compiled_decode_logits or self._decode_logits)(
            self.next_tokens[:num_rows], self.cache.view_rows(0, num_rows, max_len=max_len), length_carrier
        )
        if before_sampling is not None:
            before_sampling()
        output = self.sampler.sample(logits, features)
        self.next_tokens[:num_rows, 0] = output.tokens
        return output

    def _decode_logits(self, tokens: Tensor, cache_view: BatchKVCache, length_carrier: Tensor) -> Tensor:
        cache_view.max_len = length_carrier.shape[0] - 1
        return self.forward_logits(self.decode_model, tokens, None, cache_view)[:, -1]

    def _forward_fixed_shape(self, num_rows: int) -> Tensor:
        """Logits of each row's next token, for CUDA graphs: attention runs over all slots.

        Inactive rows are padding: their cache length, sampler state and next token do not change.
        """
        view = self.cache.view_rows(0, num_rows, max_len=0)
        view.static_shapes = True
        active = self.active_rows[:num_rows]
        return self.forward_logits(self.decode_model, self.next_tokens[:num_rows], active.unsqueeze(-1), view)[:, -1]

    def _sample_fixed_shape(self, logits: Tensor, features: SamplingFeatures) -> SamplerOutput:
        """Sample a token per active row, for CUDA graphs."""
        num_rows = len(logits)
        active = self.active_rows[:num_rows]
        output = self.sampler.sample(logits, features, active)
        self.next_tokens[:num_rows, 0] = torch.where(active, output.tokens, self.next_tokens[:num_rows, 0])
        return output

    def forward_logits(
        self, model: _GenerativeModel, tokens: Tensor, mask: Tensor | None, cache: BatchKVCache
    ) -> Tensor:
        with self._followed(tokens, mask, cache, logits=True):
            return model.lm_head(self._forward(model, tokens, mask, cache))

    def forward_hidden(
        self, model: _GenerativeModel, tokens: Tensor, mask: Tensor | None, cache: BatchKVCache
    ) -> Tensor:
        with self._followed(tokens, mask, cache, logits=False):
            return self._forward(model, tokens, mask, cache)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Logits of hidden states, on all processes of the model."""
        with nullcontext() if self.workers is None else self.workers.compute_logits(x):
            return self.model.lm_head(x)

    def _followed(
        self, tokens: Tensor, mask: Tensor | None, cache: BatchKVCache, *, logits: bool
    ) -> AbstractContextManager[None]:
        """Context of a forward pass that the workers repeat, if there are any."""
        return nullcontext() if self.workers is None else self.workers.forward(cache, tokens, mask, logits=logits)

    def _forward(self, model: _GenerativeModel, tokens: Tensor, mask: Tensor | None, cache: BatchKVCache) -> Tensor:
        rows = self._use_row_adapters(model, cache.first_row, cache.first_row + cache.batch_size)
        with shape_agnostic_sdpa() if tokens.is_cuda else nullcontext(), rows:
            if isinstance(model, EncoderDecoder):
                return model.hidden_states(None, tokens, None, mask, cache=cache)
            return model.hidden_states(tokens, mask, cache=cache)

    def _use_row_adapters(self, model: _GenerativeModel, start: int, stop: int) -> AbstractContextManager[None]:
        """Context in which a forward pass over rows start … stop − 1 applies the adapters of these rows."""
        if not model.adapters or self.is_merged:
            return nullcontext()
        return use_row_adapters(self.row_adapters[start:stop], model.device)

    def swap_rows(self, a: int, b: int) -> None:
        """Exchange two rows of the cache, the sampler and the input tokens."""
        if a != b:
            self.cache.swap_rows(a, b)
            self.sampler.swap_rows(a, b)
            swap_tensor_rows(self.next_tokens, a, b)
            self.row_adapters[a], self.row_adapters[b] = self.row_adapters[b], self.row_adapters[a]


def _is_keyboard_interrupt(error: BaseException | None) -> bool:
    """Whether a KeyboardInterrupt caused `error`: torch.compile wraps the interrupt in its own exception."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _has_hooks(model: Transformer) -> bool:
    """Whether any module of the model has forward hooks, which fast decode steps would skip."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in iter_modules(model))


def _can_capture_cuda_graph(model: Transformer) -> bool:
    """Whether a decode step can be captured in a CUDA graph: it must not synchronize with the host.

    Except in bf16, mixture-of-experts layers loop over token counts that are read on the host."""
    has_experts = any(isinstance(module, MixtureOfExperts) for module in model.modules())
    return not has_experts or model.dtype == torch.bfloat16


class PendingTokens:
    """Sampled tokens being copied asynchronously to the host.

    The constructor only enqueues the copies; `results` waits for them.
    """

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
        """Wait for the copies; yield (request, token, invalid, log-probability, top log-probabilities).

        `invalid`: whether the logits of the token are invalid (see `SamplerOutput`)."""
        if self.copy_event is not None:
            self.copy_event.synchronize()
        columns = [repeat(None, len(self.requests)) if part is None else part.tolist() for part in self.host_output]
        for request, token, invalid, logprob, tokens, logprobs in zip(self.requests, *columns, strict=True):
            count = request.sampling_params.logprobs
            top_logprobs = dict(zip(tokens[:count], logprobs[:count], strict=True)) if count else None
            yield request, token, invalid, logprob, top_logprobs


def _copy_to_pinned(tensor: Tensor) -> Tensor:
    """Return a copy in pinned host memory. It is asynchronous: complete when the CUDA stream has executed it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
