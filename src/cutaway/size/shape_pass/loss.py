"""The loss on sizes: over all logits, or over a chunk of them at a time as `train/loss.py` does it."""

from dataclasses import replace

from cutaway.config.transformer import Config
from cutaway.size.shape_pass.model import run_head
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import GradNode, ShapeTensor, Storage

CHUNK_TOKENS = 1024
"""Targets whose logits are held at once."""


def cross_entropy(tape: Tape, logits: ShapeTensor) -> ShapeTensor:
    """−log softmax at the target. Under autocast the GPU takes the logarithms as they are and widens them afterwards,
    the CPU widens the logits."""
    execution = tape.execution
    wide = tape.cast(logits, 4) if execution.autocast and execution.device == "cpu" else logits
    flat = tape.record_op(wide.shape, wide.itemsize, [wide], save_output=True)
    del wide
    if execution.autocast:
        flat = tape.cast(flat, 4)
    targets = tape.empty((logits.numel // logits.shape[-1],), 8)
    return tape.record_op((1,), flat.itemsize, [flat], saved=[flat, targets], extra_saved_bytes=flat.itemsize)


def chunked_cross_entropy(tape: Tape, x: ShapeTensor, config: Config) -> tuple[ShapeTensor, int]:
    """The loss, and the bytes of a chunk's logits. The gradient is taken with the value, chunk by chunk, and summed."""
    targets, width = x.numel // x.shape[-1], x.shape[-1]
    tape.component = "loss"
    slope = tape.empty(x.shape, x.itemsize)
    probe = Tape(tape.execution)
    run_head(probe, probe.empty((1, width), x.itemsize), config)
    sums = [tape.empty(each.shape, max(4, tape.execution.weight_itemsize)) for each in probe.weights.values()]
    sizes = [_run_chunk(tape, rows, times, x, config) for rows, times in _chunk_sizes(targets)]
    weights = [replace(each, in_matmul=False, has_fp32_grad=True) for each in probe.weights.values()]
    return tape.record_op((1,), 4, [x], saved=[slope, *sums], weights=weights), max(sizes)


def _chunk_sizes(num_targets: int) -> list[tuple[int, int]]:
    """(targets of a chunk, how many chunks of that kind)."""
    return [
        each
        for each in ((CHUNK_TOKENS, num_targets // CHUNK_TOKENS), (num_targets % CHUNK_TOKENS, 1))
        if each[0] and each[1]
    ]


def _run_chunk(tape: Tape, num_rows: int, repeats: int, x: ShapeTensor, config: Config) -> int:
    """There and back through the head; gradients are added to the sums and forgotten."""
    inner = Tape(tape.execution)
    inner.memory_tracker, inner.autocast_copies, inner.component = tape.memory_tracker, tape.autocast_copies, "logits"
    shape = (num_rows, x.shape[-1])
    piece = ShapeTensor(
        shape, x.itemsize, Storage(tape.memory_tracker, 0), GradNode(num_rows * x.shape[-1] * x.itemsize, [])
    )
    logits = run_head(inner, piece, config)
    size = logits.nbytes
    apart = tape.execution.tp > 1
    wide = Storage(tape.memory_tracker, logits.numel * 4, "logits") if apart or logits.itemsize < 4 else None
    log_p = Storage(tape.memory_tracker, logits.numel * max(4, logits.itemsize), "logits")
    del wide
    grad = Storage(tape.memory_tracker, size, "logits") if logits.itemsize < 4 else log_p
    inner.backward(logits, grad)
    for phases, sums in (
        (inner.counter.full_flops, tape.counter.full_flops),
        (inner.counter.visible_flops, tape.counter.visible_flops),
    ):
        for phase, flops in phases.items():
            sums[phase] += repeats * flops
    if apart:  # the greatest logit, the sum of exponentials, the target's
        for _ in range(3):
            inner.counter.add_collective("all-reduce", num_rows * 4)
    for kind, many in inner.counter.num_collectives.items():
        tape.counter.num_collectives[kind] += repeats * many
        tape.counter.collective_bytes[kind] += repeats * inner.counter.collective_bytes[kind]
    tape.num_ops += repeats * inner.num_ops
    return size
