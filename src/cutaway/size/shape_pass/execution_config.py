"""Input sizes of a shape pass (`PassShape`), and how it is executed: dtypes, kernel, checkpointing, parallelism."""

from dataclasses import dataclass

from cutaway.size.shape_pass.adapters import FrozenBase


@dataclass(frozen=True)
class PassShape:
    """Number of sequences and tokens of a pass."""

    batch_size: int
    seq_len: int
    source_len: int
    num_cached_tokens: int = 0
    serving: bool = False
    """Whether keys and values are written to a KV cache and only the logits of the last token are computed."""
    source_cached: bool = False
    """Whether the keys and values of cross-attention are cached too."""

    @property
    def use_cache(self) -> bool:
        """Whether keys and values are read from the KV cache, whose memory is counted elsewhere."""
        return self.serving or self.num_cached_tokens > 0


@dataclass(frozen=True)
class ExecutionConfig:
    """Dtypes, attention kernel, activation checkpointing, device and parallelism of a shape pass.

    Item sizes are bytes per element."""

    weight_itemsize: int = 4
    compute_itemsize: int = 4
    """Item size of matmul inputs and outputs; equal to `weight_itemsize` without autocast."""
    autocast: bool = False
    grad: bool = True
    kernel: str = "auto"
    activation_checkpointing: str = "none"
    activation_checkpointing_layers: int | None = None
    """Number of layers of each stack, from the first, with activation checkpointing; None for all."""
    device: str = "cuda"
    mask_batch_size: int = 0
    """Batch size of the mask if each sequence has its own (packed documents); 0 if all sequences share one mask."""
    grad_itemsize: int = 0
    """Item size of stored gradients; 0 for the item size of the weights."""
    dp_replicate: int = 1
    dp_shard: int = 1
    """FSDP group size."""
    tp: int = 1
    """Tensor-parallel group size."""
    resid_in_compute_dtype: bool = False
    """Whether, under autocast, the residual stream is in the compute dtype too."""
    compiled: bool = False
    """Whether blocks are compiled (torch.compile): norms, activations and RoPE are one operation each, without
    intermediate values in fp32."""
    float8: bool = False
    """Whether the linear layers of blocks compute in fp8 in training passes."""
    base: FrozenBase | None = None
    """The frozen weights and their adapters; None if all weights are trained."""

    @property
    def recomputes_pointwise(self) -> bool:
        """Whether the backward pass of compiled blocks recomputes norms and act(gate)·up, which fused adapters need."""
        return self.compiled and self.base is not None and self.base.is_fusible

    def is_checkpointed(self, layer: int) -> bool:
        """Whether activation checkpointing applies to a layer, in a mode other than 'none'."""
        return self.activation_checkpointing_layers is None or layer < self.activation_checkpointing_layers

    @property
    def resid_itemsize(self) -> int:
        return self.compute_itemsize if self.resid_in_compute_dtype else self.weight_itemsize

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP is used. Data-parallel replicas of tensor-parallel groups use FSDP too."""
        return self.dp_shard > 1 or (self.dp_replicate > 1 and self.tp > 1)
