"""`CheckContext`: random tokens, rounding noise, time budget and comparisons, as passed to every check."""

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
"""Sequence length of the random tokens, and the one for slow models."""


SLOW_MODEL_PARAMS, SLOW_FORWARD_SECONDS = 3_000_000, 0.1
"""A model with more parameters, or more seconds per forward pass, is slow. The parameter count makes the decision
the same on a busy machine for most models."""


SINGLE_NOISE_RUN_SECONDS = 0.3
"""If a forward pass takes longer, noise is measured in one run."""


LOW_PRECISION_SEQ_LEN = 6
"""Sequence length in a model's own low-precision dtype."""


NUM_NOISE_RUNS = 3
"""Number of runs that measure noise."""


TensorFunction = Callable[[], Tensor]


class CheckContext:
    """The model under test, with random inputs, measured noise and comparison functions."""

    def __init__(self, model: CheckedModel, *, seed: int = 0, budget: float = 30.0) -> None:
        self.model, self.seed, self.budget = model, seed, budget
        self.start_time = time.monotonic()
        self.generator = torch.Generator().manual_seed(seed)
        self.noise_ratio = 0.0
        """The model's rounding noise relative to its largest output, measured by `calibrate`."""
        self.seconds_per_forward = 0.0
        self.is_slow = False
        """Whether checks use fewer and shorter sequences."""
        assert model.vocab_size is not None
        special = set(model.special_token_ids)
        allowed = [token for token in range(min(model.vocab_size, 50_000)) if token not in special]
        self.allowed_tokens = torch.tensor(allowed or list(range(model.vocab_size)))
        self.seq_len = min(DEFAULT_SEQ_LEN, model.max_seq_len or DEFAULT_SEQ_LEN)
        self.memo: dict[str, Any] = {}
        """Results that several checks share; see `compute_once`."""

    @property
    def seconds_left(self) -> float:
        """Remaining seconds of the budget."""
        return self.budget - (time.monotonic() - self.start_time)

    # inputs
    def random_tokens(self, batch_size: int = 1, seq_len: int | None = None) -> Tensor:
        """Draw random token ids (B, T), without special tokens."""
        index = torch.randint(len(self.allowed_tokens), (batch_size, seq_len or self.seq_len), generator=self.generator)
        return self.allowed_tokens[index].to(self.model.device)

    def replace_tokens(self, tokens: Tensor, positions: Any = slice(None)) -> Tensor:
        """Replace the tokens at `positions`, each by a different random token."""
        out = tokens.clone()
        index = torch.searchsorted(self.allowed_tokens, out[:, positions].cpu().contiguous())
        size = len(self.allowed_tokens)
        offset = torch.randint(1, max(2, size), index.shape, generator=self.generator)
        out[:, positions] = self.allowed_tokens[(index + offset) % size].to(out.device)
        return out

    # comparisons
    def switch_to_dtype(self, dtype: torch.dtype | None) -> None:
        """Continue in a low-precision dtype: scale the noise by its eps and shorten sequences (CPUs can be slow)."""
        assert dtype is not None
        self.noise_ratio *= torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
        self.seq_len = min(self.seq_len, LOW_PRECISION_SEQ_LEN // 2 if self.is_slow else LOW_PRECISION_SEQ_LEN)

    @torch.no_grad()
    def calibrate(self) -> None:
        """Measure the rounding noise and the time of a forward pass on one sequence of the default length."""
        assert self.model.logits is not None
        tokens = self.random_tokens()
        for _ in range(2):  # the first forward pass may include one-time setup
            start = time.monotonic()
            base = self.model.logits(tokens)
            self.seconds_per_forward = time.monotonic() - start
            if self.seconds_per_forward > SINGLE_NOISE_RUN_SECONDS:
                break
        noise = self.measure_noise(lambda: self.model.logits(tokens), base)  # type: ignore[misc]
        self.noise_ratio = noise / max(max_finite_abs(base), 1e-30)
        module = self.model.module
        num_params = 0 if module is None else sum(param.numel() for param in module.parameters())
        self.is_slow = num_params > SLOW_MODEL_PARAMS or self.seconds_per_forward > SLOW_FORWARD_SECONDS
        if self.is_slow:
            self.seq_len = min(self.seq_len, SLOW_MODEL_SEQ_LEN)

    def measure_noise(self, compute: TensorFunction, reference: Tensor | None = None) -> float:
        """The largest change of a result when it is recomputed with random rounding of each matrix product."""
        reference = compute() if reference is None else reference
        worst = torch.zeros((), device=reference.device)
        for run in range(NUM_NOISE_RUNS if self.seconds_per_forward < SINGLE_NOISE_RUN_SECONDS else 1):
            with RoundingNoise(self.seed + run):
                perturbed = compute()
            if perturbed.shape == reference.shape:
                change = (perturbed.detach().float() - reference.detach().float()).abs()
                worst = torch.maximum(worst, change.nan_to_num(0.0).max())
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
        """Compare two computations of one result (`first_result`, `second_result`: their results, if known).

        The tolerance is `NOISE_MARGIN` times the noise from `calibrate`. If the difference exceeds it, the noise of
        these two computations is measured too, and the larger one counts.
        """
        with nullcontext() if with_grad else torch.no_grad():
            a = compute_first() if first_result is None else first_result
            b = compute_second() if second_result is None else second_result
            if a.shape != b.shape:
                raise SkipCheckError(f"cannot compare results of shapes {tuple(a.shape)} and {tuple(b.shape)}")
            if a.numel() == 0:
                return Difference(0.0, 0.0, ())
            diff = max_difference(a, b)
            tolerance = NOISE_MARGIN * max(self.noise_ratio * max(max_finite_abs(a), max_finite_abs(b)), 0.0)
            if diff.max_abs <= tolerance or diff.max_abs == float("inf"):  # rounding does not turn a number into NaN
                return Difference(diff.max_abs, tolerance, diff.index)
            tolerance = max(
                tolerance,
                NOISE_MARGIN * max(self.measure_noise(compute_first, a), self.measure_noise(compute_second, b)),
            )
            return Difference(diff.max_abs, tolerance, diff.index)

    def expect_equal(self, diff: Difference, *, passed: str, failed: str, location: str | None = None) -> CaseResult:
        """Pass if the difference is within its tolerance, otherwise fail."""
        if diff.within_tolerance:
            return CaseResult("pass", passed, diff.max_abs, diff.tolerance)
        return CaseResult("fail", failed, diff.max_abs, diff.tolerance, location)

    def expect_different(
        self, diff: Difference, *, passed: str, failed: str, location: str | None = None
    ) -> CaseResult:
        """Pass if the difference exceeds its tolerance, otherwise fail."""
        if not diff.within_tolerance:
            return CaseResult("pass", passed, diff.max_abs, diff.tolerance)
        return CaseResult("fail", failed, diff.max_abs, diff.tolerance, location)

    @torch.no_grad()
    def trace_attention(self, tokens: Tensor) -> list[AttentionCall]:
        """Record every attention call of one forward pass, in order."""
        assert self.model.logits is not None
        with OpTracer(self.model.module) as tracer:
            self.model.logits(tokens)
        self.memo["uses_trig"] = bool(tracer.trig_calls)
        return tracer.attentions

    def compute_once(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return the result stored under `key`, or compute and store it."""
        if key not in self.memo:
            self.memo[key] = compute()
        return self.memo[key]
