"""Peak memory of one device: inference (prefill) and training."""

from dataclasses import dataclass

from cutaway.config.transformer import Config
from cutaway.errors import InputError
from cutaway.size.adapters import frozen_bytes, fused_column_bytes, list_adapter_tensors
from cutaway.size.kv_cache import KVCacheSize
from cutaway.size.optimizer_state import optimizer_state_bytes
from cutaway.size.options import SizeOptions
from cutaway.size.precision import Precision
from cutaway.size.shape_pass import PassCost
from cutaway.size.state_dict_shapes import checkpoint_size, list_tensors

_CUBLAS_WORKSPACE_BYTES = 64 << 20
"""Workspace that PyTorch allocates for cuBLAS and cuBLASLt on Hopper; it is smaller on older GPUs."""
_PREFILL_CHUNK_TOKENS = 8192
"""Maximum number of tokens per prefill chunk; longer prompts are prefilled in chunks."""


@dataclass(frozen=True)
class MemoryBreakdown:
    """Peak memory of one device, in bytes by component.

    `peak_by_component` holds what is allocated at the peak; its sum is `total_bytes`. `bytes_by_component` holds the
    size of each component on its own."""

    peak_by_component: dict[str, int]
    bytes_by_component: dict[str, int]
    peak_phase: str
    """Phase in which the peak occurs."""

    @property
    def total_bytes(self) -> int:
        return sum(self.peak_by_component.values())


def inference_memory(
    config: Config, precision: Precision, kv_cache: KVCacheSize, prefill_pass: PassCost, *, on_gpu: bool
) -> MemoryBreakdown:
    """Peak memory of inference on one device: weights, KV cache, and the activations and logits of the prefill pass.

    `config`: configuration of one tensor-parallel rank."""
    logits_bytes, peak_bytes = prefill_pass.logits_bytes, prefill_pass.peak_bytes
    resident = {"weights": checkpoint_size(config, precision).total_bytes, "kv cache": kv_cache.total_bytes}
    sizes = resident | {
        "kv cache unwindowed": kv_cache.unwindowed_bytes,
        "kv cache per token": kv_cache.bytes_per_token,
        "activations": peak_bytes,
        "logits": logits_bytes,
    }
    if kv_cache.expanded_bytes != kv_cache.unwindowed_bytes:
        sizes["kv cache expanded"] = kv_cache.expanded_bytes
    transient = {"activations": peak_bytes - logits_bytes, "logits": logits_bytes}
    return MemoryBreakdown(_peak(resident | transient, on_gpu=on_gpu), sizes, "prefill")


def training_memory(options: SizeOptions, config: Config, train_pass: PassCost, *, on_gpu: bool) -> MemoryBreakdown:
    """Peak memory of a training step on one device: weights, optimizer state, activations and gradients.

    `config`: configuration of one tensor-parallel rank. Raises an error if the dtype is for inference only.
    """
    precision, parallel_dims = options.precision, options.parallel_dims
    if not precision.can_train:
        raise InputError(f"dtype {precision.name} is for inference only; train in fp32, bf16, fp16, mixed or float8")
    base = options.frozen_base
    if base is None:
        tensors = [tensor.shard(parallel_dims.dp_shard) for tensor in list_tensors(config)]
        weights = {"weights": sum(tensor.nbytes(precision) for tensor in tensors)}
        state_bytes = optimizer_state_bytes(options.optimizer, tensors, precision.unquantized_bytes)
    else:
        adapters = list_adapter_tensors(config, base)
        columns = fused_column_bytes(config, base, precision) if options.compiled else 0
        weights = {
            "frozen weights": frozen_bytes(config, base, precision) + columns,
            "adapters": sum(base.adapter_itemsize * tensor.numel for tensor in adapters),
        }
        state_bytes = optimizer_state_bytes(options.optimizer, adapters, base.adapter_itemsize)
    grad_bytes = train_pass.grad_bytes
    transient = dict(train_pass.peak_by_component)
    phase = "start of backward" if transient.get("gradients", 0) < grad_bytes // 2 else "end of backward"
    if grad_bytes + train_pass.bytes_at_optimizer_step > train_pass.peak_bytes:
        transient = {"gradients": grad_bytes, "logits": train_pass.bytes_at_optimizer_step}
        phase = "optimizer step"
    if parallel_dims.dp_replicate > 1 and parallel_dims.dp_shard == parallel_dims.tp == 1:
        # DDP: gradients are views of the all-reduce buckets, allocated for the whole step
        transient["gradients"] = grad_bytes
    peak = {**weights, "optimizer": state_bytes, **transient}
    sizes = {
        **weights,
        "gradients": grad_bytes,
        "optimizer": state_bytes,
        "activations": train_pass.saved_bytes,
        "logits": train_pass.logits_bytes,
    }
    return MemoryBreakdown(_peak(peak, on_gpu=on_gpu), sizes, phase)


def _peak(components: dict[str, int], *, on_gpu: bool) -> dict[str, int]:
    """Return the components of more than 0 bytes, plus the cuBLAS workspace if the device is a GPU."""
    workspace = {"workspace": _CUBLAS_WORKSPACE_BYTES} if on_gpu else {}
    return {name: nbytes for name, nbytes in (components | workspace).items() if nbytes}


def prefill_chunks(
    batch_size: int, context: int, source_len: int, *, unchunked: bool
) -> list[tuple[int, int, int, int]]:
    """List candidate prefill chunks: (sequences, and per sequence new tokens, cached tokens and source tokens).

    The peak memory is the maximum over these candidates: many short sequences can need more memory than a few long
    ones. An encoder is not chunked.
    """
    max_len = max(context, source_len)
    rows = min(batch_size, max(1, _PREFILL_CHUNK_TOKENS // max_len))
    length = context if unchunked else min(context, _PREFILL_CHUNK_TOKENS)
    chunks = [(rows, length, context - length, source_len)]
    if length < context:
        chunks.append((rows, length, 0, source_len))  # the first chunk, which also runs the encoder
    for more_rows in {rows + 1, 1 << rows.bit_length()}:
        if more_rows <= min(batch_size, _PREFILL_CHUNK_TOKENS):
            shorter = _PREFILL_CHUNK_TOKENS // more_rows
            chunks.append((more_rows, min(context, shorter), 0, min(source_len, shorter)))
    return chunks
