"""Cross-entropy of a shape pass: over all logits, or in chunks as in `train/loss/`."""

from dataclasses import replace

from cutaway.config.transformer import Config
from cutaway.size.shape_pass.heads import run_head
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import GradNode, ShapeTensor, Storage

CHUNK_TOKENS = 1024
"""Number of targets per chunk of the chunked cross-entropy."""


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
    chunk_logits_bytes = [_run_chunk(tape, rows, times, x, config) for rows, times in _chunk_sizes(targets)]
    tape.weights |= head_tape.weights
    weights = [replace(weight, in_matmul=False, has_fp32_grad=True) for weight in head_weights]
    loss = tape.record_op([x], shape=(1,), itemsize=4, saved=[grad_input, *grad_sums], weights=weights)
    return loss, max(chunk_logits_bytes)


def _chunk_sizes(num_targets: int) -> list[tuple[int, int]]:
    """List the sizes of the chunks: (targets per chunk, number of chunks of this size)."""
    chunks = (CHUNK_TOKENS, num_targets // CHUNK_TOKENS), (num_targets % CHUNK_TOKENS, 1)
    return [(size, count) for size, count in chunks if size and count]


def _run_chunk(tape: Tape, num_rows: int, repeats: int, x: ShapeTensor, config: Config) -> int:
    """Run the head's forward and backward pass for one chunk; return the number of bytes of its logits.

    FLOPs, collectives and operations are counted `repeats` times, once for each chunk of this size."""
    chunk_tape = Tape(tape.execution)
    chunk_tape.memory_tracker, chunk_tape.autocast_copies = tape.memory_tracker, tape.autocast_copies
    chunk_tape.component = "logits"
    node = GradNode(num_rows * x.shape[-1] * x.itemsize, [])
    chunk = ShapeTensor((num_rows, x.shape[-1]), x.itemsize, Storage(tape.memory_tracker, 0), node)
    logits = run_head(chunk_tape, chunk, config)
    logits_bytes = logits.nbytes
    vocab_parallel = tape.execution.tp > 1
    upcast = Storage(tape.memory_tracker, logits.numel * 4, "logits") if vocab_parallel or logits.itemsize < 4 else None
    log_probs = Storage(tape.memory_tracker, logits.numel * max(4, logits.itemsize), "logits")
    del upcast
    grad = Storage(tape.memory_tracker, logits_bytes, "logits") if logits.itemsize < 4 else log_probs
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
