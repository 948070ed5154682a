"""Bytes on one device: what is held at the fullest moment of serving, and of a step of training."""

from dataclasses import dataclass

from cutaway.config.transformer import Config
from cutaway.errors import InputError
from cutaway.size.kv_cache import KVCacheSize
from cutaway.size.optimizer_state import optimizer_state_bytes
from cutaway.size.parallel import ParallelDims
from cutaway.size.precision import Precision
from cutaway.size.shape_pass import PassCost
from cutaway.size.state_dict import checkpoint_size, list_tensors

CUBLAS_WORKSPACE_BYTES = 64 << 20
"""What PyTorch's matrix library takes on a GPU for itself (cuBLAS and cuBLASLt on Hopper; less on older ones)."""
PREFILL_CHUNK_TOKENS = 8192
"""Tokens that are read at once when serving; longer prompts are read in pieces."""


@dataclass(frozen=True)
class MemoryBreakdown:
    """`peak_by_component` are alive together at the peak and add up to the total; `bytes_by_component` are sizes by
    themselves."""

    peak_by_component: dict[str, int]
    bytes_by_component: dict[str, int]
    peak_phase: str
    """When that is."""

    @property
    def total_bytes(self) -> int:
        return sum(self.peak_by_component.values())


def inference_memory(
    config: Config, precision: Precision, kv_cache: KVCacheSize, prefill_pass: PassCost, *, on_gpu: bool
) -> MemoryBreakdown:
    """Weights, cache and what reading a piece of a prompt needs beside them. `config` is one device's share."""
    weights = checkpoint_size(config, precision).total_bytes
    parts = {"weights": weights, "kv cache": kv_cache.total_bytes}
    parts |= {"activations": prefill_pass.peak_bytes - prefill_pass.logits_bytes, "logits": prefill_pass.logits_bytes}
    parts |= {"workspace": CUBLAS_WORKSPACE_BYTES} if on_gpu else {}
    whole = {
        "weights": weights,
        "kv cache": kv_cache.total_bytes,
        "kv cache unwindowed": kv_cache.unwindowed_bytes,
        "kv cache per token": kv_cache.bytes_per_token,
        "activations": prefill_pass.peak_bytes,
        "logits": prefill_pass.logits_bytes,
    }
    if kv_cache.expanded_bytes != kv_cache.unwindowed_bytes:
        whole["kv cache expanded"] = kv_cache.expanded_bytes
    return MemoryBreakdown({name: size for name, size in parts.items() if size}, whole, "prefill")


def training_memory(
    config: Config,
    precision: Precision,
    optimizer: str,
    train_pass: PassCost,
    *,
    on_gpu: bool,
    parallel_dims: ParallelDims | None = None,
) -> MemoryBreakdown:
    """Weights and states stay; activations and gradients come and go. `config` is one device's share."""
    if not precision.can_train:
        raise InputError(f"dtype {precision.name} is for serving; train in fp32, bf16, fp16 or mixed")
    parallel_dims = parallel_dims or ParallelDims()
    held = [each.shard(parallel_dims.dp_shard) for each in list_tensors(config)]
    weights = sum(each.nbytes(precision) for each in held)
    state = optimizer_state_bytes(optimizer, held, precision.unquantized_bytes)
    gradients = train_pass.grad_bytes
    moments = dict(train_pass.peak_by_component)
    fullest = "start of backward" if moments.get("gradients", 0) < gradients // 2 else "end of backward"
    if gradients + train_pass.bytes_at_optimizer_step > train_pass.peak_bytes:
        moments, fullest = (
            {"gradients": gradients, "logits": train_pass.bytes_at_optimizer_step},
            "optimizer step",
        )
    if parallel_dims.dp_replicate > 1 and parallel_dims.dp_shard == parallel_dims.tp == 1:
        moments["gradients"] = gradients  # they live in the buckets that are sent
    parts = {"weights": weights, "optimizer": state, **moments}
    parts |= {"workspace": CUBLAS_WORKSPACE_BYTES} if on_gpu else {}
    whole = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": state,
        "activations": train_pass.saved_bytes,
        "logits": train_pass.logits_bytes,
    }
    return MemoryBreakdown({name: size for name, size in parts.items() if size}, whole, fullest)


def prefill_chunks(
    batch_size: int, context: int, source_len: int, *, unchunked: bool
) -> list[tuple[int, int, int, int]]:
    """Ways in which prompts are read: (sequences, tokens of each, tokens before, tokens of a source) at once.

    An encoder reads a text whole. The fullest way counts: many short sequences may need more than a few long ones.
    """
    longest = max(context, source_len)
    rows = min(batch_size, max(1, PREFILL_CHUNK_TOKENS // longest))
    length = context if unchunked else min(context, PREFILL_CHUNK_TOKENS)
    ways = [(rows, length, context - length, source_len)]
    if length < context:
        ways.append((rows, length, 0, source_len))  # the first piece, before which a source is read
    for several in {rows + 1, 1 << rows.bit_length()}:
        if several <= min(batch_size, PREFILL_CHUNK_TOKENS):
            shorter = PREFILL_CHUNK_TOKENS // several
            ways.append((several, min(context, shorter), 0, min(source_len, shorter)))
    return ways
