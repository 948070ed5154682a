"""Shape passes over a whole model: inference (prefill, decode) and training."""

from dataclasses import dataclass, replace

from cutaway.config.head import ClassificationHead, LMHead
from cutaway.config.transformer import Config
from cutaway.size.shape_pass.cost_counter import CostCounter
from cutaway.size.shape_pass.execution_config import ExecutionConfig, PassShape
from cutaway.size.shape_pass.fsdp import ROOT_GROUP, FSDPState
from cutaway.size.shape_pass.loss import chunked_cross_entropy, cross_entropy
from cutaway.size.shape_pass.model import compute_hidden, compute_logits
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import Weight


@dataclass(frozen=True)
class PassCost:
    """FLOPs and memory of a pass. Memory excludes weights, optimizer state and KV cache."""

    counter: CostCounter
    logits_bytes: int
    peak_bytes: int
    """Maximum number of bytes that are allocated at the same time."""
    peak_by_component: dict[str, int]
    num_ops: int
    """Number of operations that eager PyTorch launches."""
    saved_bytes: int = 0
    """Number of bytes saved for backward at the end of the forward pass."""
    grad_bytes: int = 0
    """Number of bytes of all weight gradients."""
    weights: tuple[Weight, ...] = ()
    bytes_at_optimizer_step: int = 0
    """Number of bytes that are still allocated at the optimizer step, apart from gradients."""


def inference_pass(
    config: Config,
    batch_size: int,
    seq_len: int,
    execution: ExecutionConfig,
    *,
    source_len: int | None = None,
    num_cached_tokens: int = 0,
    serving: bool = False,
    source_cached: bool | None = None,
) -> PassCost:
    """Run the forward pass on shapes, over `seq_len` tokens per sequence and without gradients; return its cost.

    `num_cached_tokens` tokens per sequence are already in the KV cache. The encoder of an encoder-decoder runs too,
    unless `source_cached` is True; the default is True if any tokens are cached. With `serving`, keys and values are
    written to a KV cache, whose memory is counted elsewhere, and only the logits of each sequence's last token are
    computed.
    """
    tape = Tape(replace(execution, grad=False))
    has_cached_source = num_cached_tokens > 0 if source_cached is None else source_cached
    source_len = source_len or num_cached_tokens + seq_len
    shape = PassShape(batch_size, seq_len, source_len, num_cached_tokens, serving, has_cached_source)
    x = compute_hidden(tape, config, shape)
    logits = compute_logits(tape, x, config)
    tracker, weights = tape.memory_tracker, tuple(tape.weights.values())
    return PassCost(
        tape.counter, logits.nbytes, tracker.peak_bytes, tracker.peak_by_component, tape.num_ops, weights=weights
    )


def training_pass(
    config: Config,
    batch_size: int,
    seq_len: int,
    execution: ExecutionConfig,
    *,
    source_len: int | None = None,
    loss: str = "full",
    packed: bool = False,
) -> PassCost:
    """Run the forward pass, cross-entropy and backward pass on shapes; return their cost.

    With `packed`, sequences hold several documents. With the 'full' loss, all logits stay allocated until the end of
    the step, because callers usually hold a reference to them. 'chunked' is the loss of `cutaway train`.
    """
    tape = Tape(replace(execution, grad=True, mask_batch_size=batch_size if packed else 0))
    fsdp = None
    if tape.execution.uses_fsdp:
        weights = inference_pass(config, 1, 1, ExecutionConfig(kernel="explicit")).weights
        shared_stacks = [name for name, stack in config.stacks.items() if stack.layer_groups is not None]
        fsdp = FSDPState(tape.memory_tracker, tape.counter, tape.execution, weights, shared_stacks)
        tape.fsdp = fsdp
        fsdp.pre_forward(ROOT_GROUP)
        tape.register_backward_hook(lambda: fsdp.post_backward(ROOT_GROUP))
    x = compute_hidden(tape, config, PassShape(batch_size, seq_len, source_len or seq_len))
    if loss == "chunked" and isinstance(config.head, LMHead):
        loss_value, logits_bytes = chunked_cross_entropy(tape, x, config)
        logits = None
        del x
    else:
        logits = compute_logits(tape, x, config)
        del x
        logits_bytes = logits.nbytes
        tape.component = "loss"
        has_classes = isinstance(config.head, LMHead | ClassificationHead)
        loss_value = cross_entropy(tape, logits) if has_classes else logits
    saved_bytes = _count_saved_bytes(tape)
    tape.autocast_copies.clear()
    if fsdp is not None:
        fsdp.post_forward(ROOT_GROUP)
        tape.register_backward_hook(lambda: fsdp.pre_backward(ROOT_GROUP))
    tape.backward(loss_value)
    grads = tape.weight_grads.values()
    return PassCost(
        tape.counter,
        logits_bytes,
        tape.memory_tracker.peak_bytes,
        tape.memory_tracker.peak_by_component,
        tape.num_ops,
        saved_bytes,
        grad_bytes=sum(grad.nbytes for grad in grads) if fsdp is None else fsdp.finalize_backward(),
        weights=tuple(tape.weights.values()),
        bytes_at_optimizer_step=0 if logits is None else logits_bytes,
    )


def _count_saved_bytes(tape: Tape) -> int:
    """Number of bytes that the forward pass has saved for backward. Each storage counts once."""
    saved = {storage for node in tape.nodes for storage in node.saved_storages}
    for node in tape.nodes:
        if node.checkpoint_frame is not None:
            saved.update(node.checkpoint_frame.saved_outputs)
    return sum(storage.nbytes for storage in saved if storage is not None)
