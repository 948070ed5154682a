"""One model under examination: its texts, its noise, its clock; and how two results are compared."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from cutaway.check.checked_model import CheckedModel
from cutaway.check.numerics import NOISE_MARGIN, Difference, RoundingNoise, max_difference, max_finite_abs
from cutaway.check.probes.op_tracer import AttentionCall, OpTracer
from cutaway.check.report.finding import CaseResult, SkipCheckError

DEFAULT_SEQ_LEN, SLOW_MODEL_SEQ_LEN = 16, 8
"""Tokens of a usual text, and of one for a slow model."""


SLOW_MODEL_PARAMS, SLOW_FORWARD_SECONDS = 3_000_000, 0.1
"""From so many parameters, or so many seconds a pass, on a model is called slow. Parameters are counted first, so that
the same is asked on a busy machine."""


SINGLE_NOISE_RUN_SECONDS = 0.3
"""From so many seconds on, noise is measured by one run."""


LOW_PRECISION_SEQ_LEN = 6
"""Tokens of a text in a model's own precision."""


NUM_NOISE_RUNS = 3
"""Runs by which noise is measured."""


TensorFunction = Callable[[], Tensor]


class CheckContext:
    """What every check is given."""

    def __init__(self, model: CheckedModel, *, seed: int = 0, budget: float = 30.0) -> None:
        self.model, self.seed, self.budget = model, seed, budget
        self.start_time = time.monotonic()
        self.generator = torch.Generator().manual_seed(seed)
        self.noise_ratio = 0.0
        """The target's noise as a share of its largest output, measured by `calibrate`."""
        self.seconds_per_forward = 0.0
        self.is_slow = False
        """Whether fewer and shorter texts are to be read."""
        assert model.vocab_size is not None
        special = set(model.special_token_ids)
        allowed = [token for token in range(min(model.vocab_size, 50_000)) if token not in special]
        self.allowed_tokens = torch.tensor(allowed or list(range(model.vocab_size)))
        self.seq_len = min(DEFAULT_SEQ_LEN, model.max_seq_len or DEFAULT_SEQ_LEN)
        self.memo: dict[str, Any] = {}
        """What several checks ask for and is made once."""

    # time
    @property
    def seconds_left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - (time.monotonic() - self.start_time)

    # texts
    def random_tokens(self, batch_size: int = 1, seq_len: int | None = None) -> Tensor:
        """Random tokens without a meaning of their own."""
        pick = torch.randint(len(self.allowed_tokens), (batch_size, seq_len or self.seq_len), generator=self.generator)
        return self.allowed_tokens[pick].to(self.model.device)

    def replace_tokens(self, tokens: Tensor, positions: Any = slice(None)) -> Tensor:
        """The same with other tokens at some positions, each different from what was there."""
        out = tokens.clone()
        index = torch.searchsorted(self.allowed_tokens, out[:, positions].cpu().contiguous())
        size = len(self.allowed_tokens)
        step = torch.randint(1, max(2, size), index.shape, generator=self.generator)
        out[:, positions] = self.allowed_tokens[(index + step) % size].to(out.device)
        return out

    # comparisons
    def switch_to_dtype(self, dtype: torch.dtype | None) -> None:
        """Go on in a narrower type, which a CPU may be very slow in: rounding grows with its last place."""
        assert dtype is not None
        self.noise_ratio *= torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
        self.seq_len = min(self.seq_len, LOW_PRECISION_SEQ_LEN // 2 if self.is_slow else LOW_PRECISION_SEQ_LEN)

    @torch.no_grad()
    def calibrate(self) -> None:
        """Measure the noise, and what a pass costs, on one text; others will be no longer."""
        assert self.model.logits is not None
        tokens = self.random_tokens()
        for _ in range(2):  # a first pass may have to make things ready
            start = time.monotonic()
            base = self.model.logits(tokens)
            self.seconds_per_forward = time.monotonic() - start
            if self.seconds_per_forward > SINGLE_NOISE_RUN_SECONDS:
                break
        noise = self.measure_noise(lambda: self.model.logits(tokens), base)  # type: ignore[misc]
        self.noise_ratio = noise / max(max_finite_abs(base), 1e-30)
        module = self.model.module
        count = 0 if module is None else sum(each.numel() for each in module.parameters())
        self.is_slow = count > SLOW_MODEL_PARAMS or self.seconds_per_forward > SLOW_FORWARD_SECONDS
        if self.is_slow:
            self.seq_len = min(self.seq_len, SLOW_MODEL_SEQ_LEN)

    def measure_noise(self, compute: TensorFunction, reference: Tensor | None = None) -> float:
        """The most that a result moves when it is computed again, with each product rounded otherwise."""
        reference = compute() if reference is None else reference
        worst = torch.zeros((), device=reference.device)
        for n in range(NUM_NOISE_RUNS if self.seconds_per_forward < SINGLE_NOISE_RUN_SECONDS else 1):
            with RoundingNoise(self.seed + n):
                again = compute()
            if again.shape == reference.shape:
                moved = (again.detach().float() - reference.detach().float()).abs()
                worst = torch.maximum(worst, moved.nan_to_num(0.0).max())
        floor = torch.finfo(reference.dtype).eps * max_finite_abs(reference) if reference.is_floating_point() else 0.0
        return max(float(worst), floor)

    def compare(
        self,
        compute_first: TensorFunction,
        compute_second: TensorFunction,
        *,
        first_result: Tensor | None = None,
        second_result: Tensor | None = None,
        with_grad: bool = False,
    ) -> Difference:
        """Compare two ways to one result (`first_result`, `second_result`: what they gave, where it is known).

        Where they seem apart, the noise of just these two is measured too."""
        with nullcontext() if with_grad else torch.no_grad():
            a = compute_first() if first_result is None else first_result
            b = compute_second() if second_result is None else second_result
            if a.shape != b.shape:
                raise SkipCheckError(f"results of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared")
            if a.numel() == 0:
                return Difference(0.0, 0.0, ())
            gap = max_difference(a, b)
            bound = NOISE_MARGIN * max(self.noise_ratio * max(max_finite_abs(a), max_finite_abs(b)), 0.0)
            if gap.max_abs <= bound or gap.max_abs == float("inf"):  # no rounding makes NaN of a number
                return Difference(gap.max_abs, bound, gap.index)
            bound = max(
                bound, NOISE_MARGIN * max(self.measure_noise(compute_first, a), self.measure_noise(compute_second, b))
            )
            return Difference(gap.max_abs, bound, gap.index)

    def expect_equal(self, diff: Difference, *, passed: str, failed: str, location: str | None = None) -> CaseResult:
        """A verdict on two results that must be equal."""
        if diff.within_tolerance:
            return CaseResult("pass", passed, diff.max_abs, diff.tolerance)
        return CaseResult("fail", failed, diff.max_abs, diff.tolerance, location)

    def expect_different(
        self, diff: Difference, *, passed: str, failed: str, location: str | None = None
    ) -> CaseResult:
        """A verdict on two results that must differ."""
        if not diff.within_tolerance:
            return CaseResult("pass", passed, diff.max_abs, diff.tolerance)
        return CaseResult("fail", failed, diff.max_abs, diff.tolerance, location)

    @torch.no_grad()
    def trace_attention(self, tokens: Tensor) -> list[AttentionCall]:
        """Every attention that is computed in one pass, in order."""
        assert self.model.logits is not None
        with OpTracer(self.model.module) as witness:
            self.model.logits(tokens)
        self.memo["uses_trig"] = bool(witness.trig_calls)
        return witness.attentions

    def compute_once(self, key: str, compute: Callable[[], Any]) -> Any:
        """What was made under this name before, or is made now."""
        if key not in self.memo:
            self.memo[key] = compute()
        return self.memo[key]
