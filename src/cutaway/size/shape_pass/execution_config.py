"""How a pass is computed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExecutionConfig:
    """How a pass is computed. Widths are bytes of a number."""

    weight_itemsize: int = 4
    compute_itemsize: int = 4
    """Products take and give this; without `autocast` it is the weights' width."""
    autocast: bool = False
    grad: bool = True
    kernel: str = "auto"
    activation_checkpointing: str = "none"
    device: str = "cuda"
    mask_batch_size: int = 0
    """Sequences whose tokens see each other differently, as several documents do in one; 0 where all are alike."""
    grad_itemsize: int = 0
    """Bytes of a gradient's number that is kept, if they are not the weight's."""
    dp_replicate: int = 1
    dp_shard: int = 1
    """Devices that have weights, gradients and states in shares, and gather weights to use them;"""
    tp: int = 1
    """and those that have heads, hidden units and vocabulary in shares, and add up what they come to."""

    resid_in_compute_dtype: bool = False
    """Whether autocast's products meet a stream that is as narrow as they are."""

    @property
    def resid_itemsize(self) -> int:
        return self.compute_itemsize if self.resid_in_compute_dtype else self.weight_itemsize

    @property
    def uses_fsdp(self) -> bool:
        """Whether weights come and go. Copies of shares of matrices do it too: one way to train for all products."""
        return self.dp_shard > 1 or (self.dp_replicate > 1 and self.tp > 1)
