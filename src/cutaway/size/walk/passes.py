"""Whole passes on sizes: reading, a step of decoding, a step of training."""

from dataclasses import dataclass, field, replace

from cutaway.config.embedding import Head
from cutaway.config.transformer import Config
from cutaway.size.walk.model import cross_entropy, model
from cutaway.size.walk.storage import Weight
from cutaway.size.walk.tape import Setting, Tally, Tape


@dataclass(frozen=True)
class Pass:
    """What a pass multiplied, kept and held. Memory is counted beside the weights, optimizer state and caches."""

    tally: Tally
    logits: int
    """Bytes."""
    peak: int
    """Bytes alive at once, at most."""
    at_peak: dict[str, int]
    """The same by part."""
    steps: int
    """Operations, each of which eager PyTorch launches by itself."""
    kept: dict[str, int] = field(default_factory=dict)
    """Bytes that wait for the way back at the end of the forward pass, by part."""
    gradients: int = 0
    """Bytes of the weights' gradients, all of them."""
    weights: tuple[Weight, ...] = ()

    @property
    def kept_bytes(self) -> int:
        return sum(self.kept.values())


def read(
    config: Config,
    batch: int,
    length: int,
    setting: Setting,
    *,
    source: int | None = None,
    past: int = 0,
    serving: bool = False,
    source_read: bool | None = None,
) -> Pass:
    """Logits of `length` tokens a sequence, `past` others being in a cache; there is no way back.

    A source is read too, unless it was (as it was if anything is in the cache). When serving, keys and values go into
    a cache, whose memory is counted elsewhere, and only the last logits of each sequence are wanted.
    """
    tape = Tape(replace(setting, grad=False))
    known = past > 0 if source_read is None else source_read
    logits = model(tape, config, batch, length, source or past + length, past=past, serving=serving, source_read=known)
    meter, weights = tape.meter, tuple(tape.weights.values())
    return Pass(tape.tally, logits.bytes, meter.peak, meter.at_peak, tape.steps, weights=weights)


def train(config: Config, batch: int, length: int, setting: Setting, *, source: int | None = None) -> Pass:
    """Forward, cross-entropy of every token, and back. The caller holds the logits to the end, as most do."""
    tape = Tape(replace(setting, grad=True))
    logits = model(tape, config, batch, length, source or length)
    tape.part = "loss"
    loss = cross_entropy(tape, logits) if isinstance(config.head, Head) else logits
    kept = waiting(tape)
    tape.casts.clear()
    tape.backward(loss)
    gradients = sum(storage.bytes for storage in tape.gradients.values())
    meter, weights = tape.meter, tuple(tape.weights.values())
    return Pass(tape.tally, logits.bytes, meter.peak, meter.at_peak, tape.steps, kept, gradients, weights)


def waiting(tape: Tape) -> dict[str, int]:
    """What the way back will need, each storage once, by the part that made it."""
    kept: dict[str, int] = {}
    storages = (storage for node in tape.nodes for storage in (*node.saved, *(node.frame.kept if node.frame else ())))
    for storage in {id(each): each for each in storages if each is not None}.values():
        kept[storage.part] = kept.get(storage.part, 0) + storage.bytes
    return kept
