"""Whole passes on sizes: reading, a step of decoding, a step of training."""

from dataclasses import dataclass, field, replace

from cutaway.config.embedding import Head
from cutaway.config.transformer import Config
from cutaway.size.walk.loss import chunked, cross_entropy
from cutaway.size.walk.model import logits, stream
from cutaway.size.walk.setting import Setting
from cutaway.size.walk.shares import ENDS, Shares
from cutaway.size.walk.storage import Weight
from cutaway.size.walk.tally import Tally
from cutaway.size.walk.tape import Tape


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
    after: int = 0
    """Bytes that are still held when the optimizer takes its step."""

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
    x = stream(tape, config, batch, length, source or past + length, past=past, serving=serving, source_read=known)
    told = logits(tape, x, config)
    meter, weights = tape.meter, tuple(tape.weights.values())
    return Pass(tape.tally, told.bytes, meter.peak, meter.at_peak, tape.steps, weights=weights)


def train(
    config: Config,
    batch: int,
    length: int,
    setting: Setting,
    *,
    source: int | None = None,
    loss: str = "whole",
    packed: bool = False,
) -> Pass:
    """Forward, cross-entropy of every token, and back. With `packed` a sequence holds several documents.

    Over 'whole' logits the caller holds them to the end, as most do; 'chunked' is as `cutaway train` does it.
    """
    tape = Tape(replace(setting, grad=True, rows=batch if packed else 0))
    shares = tape.shares = shared(tape, config)
    if shares is not None:
        shares.enter(ENDS)
        tape.on_way_back(lambda: shares.leave_back(ENDS))
    x = stream(tape, config, batch, length, source or length)
    if loss == "chunked" and isinstance(config.head, Head):
        value, size = chunked(tape, x, config)
        held = None
        del x
    else:
        held = logits(tape, x, config)
        del x
        size = held.bytes
        tape.part = "loss"
        value = cross_entropy(tape, held) if isinstance(config.head, Head) else held
    kept = waiting(tape)
    tape.casts.clear()
    if shares is not None:
        shares.leave(ENDS)
        tape.on_way_back(lambda: shares.enter_back(ENDS))
    tape.backward(value)
    gradients = sum(storage.bytes for storage in tape.gradients.values()) if shares is None else shares.finish()
    meter, weights = tape.meter, tuple(tape.weights.values())
    after = 0 if held is None else size
    return Pass(tape.tally, size, meter.peak, meter.at_peak, tape.steps, kept, gradients, weights, after)


def shared(tape: Tape, config: Config) -> Shares | None:
    """How weights come and go where several devices have shares of them."""
    setting = tape.setting
    if not setting.gathers:
        return None
    return Shares(
        tape.meter,
        tape.tally,
        read(config, 1, 1, Setting()).weights,
        sharers=setting.sharers,
        copies=setting.copies,
        width=setting.weights,
        kept=setting.gradient or setting.weights,
        common=[name for name, stack in config.stacks.items() if stack.groups is not None],
    )


def waiting(tape: Tape) -> dict[str, int]:
    """What the way back will need, each storage once, by the part that made it."""
    kept: dict[str, int] = {}
    storages = (storage for node in tape.nodes for storage in (*node.saved, *(node.frame.kept if node.frame else ())))
    for storage in {id(each): each for each in storages if each is not None}.values():
        kept[storage.part] = kept.get(storage.part, 0) + storage.bytes
    return kept
