"""One target under examination: its texts, its noise, its clock; and how two results are compared."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.finding import Part
from cutaway.check.noise import Jitter
from cutaway.check.target import Target
from cutaway.check.witness import Attention, Witness
from cutaway.generate.plan import free_memory

LENGTH, SHORT = 16, 8
"""Tokens of a usual text, and of one for a slow model."""
LARGE, SLOW = 3_000_000, 0.1
"""From so many parameters, or so many seconds a pass, on a model is called slow. Parameters are counted first, so that
the same is asked on a busy machine."""
SLOWER = 0.3
"""From so many seconds on, noise is measured by one run."""
BRIEF = 6
"""Tokens of a text in a model's own precision."""
MARGIN = 10.0
"""How many times its own noise two equal results may be apart."""
NULLS = 3
"""Runs by which noise is measured."""
Make = Callable[[], Tensor]


class CannotError(Exception):
    """Why a check could not be tried."""


@dataclass
class Gap:
    """How far two results that should be equal are apart."""

    worst: float
    bound: float
    index: tuple[int, ...]
    """Where they are furthest apart."""

    @property
    def ok(self) -> bool:
        return self.worst <= self.bound


class Exam:
    """What every check is given."""

    def __init__(self, target: Target, *, seed: int = 0, budget: float = 30.0) -> None:
        self.target, self.seed, self.budget = target, seed, budget
        self.since = time.monotonic()
        self.generator = torch.Generator().manual_seed(seed)
        self.ratio = 0.0
        """The target's noise as a share of its largest output, measured by `calibrate`."""
        self.seconds_a_pass = 0.0
        self.slow = False
        """Whether fewer and shorter texts are to be read."""
        assert target.vocab is not None
        special = set(target.special)
        allowed = [token for token in range(min(target.vocab, 50_000)) if token not in special]
        self.allowed = torch.tensor(allowed or list(range(target.vocab)))
        self.length = min(LENGTH, target.longest or LENGTH)
        self.known: dict[str, Any] = {}
        """What several checks ask for and is made once."""

    # time
    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - (time.monotonic() - self.since)

    # texts
    def text(self, rows: int = 1, length: int | None = None) -> Tensor:
        """Random tokens without a meaning of their own."""
        pick = torch.randint(len(self.allowed), (rows, length or self.length), generator=self.generator)
        return self.allowed[pick].to(self.target.device)

    def changed(self, tokens: Tensor, where: Any = slice(None)) -> Tensor:
        """The same with other tokens at some positions, each different from what was there."""
        out = tokens.clone()
        index = torch.searchsorted(self.allowed, out[:, where].cpu().contiguous())
        size = len(self.allowed)
        step = torch.randint(1, max(2, size), index.shape, generator=self.generator)
        out[:, where] = self.allowed[(index + step) % size].to(out.device)
        return out

    # comparisons
    def narrow(self, dtype: torch.dtype | None) -> None:
        """Go on in a narrower type, which a CPU may be very slow in: rounding grows with its last place."""
        assert dtype is not None
        self.ratio *= torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
        self.length = min(self.length, BRIEF // 2 if self.slow else BRIEF)

    @torch.no_grad()
    def calibrate(self) -> None:
        """Measure the noise, and what a pass costs, on one text; others will be no longer."""
        assert self.target.logits is not None
        tokens = self.text()
        for _ in range(2):  # a first pass may have to make things ready
            start = time.monotonic()
            base = self.target.logits(tokens)
            self.seconds_a_pass = time.monotonic() - start
            if self.seconds_a_pass > SLOWER:
                break
        noise = self.noise(lambda: self.target.logits(tokens), base)  # type: ignore[misc]
        self.ratio = noise / max(scale_of(base), 1e-30)
        module = self.target.module
        count = 0 if module is None else sum(each.numel() for each in module.parameters())
        self.slow = count > LARGE or self.seconds_a_pass > SLOW
        if self.slow:
            self.length = min(self.length, SHORT)

    def noise(self, make: Make, base: Tensor | None = None) -> float:
        """The most that a result moves when it is computed again, with each product rounded otherwise."""
        base = make() if base is None else base
        worst = torch.zeros((), device=base.device)
        for n in range(NULLS if self.seconds_a_pass < SLOWER else 1):
            with Jitter(self.seed + n):
                again = make()
            if again.shape == base.shape:
                moved = (again.detach().float() - base.detach().float()).abs()
                worst = torch.maximum(worst, moved.nan_to_num(0.0).max())
        floor = torch.finfo(base.dtype).eps * scale_of(base) if base.is_floating_point() else 0.0
        return max(float(worst), floor)

    def same(
        self,
        one: Make,
        other: Make,
        *,
        first: Tensor | None = None,
        second: Tensor | None = None,
        gradients: bool = False,
    ) -> Gap:
        """Compare two ways to one result (`first` and `second`: what they gave, where it is known).

        Where they seem apart, the noise of just these two is measured too."""
        with nullcontext() if gradients else torch.no_grad():
            a = one() if first is None else first
            b = other() if second is None else second
            if a.shape != b.shape:
                raise CannotError(f"results of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared")
            if a.numel() == 0:
                return Gap(0.0, 0.0, ())
            gap = apart(a, b)
            bound = MARGIN * max(self.ratio * max(scale_of(a), scale_of(b)), 0.0)
            if gap.worst <= bound or gap.worst == float("inf"):  # no rounding makes NaN of a number
                return Gap(gap.worst, bound, gap.index)
            bound = max(bound, MARGIN * max(self.noise(one, a), self.noise(other, b)))
            return Gap(gap.worst, bound, gap.index)

    def judge(self, gap: Gap, *, held: str, broken: str, where: str | None = None) -> Part:
        """A verdict on two results that must be equal."""
        if gap.ok:
            return Part("pass", held, gap.worst, gap.bound)
        return Part("fail", broken, gap.worst, gap.bound, where)

    def judge_alive(self, gap: Gap, *, held: str, broken: str, where: str | None = None) -> Part:
        """A verdict on two results that must differ."""
        if not gap.ok:
            return Part("pass", held, gap.worst, gap.bound)
        return Part("fail", broken, gap.worst, gap.bound, where)

    @torch.no_grad()
    def attentions(self, tokens: Tensor) -> list[Attention]:
        """Every attention that is computed in one pass, in order."""
        assert self.target.logits is not None
        with Witness(self.target.module) as witness:
            self.target.logits(tokens)
        self.known["turned"] = bool(witness.turned)
        return witness.attentions

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What was made under this name before, or is made now."""
        if name not in self.known:
            self.known[name] = make()
        return self.known[name]

    def need(self, *names: str) -> None:
        """Refuse what cannot be tried."""
        for name in names:
            if getattr(self.target, name) in (None, {}):
                raise CannotError(f"needs {name}")


def scale_of(x: Tensor) -> float:
    """The largest finite value."""
    values = x.detach().float().abs()
    values = values.masked_fill(~values.isfinite(), 0.0)
    return float(values.max()) if values.numel() else 0.0


def apart(a: Tensor, b: Tensor) -> Gap:
    """The largest difference and where it is; infinite where one is a number and the other is not."""
    a, b = a.detach().float(), b.detach().float()
    gap = (a - b).abs()
    gap = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, gap)
    gap = torch.where(gap.isnan(), float("inf"), gap)
    at = int(gap.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), gap.shape))
    return Gap(float(gap.flatten()[at]), 0.0, index)


NARROW = (torch.bfloat16, torch.float16)


def can_widen(target: Target) -> bool:
    """Whether there is a module, and room for its weights in fp32."""
    if target.module is None:
        return False
    more = 4 * sum(each.numel() for each in target.module.parameters() if each.dtype in NARROW)
    free = free_memory(target.device)
    return free is None or more < free / 2


@contextmanager
def swapped(module: nn.Module | None, other: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """For as long as it lasts, weights and buffers are others (None: as they are); then the same tensors as before."""
    kept: list[tuple[Tensor, Tensor]] = []
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    try:
        for tensor in {id(each): each for each in tensors}.values():
            changed = other(tensor.data)
            if changed is not None:
                kept.append((tensor, tensor.data))
                tensor.data = changed
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


def widened(module: nn.Module | None) -> AbstractContextManager[None]:
    """For as long as it lasts, weights narrower than fp32 are fp32."""
    return swapped(module, lambda data: data.float() if data.dtype in NARROW else None)
