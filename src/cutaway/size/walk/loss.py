"""The loss on sizes: over all logits, or over a chunk of them at a time as `train/loss.py` does it."""

from dataclasses import replace

from cutaway.config.transformer import Config
from cutaway.size.walk.model import head
from cutaway.size.walk.storage import Node, Storage, Tensor
from cutaway.size.walk.tape import Tape

CHUNK = 1024
"""Targets whose logits are held at once."""


def cross_entropy(tape: Tape, logits: Tensor) -> Tensor:
    """−log softmax at the target. Under autocast the GPU takes the logarithms as they are and widens them afterwards,
    the CPU widens the logits."""
    setting = tape.setting
    wide = tape.cast(logits, 4) if setting.autocast and setting.device == "cpu" else logits
    flat = tape.op(wide.shape, wide.dtype, [wide], saves_result=True)
    del wide
    if setting.autocast:
        flat = tape.cast(flat, 4)
    targets = tape.new((logits.elements // logits.shape[-1],), 8)
    return tape.op((1,), flat.dtype, [flat], saves=[flat, targets], beside=flat.dtype)


def chunked(tape: Tape, x: Tensor, config: Config) -> tuple[Tensor, int]:
    """The loss, and the bytes of a chunk's logits. The gradient is taken with the value, chunk by chunk, and summed."""
    targets, width = x.elements // x.shape[-1], x.shape[-1]
    tape.part = "loss"
    slope = tape.new(x.shape, x.dtype)
    probe = Tape(tape.setting)
    head(probe, probe.new((1, width), x.dtype), config)
    sums = [tape.new(each.shape, max(4, tape.setting.weights)) for each in probe.weights.values()]
    sizes = [one_chunk(tape, rows, times, x, config) for rows, times in chunks(targets)]
    weights = [replace(each, multiplied=False, summed=True) for each in probe.weights.values()]
    return tape.op((1,), 4, [x], saves=[slope, *sums], weights=weights), max(sizes)


def chunks(targets: int) -> list[tuple[int, int]]:
    """(targets of a chunk, how many chunks of that kind)."""
    return [each for each in ((CHUNK, targets // CHUNK), (targets % CHUNK, 1)) if each[0] and each[1]]


def one_chunk(tape: Tape, rows: int, times: int, x: Tensor, config: Config) -> int:
    """There and back through the head; gradients are added to the sums and forgotten."""
    inner = Tape(tape.setting)
    inner.meter, inner.casts, inner.part = tape.meter, tape.casts, "logits"
    shape = (rows, x.shape[-1])
    piece = Tensor(shape, x.dtype, Storage(tape.meter, 0), Node(rows * x.shape[-1] * x.dtype, []))
    logits = head(inner, piece, config)
    size = logits.bytes
    apart = tape.setting.tensor > 1
    wide = Storage(tape.meter, logits.elements * 4, "logits") if apart or logits.dtype < 4 else None
    log_p = Storage(tape.meter, logits.elements * max(4, logits.dtype), "logits")
    del wide
    grad = Storage(tape.meter, size, "logits") if logits.dtype < 4 else log_p
    inner.backward(logits, grad)
    for phases, sums in ((inner.tally.full, tape.tally.full), (inner.tally.seen, tape.tally.seen)):
        for phase, flops in phases.items():
            sums[phase] += times * flops
    if apart:  # the greatest logit, the sum of exponentials, the target's
        for _ in range(3):
            inner.tally.send("all-reduce", rows * 4)
    for kind, many in inner.tally.sent.items():
        tape.tally.sent[kind] += times * many
        tape.tally.sent_bytes[kind] += times * inner.tally.sent_bytes[kind]
    tape.steps += times * inner.steps
    return size
