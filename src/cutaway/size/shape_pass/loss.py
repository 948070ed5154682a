"""Cross-entropy of a shape pass: over all logits, or in chunks as in `train/loss/`."""

from dataclasses import replace
from math import ceil

from cutaway.config.head import LMHead
from cutaway.config.transformer import Config
from cutaway.size.shape_pass.cost_counter import MemoryTracker
from cutaway.size.shape_pass.heads import run_head
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import GradNode, ShapeTensor, Storage

CHUNK_TOKENS = 1024
"""Number of targets per chunk of the chunked cross-entropy."""
MAX_CHUNK_LOGITS = {"cpu": 2**26, "cuda": 2**30}
MAX_CHUNK_LOGITS_FROZEN = 2**26
MIN_CPU_LOGITS = 2**22
VOCAB_TILE = 128
"""These four are described in `train/loss/linear_cross_entropy.py`, which computes the loss of most models."""


def cross_entropy(tape: Tape, logits: ShapeTensor) -> ShapeTensor:
    """Record the cross-entropy of the logits, −log softmax at the target; return the loss.

    On the GPU, autocast computes log softmax in the logits' dtype and casts the result to fp32. On the CPU, autocast
    casts the logits to fp32 first."""
    execution = tape.execution
    upcast = tape.cast(logits, 4) if execution.autocast and execution.device == "cpu" else logits
    log_probs = tape.record_op([upcast], save_output=True)
    del upcast
    if execution.autocast:
        log_probs = tape.cast(log_probs, 4)
    targets = tape.empty((logits.numel // logits.shape[-1],), 8)
    return tape.record_op([log_probs], shape=(1,), saved=[log_probs, targets], extra_saved_bytes=log_probs.itemsize)


def chunked_cross_entropy(tape: Tape, x: ShapeTensor, config: Config) -> tuple[ShapeTensor, int]:
    """Record the cross-entropy in chunks of targets; return the loss and the bytes of the largest chunk's logits.

    Gradients are computed in the forward pass, chunk by chunk."""
    targets, width = x.numel // x.shape[-1], x.shape[-1]
    tape.component = "loss"
    grad_input = tape.empty(x.shape, x.itemsize)
    head_tape = Tape(tape.execution)
    run_head(head_tape, head_tape.empty((1, width), x.itemsize), config)
    itemsize = max(4, tape.execution.weight_itemsize)
    head_weights = [weight for weight in head_tape.weights.values() if tape.is_trained(weight)]
    grad_sums = [tape.empty(weight.shape, itemsize) for weight in head_weights]
    if _is_linear(tape, config, targets):
        chunk_logits_bytes = [_run_linear(tape, targets, x, config, is_trained=bool(head_weights))]
    else:
        tracker = tape.memory_tracker
        chunk_logits_bytes = [
            _run_chunk(tape, rows, times, x, config, tracker) for rows, times in _chunk_sizes(targets)
        ]
    tape.weights |= head_tape.weights
    weights = [replace(weight, in_matmul=False, has_fp32_grad=True) for weight in head_weights]
    loss = tape.record_op([x], shape=(1,), itemsize=4, saved=[grad_input, *grad_sums], weights=weights)
    return loss, max(chunk_logits_bytes)


def _is_linear(tape: Tape, config: Config, num_targets: int) -> bool:
    """Whether `train/loss/linear_cross_entropy.py` computes the loss, for a head that is one matrix."""
    head, execution = config.head, tape.execution
    assert isinstance(head, LMHead)
    is_matrix = head.transform is None and head.bias == "none" and head.softcap is None and head.scale == 1.0
    if not is_matrix or execution.tp > 1:
        return False
    if execution.device == "cpu":
        is_fp32 = execution.compute_itemsize == execution.weight_itemsize == 4
        return is_fp32 and num_targets * config.vocab_size >= MIN_CPU_LOGITS
    return execution.compute_itemsize == 2


def _run_linear(tape: Tape, num_targets: int, x: ShapeTensor, config: Config, *, is_trained: bool) -> int:
    """Run the head's forward and backward pass with explicit gradients; return the number of bytes of the logits.

    The chunks use the same buffers. On a GPU, the gradient of the logits takes the place of the logits."""
    on_cpu, itemsize = tape.execution.device == "cpu", tape.execution.compute_itemsize
    tile = 1 if on_cpu else VOCAB_TILE
    columns = ceil(config.vocab_size / tile) * tile
    max_logits = MAX_CHUNK_LOGITS[tape.execution.device] if is_trained else MAX_CHUNK_LOGITS_FROZEN
    num_chunks = ceil(num_targets / max(VOCAB_TILE, max_logits // columns))
    num_rows = min(num_targets, ceil(ceil(num_targets / num_chunks) / VOCAB_TILE) * VOCAB_TILE)
    logits_bytes = num_rows * columns * itemsize
    nbytes = 2 * logits_bytes if on_cpu else logits_bytes
    if not on_cpu and (columns != config.vocab_size or tape.execution.weight_itemsize != itemsize):
        nbytes += columns * x.shape[-1] * itemsize  # copy of the weights
    buffers = Storage(tape.memory_tracker, nbytes, "logits")
    _run_chunk(tape, num_targets, 1, x, config, MemoryTracker())
    del buffers
    return logits_bytes


def _chunk_sizes(num_targets: int) -> list[tuple[int, int]]:
    """List the sizes of the chunks: (targets per chunk, number of chunks of this size)."""
    chunks = (CHUNK_TOKENS, num_targets // CHUNK_TOKENS), (num_targets % CHUNK_TOKENS, 1)
    return [(size, count) for size, count in chunks if size and count]


def _run_chunk(tape: Tape, num_rows: int, repeats: int, x: ShapeTensor, config: Config, tracker: MemoryTracker) -> int:
    """Run the head's forward and backward pass for one chunk; return the number of bytes of its logits.

    FLOPs, collectives and operations are counted `repeats` times, once for each chunk of this size."""
    chunk_tape = Tape(tape.execution)
    chunk_tape.memory_tracker = tracker
    if tracker is tape.memory_tracker:
        chunk_tape.autocast_copies = tape.autocast_copies
    chunk_tape.component = "logits"
    node = GradNode(num_rows * x.shape[-1] * x.itemsize, [])
    chunk = ShapeTensor((num_rows, x.shape[-1]), x.itemsize, Storage(tracker, 0), node)
    logits = run_head(chunk_tape, chunk, config)
    logits_bytes = logits.nbytes
    vocab_parallel = tape.execution.tp > 1
    upcast = Storage(tracker, logits.numel * 4, "logits") if vocab_parallel or logits.itemsize < 4 else None
    log_probs = Storage(tracker, logits.numel * max(4, logits.itemsize), "logits")
    del upcast
    grad = Storage(tracker, logits_bytes, "logits") if logits.itemsize < 4 else log_probs
    chunk_tape.backward(logits, grad)
    for name in ("full_flops", "visible_flops"):
        for phase, flops in getattr(chunk_tape.counter, name).items():
            getattr(tape.counter, name)[phase] += repeats * flops
    if vocab_parallel:  # all-reduces of the max logit, the sum of exponentials and the target logit
        for _ in range(3):
            chunk_tape.counter.add_collective("all-reduce", num_rows * 4)
    for kind, count in chunk_tape.counter.num_collectives.items():
        tape.counter.num_collectives[kind] += repeats * count
        tape.counter.collective_bytes[kind] += repeats * chunk_tape.counter.collective_bytes[kind]
    tape.num_ops += repeats * chunk_tape.num_ops
    return logits_bytes
