"""What decoding and reading reach on this machine, beside transformers in the same run."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Literal

import torch

from cutaway.bench.limits import DTYPES, copy_rate, finish, product_rate
from cutaway.bench.machine import LENGTHS, device_name
from cutaway.config.transformer import Config
from cutaway.errors import InputError
from cutaway.generate import Engine, Plan, Settings, Ticket
from cutaway.generate.quality import Loss, loss_of_bits
from cutaway.model import Transformer
from cutaway.size import Size, size
from cutaway.size.calibration import recorded
from cutaway.size.roofline import Work, prefill_work

Kind = Literal["decode", "prefill"]
ROUNDS = 8
"""Turns that each side takes."""
WARM = 4
"""Steps that are not counted: the first compile, capture or allocate."""
NAMES = {kind: name for name, kind in DTYPES.items()}
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Side:
    """One implementation: seconds of a step (or of reading the prompts), a figure for each turn."""

    seconds: list[float]
    tokens: int
    """That come of one step, or are read."""
    least: float
    """Seconds that the machine needs at its measured limit."""

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def rate(self) -> float:
        return self.tokens / self.median

    @property
    def share(self) -> float:
        return self.least / self.median

    def to_dict(self) -> dict[str, Any]:
        low, high = quartiles(self.seconds)
        spread = {"seconds": self.median, "lower_quartile": low, "upper_quartile": high}
        return spread | {"tokens_per_second": self.rate, "share_of_limit": self.share}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one run of `measure_speed` found."""

    work: Kind
    device: str
    dtype: str
    bits: int | None
    batch: int
    context: int
    parameters: int
    bytes: int
    """That a step, or reading, must move at least."""
    flops: int
    limit: float
    """Bytes a second of a bare copy, for decoding; FLOPs a second of a bare product, for reading."""
    ours: Side
    peer: Side | None = None
    loss: Loss | None = None
    """What fewer bits cost in quality."""
    notes: list[str] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """How many times as fast as the peer, turn by turn."""
        return [] if self.peer is None else [b / a for a, b in zip(self.ours.seconds, self.peer.seconds, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        told = asdict(self) | {"ours": self.ours.to_dict(), "peer": self.peer and self.peer.to_dict(), "ratio": None}
        if self.ratios:
            low, high = quartiles(self.ratios)
            told["ratio"] = {"median": median(self.ratios), "lower_quartile": low, "upper_quartile": high}
        return told


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def measure_speed(
    model: Transformer,
    work: Kind,
    *,
    peer: Path | None = None,
    batch: int = 1,
    context: int | None = None,
    steps: int = 64,
    bits: int | None = None,
    compiled: bool = False,
    progress: Progress = lambda done, total: None,
) -> Measured:
    """Take turns with the peer, in changing order, so that a busy machine slows both. `peer` is a directory that
    transformers opens: the same model."""
    check_decoder(model)
    device, dtype = model.device, NAMES.get(model.dtype)
    if dtype is None:
        raise InputError(f"the model is in {model.dtype}, in which nothing is measured; choose {', '.join(DTYPES)}")
    per_turn = max(1, steps // ROUNDS)
    grown = WARM + ROUNDS * per_turn + 2 if work == "decode" else 2
    grown += batch * (2 + (context or LENGTHS["cuda"]) // 256)  # the first rows step while the others are still read
    context = context or own_context(model.config, device, grown)
    prompts = torch.randint(model.config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0))
    begin_ours = begin_decoding if work == "decode" else begin_reading
    engine = Engine(
        Plan(model.eval(), rows=batch, context=context + grown, bits=bits, compiled=compiled or device.type == "cuda")
    )
    sides = [begin_ours(engine, prompts)]
    if peer is not None:
        sides.append(begin_peer(peer, work, prompts.to(device), model.dtype))
    limit = copy_rate(device) if work == "decode" else product_rate(device, model.dtype)
    taken: list[list[float]] = [[] for _ in sides]
    each = per_turn if work == "decode" else 1
    for side in sides:
        side(WARM if work == "decode" else 1)
    finish(device)
    for turn in range(ROUNDS):
        progress(turn, ROUNDS)
        order = range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides)))
        for which in order:
            start = perf_counter()
            sides[which](each)
            finish(device)
            taken[which].append((perf_counter() - start) / each)
    length = context + (ROUNDS * per_turn // 2 if work == "decode" else 0)
    told = costs(model.config, dtype, bits, batch, length)
    wide = costs(model.config, dtype, None, batch, length)  # the peer has the weights as they are
    todo, theirs = (each.decode_work(batch) if work == "decode" else reading_work(each) for each in (told, wide))
    least = [(each.bytes if work == "decode" else each.flops) / limit for each in (todo, theirs)]
    tokens = batch if work == "decode" else batch * context
    made = [Side(seconds, tokens, bound) for seconds, bound in zip(taken, least, strict=False)]
    return Measured(
        work=work,
        device=device_name(device),
        dtype=dtype,
        bits=bits,
        batch=batch,
        context=context,
        parameters=told.params,
        bytes=todo.bytes,
        flops=todo.flops,
        limit=limit,
        ours=made[0],
        peer=made[1] if len(made) > 1 else None,
        loss=None if bits is None else loss_of_bits(model, bits),
    )


def check_decoder(model: Transformer) -> None:
    if "decoder" not in model.stacks or len(model.stacks) == 2:
        raise InputError("only decoders are measured; name one, as in cutaway bench decode smollm2-135m")


def own_context(config: Config, device: torch.device, grown: int) -> int:
    """As long as usual, or as the model has room for."""
    usual = LENGTHS.get(device.type, 128)
    return max(1, min(usual, config.context - grown)) if config.context else usual


def costs(config: Config, dtype: str, bits: int | None, batch: int, context: int) -> Size:
    narrow = {16: "bf16", 8: "int8", 4: "int4"}
    return size(config, dtype=narrow.get(bits or 0, dtype), batch=batch, context=context)


def reading_work(told: Size) -> Work:
    tokens, flops = told.batch * told.question.context, told.prompt_flops.times(told.batch)
    how = {"cache": told.cache.bytes, "launches": told.reading.steps, "devices": 1}
    return prefill_work(told.share, told.question.dtype, flops, tokens=tokens, **how)


# ---------------------------------------------------------------------------------------- the two sides


def begin_decoding(engine: Engine, prompts: torch.Tensor) -> Callable[[int], None]:
    """An engine that has read its prompts; each call takes so many steps."""
    asked = Settings(max_new_tokens=engine.plan.slots - prompts.shape[1], ignore_eos=True)
    tickets = [engine.submit(row, asked, seed=0) for row in prompts.tolist()]
    while engine.stepping < len(tickets):
        engine.turn()
        raise_failed(tickets)

    def steps(count: int) -> None:
        for _ in range(count):
            engine.turn()
        raise_failed(tickets)

    return steps


def begin_reading(engine: Engine, prompts: torch.Tensor) -> Callable[[int], None]:
    """Each call reads all prompts up to their first answered token."""

    def read(count: int) -> None:
        for _ in range(count):
            tickets = [
                engine.submit(row, Settings(max_new_tokens=1, ignore_eos=True), seed=0) for row in prompts.tolist()
            ]
            engine.run()
            raise_failed(tickets)

    return read


def raise_failed(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        if ticket.error is not None:
            raise ticket.error


def begin_peer(directory: Path, work: Kind, prompts: torch.Tensor, dtype: torch.dtype) -> Callable[[int], None]:
    """transformers' model of the same weights in a bare greedy loop, which is quicker than its own `generate`."""
    logging.disable(logging.WARNING)  # what its optional parts say about this machine
    try:
        transformers: Any = import_module("transformers")
        transformers.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, use_safetensors=True)
    finally:
        logging.disable(logging.NOTSET)
    model = model.to(prompts.device).eval()

    @torch.inference_mode()
    def read() -> tuple[Any, torch.Tensor]:
        out = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
        return out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)

    def readings(count: int) -> None:
        for _ in range(count):
            read()

    if work == "prefill":
        return readings
    state = read()

    @torch.inference_mode()
    def steps(count: int) -> None:
        nonlocal state
        cache, token = state
        for _ in range(count):
            token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        state = (cache, token)

    return steps


# ---------------------------------------------------------------------------------------- for `cutaway generate`


@cache
def copy_bandwidth(device: torch.device) -> float | None:
    """Bytes a second of a bare copy: as kept by `cutaway bench` for this machine, or measured now if there is room."""
    try:
        kept = recorded()
    except InputError:  # damaged, of which `cutaway size --gpu here` complains
        kept = None
    if kept is not None and kept.device == device_name(device):
        return kept.bandwidth
    try:
        return copy_rate(device)
    except (RuntimeError, MemoryError):
        return None
