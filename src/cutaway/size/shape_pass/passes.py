"""Whole passes on sizes: reading, a step of decoding, a step of training."""

from dataclasses import dataclass, field, replace

from cutaway.config.head import LMHead
from cutaway.config.transformer import Config
from cutaway.size.shape_pass.cost_counter import CostCounter
from cutaway.size.shape_pass.execution_config import ExecutionConfig
from cutaway.size.shape_pass.fsdp import ROOT_GROUP, FSDPState
from cutaway.size.shape_pass.loss import chunked_cross_entropy, cross_entropy
from cutaway.size.shape_pass.model import compute_hidden, compute_logits
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import Weight


@dataclass(frozen=True)
class PassCost:
    """What a pass multiplied, kept and held. Memory is counted beside the weights, optimizer state and caches."""

    counter: CostCounter
    logits_bytes: int
    """Bytes."""
    peak_bytes: int
    """Bytes alive at once, at most."""
    peak_by_component: dict[str, int]
    """The same by part."""
    num_ops: int
    """Operations, each of which eager PyTorch launches by itself."""
    saved_by_component: dict[str, int] = field(default_factory=dict)
    """Bytes that wait for the way back at the end of the forward pass, by part."""
    grad_bytes: int = 0
    """Bytes of the weights' gradients, all of them."""
    weights: tuple[Weight, ...] = ()
    bytes_at_optimizer_step: int = 0
    """Bytes that are still held when the optimizer takes its step."""

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved_by_component.values())


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
    """Logits of `seq_len` tokens a sequence, `num_cached_tokens` others being in a cache; there is no way back.

    A source is read too, unless it was (as it was if anything is in the cache). When serving, keys and values go into
    a cache, whose memory is counted elsewhere, and only the last logits of each sequence are wanted.
    """
    tape = Tape(replace(execution, grad=False))
    known = num_cached_tokens > 0 if source_cached is None else source_cached
    x = compute_hidden(
        tape,
        config,
        batch_size,
        seq_len,
        source_len or num_cached_tokens + seq_len,
        num_cached_tokens=num_cached_tokens,
        serving=serving,
        source_cached=known,
    )
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
    """Forward, cross-entropy of every token, and back. With `packed` a sequence holds several documents.

    With the 'full' loss the caller holds all logits to the end, as most do; 'chunked' is as `cutaway train` does it.
    """
    tape = Tape(replace(execution, grad=True, mask_batch_size=batch_size if packed else 0))
    fsdp = tape.fsdp = _build_fsdp_state(tape, config)
    if fsdp is not None:
        fsdp.pre_forward(ROOT_GROUP)
        tape.register_backward_hook(lambda: fsdp.post_backward(ROOT_GROUP))
    x = compute_hidden(tape, config, batch_size, seq_len, source_len or seq_len)
    if loss == "chunked" and isinstance(config.head, LMHead):
        value, size = chunked_cross_entropy(tape, x, config)
        held = None
        del x
    else:
        held = compute_logits(tape, x, config)
        del x
        size = held.nbytes
        tape.component = "loss"
        value = cross_entropy(tape, held) if isinstance(config.head, LMHead) else held
    saved = _saved_by_component(tape)
    tape.autocast_copies.clear()
    if fsdp is not None:
        fsdp.post_forward(ROOT_GROUP)
        tape.register_backward_hook(lambda: fsdp.pre_backward(ROOT_GROUP))
    tape.backward(value)
    gradients = (
        sum(storage.nbytes for storage in tape.weight_grads.values()) if fsdp is None else fsdp.finalize_backward()
    )
    tracker, weights = tape.memory_tracker, tuple(tape.weights.values())
    after = 0 if held is None else size
    return PassCost(
        tape.counter,
        size,
        tracker.peak_bytes,
        tracker.peak_by_component,
        tape.num_ops,
        saved,
        gradients,
        weights,
        after,
    )


def _build_fsdp_state(tape: Tape, config: Config) -> FSDPState | None:
    """How weights come and go where several devices have shares of them."""
    execution = tape.execution
    if not execution.uses_fsdp:
        return None
    return FSDPState(
        tape.memory_tracker,
        tape.counter,
        inference_pass(config, 1, 1, ExecutionConfig()).weights,
        dp_shard=execution.dp_shard,
        dp_replicate=execution.dp_replicate,
        gather_itemsize=execution.weight_itemsize,
        grad_itemsize=execution.grad_itemsize or execution.weight_itemsize,
        shared_stacks=[name for name, stack in config.stacks.items() if stack.layer_groups is not None],
    )


def _saved_by_component(tape: Tape) -> dict[str, int]:
    """What the way back will need, each storage once, by the part that made it."""
    saved: dict[str, int] = {}
    storages = (
        storage
        for node in tape.nodes
        for storage in (*node.saved_storages, *(node.checkpoint_frame.saved_outputs if node.checkpoint_frame else ()))
    )
    for storage in {id(each): each for each in storages if each is not None}.values():
        saved[storage.component] = saved.get(storage.component, 0) + storage.nbytes
    return saved
