"""`CheckContext`, the argument of every check: random tokens, rounding noise, time budget and comparisons."""

import time
from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import CheckedModel, count_parameters, require
from cutaway.check.function_calls import FunctionCalls
from cutaway.check.numerics import (
    MAX_CONCLUSIVE_NOISE,
    NOISE_MARGIN,
    Difference,
    RoundingNoise,
    max_difference,
    max_finite_abs,
    output_variation,
)
from cutaway.check.probes.masked_scores import move_sink_last
from cutaway.check.probes.op_tracer import AttentionCall, OpTracer
from cutaway.check.report.finding import CaseResult, SkipCheckError

_DEFAULT_SEQ_LEN, _SLOW_MODEL_SEQ_LEN, _LOW_PRECISION_SEQ_LEN = 16, 8, 6
"""Sequence lengths of the random tokens: default, for slow models, and in a model's own low-precision dtype."""
_SLOW_MODEL_PARAMS, _SLOW_FORWARD_SECONDS = 3_000_000, 0.1
"""A model with more parameters, or with more seconds per forward pass, counts as slow. For most models the number of
parameters decides, so that the decision is the same on a busy machine."""
_SINGLE_TIMED_RUN_SECONDS = 0.3
"""A forward pass that takes more seconds is timed once, including one-time setup."""
_NUM_NOISE_RUNS = 3
"""Number of runs that measure the noise; one for a slow model."""
_CLEAR_DIFFERENCE_FACTOR = 100.0
"""A difference that exceeds the tolerance by this factor needs no noise measurement."""
_MAX_ROUNDING_RATIO = 1e-2
"""Maximum tolerance between two runs of the same forward pass, relative to the largest logit. It is above any rounding
error."""
T = TypeVar("T")
TensorFunction = Callable[[], Tensor]


class CheckContext:
    """The model under test, with random inputs, its measured rounding noise, and functions that compare outputs."""

    clock = staticmethod(time.monotonic)
    """Clock in seconds. Tests replace it, so that no result depends on how busy the machine is."""

    def __init__(self, model: CheckedModel, *, seed: int = 0, budget: float = 30.0) -> None:
        self.model, self.seed, self.budget = model, seed, budget
        self.start_time = self.clock()
        self.generator = torch.Generator().manual_seed(seed)
        self.noise_ratio = 0.0
        """The model's rounding noise relative to its largest output, measured by `calibrate`."""
        self.variation_ratio = 1.0
        """How much the outputs vary with the tokens, relative to the largest output, measured by `calibrate`."""
        self.seconds_per_forward = 0.0
        self.is_slow = False
        """Whether the model is slow, so that checks use fewer and shorter sequences."""
        self.calls = FunctionCalls(model)
        self.logits, vocab_size = require(model.logits), require(model.vocab_size)
        self._noise_of_equality = self._noise_of_difference = 0.0
        """Largest noise, relative to the variation of the outputs, of the comparisons of the current case whose results
        differ by no more than their tolerance; the second one is of results that must differ."""
        special = set(model.special_token_ids)
        allowed = [token for token in range(min(vocab_size, 50_000)) if token not in special]
        self.allowed_tokens = torch.tensor(allowed or list(range(vocab_size)))
        self.seq_len = model.supported_length(min(_DEFAULT_SEQ_LEN, model.max_seq_len or _DEFAULT_SEQ_LEN))
        self.uses_trig = True
        """Whether the last `trace_attention` recorded a cos or sin call; True before the first trace."""
        self.memo: dict[tuple[object, float], object] = {}
        """Results of `compute_once`."""
        self._logits_of_tokens: dict[tuple[object, ...], Tensor] = {}
        """Results of `base_logits`."""

    @property
    def module(self) -> nn.Module:
        """The nn.Module of the model under test, which must not be None."""
        return require(self.model.module)

    @property
    def seconds_left(self) -> float:
        """Remaining seconds of the time budget; negative if it is exceeded."""
        return self.budget - (self.clock() - self.start_time)

    # inputs
    def random_tokens(self, batch_size: int = 1, seq_len: int | None = None) -> Tensor:
        """Draw random token ids (B, T), without special tokens."""
        index = torch.randint(len(self.allowed_tokens), (batch_size, seq_len or self.seq_len), generator=self.generator)
        return self.allowed_tokens[index].to(self.model.device)

    def replace_tokens(self, tokens: Tensor, positions: slice = slice(None)) -> Tensor:
        """Return the tokens with each token at `positions` replaced by a random other token."""
        out = tokens.clone()
        index = torch.searchsorted(self.allowed_tokens, out[:, positions].cpu().contiguous())
        size = len(self.allowed_tokens)
        offset = torch.randint(1, max(2, size), index.shape, generator=self.generator)
        out[:, positions] = self.allowed_tokens[(index + offset) % size].to(out.device)
        return out

    def base_logits(self, tokens: Tensor) -> Tensor:
        """The logits of one forward pass over these tokens, which checks that draw the same tokens share.

        It is for results that another computation is compared with. A check that tests whether forward passes agree
        with each other, or that changes the module, calls `logits`.
        """
        key = (self.noise_ratio, tokens.shape, *tokens.flatten().tolist())
        if key not in self._logits_of_tokens:
            self._logits_of_tokens[key] = self.logits(tokens)
        return self._logits_of_tokens[key]

    # comparisons
    def switch_to_dtype(self, dtype: torch.dtype) -> None:
        """Use the tolerances and sequence lengths of a model in bf16 or fp16.

        `noise_ratio`, measured in fp32, is multiplied by the ratio of the two machine epsilons. Sequences become
        shorter, because a CPU can be slow in these dtypes.
        """
        self.noise_ratio *= torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
        low_precision_len = _LOW_PRECISION_SEQ_LEN // 2 if self.is_slow else _LOW_PRECISION_SEQ_LEN
        self.seq_len = self.model.supported_length(min(self.seq_len, low_precision_len))

    def calibrate(self) -> None:
        """Measure the rounding noise and the time of a forward pass on one sequence of the default length."""
        tokens = self.random_tokens()
        for _ in range(2):  # the first forward pass may include one-time setup
            start = self.clock()
            base = self.logits(tokens)
            self.seconds_per_forward = self.clock() - start
            if self.seconds_per_forward > _SINGLE_TIMED_RUN_SECONDS:
                break
        num_params = 0 if self.model.module is None else count_parameters(self.module)
        self.is_slow = num_params > _SLOW_MODEL_PARAMS or self.seconds_per_forward > _SLOW_FORWARD_SECONDS
        noise = self.measure_noise(lambda: self.logits(tokens), base)
        self.noise_ratio = noise / max(max_finite_abs(base), 1e-30)
        self.variation_ratio = output_variation(base) / max(max_finite_abs(base), 1e-30) or 1.0
        if self.is_slow:
            self.seq_len = self.model.supported_length(min(self.seq_len, _SLOW_MODEL_SEQ_LEN))

    def measure_noise(self, compute: TensorFunction, reference: Tensor | None = None) -> float:
        """Recompute a result with the random rounding of `RoundingNoise`; return its largest absolute change.

        `reference` is the result without random rounding; if it is None, it is computed.
        """
        reference = compute() if reference is None else reference
        worst = torch.zeros((), device=reference.device)
        for run in range(1 if self.is_slow else _NUM_NOISE_RUNS):
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
    ) -> Difference:
        """Compare two computations that must give the same result.

        If the result of a computation is already known, it is passed as `first_result` or `second_result`.

        The tolerance is `NOISE_MARGIN` times the noise from `calibrate`. If the difference exceeds the tolerance, the
        noise of these two computations is measured too, and the largest noise determines the tolerance.
        """
        a = compute_first() if first_result is None else first_result
        b = compute_second() if second_result is None else second_result
        if a.shape != b.shape:
            raise SkipCheckError(f"cannot compare results of shapes {tuple(a.shape)} and {tuple(b.shape)}")
        if a.numel() == 0:
            return Difference(0.0, 0.0, ())
        diff = max_difference(a, b)
        diff.tolerance = self.rounding_tolerance(a, b)
        self.record_match(diff, a, b)
        if diff.within_tolerance or diff.max_abs == float("inf"):  # rounding does not turn a number into NaN
            return diff
        noise = max(self.measure_noise(compute_first, a), self.measure_noise(compute_second, b))
        diff.tolerance = max(diff.tolerance, NOISE_MARGIN * noise)
        self.record_match(diff, a, b)
        return diff

    def compare_expecting_difference(
        self,
        compute_first: TensorFunction,
        compute_second: TensorFunction,
        *,
        first_result: Tensor,
        second_result: Tensor | None = None,
    ) -> Difference:
        """Compare two results that must differ.

        Their noise is measured only if the difference does not clearly exceed the tolerance from `calibrate`.
        """
        second = compute_second() if second_result is None else second_result
        if first_result.shape != second.shape:
            return Difference(float("inf"), 0.0, ())
        if second.isfinite().all() and first_result.isfinite().all():
            diff = max_difference(first_result, second)
            diff.tolerance = self.rounding_tolerance(first_result, second)
            if diff.max_abs > _CLEAR_DIFFERENCE_FACTOR * diff.tolerance:
                return diff
        diff = self.compare(compute_first, compute_second, first_result=first_result, second_result=second)
        if diff.within_tolerance:
            noise = self._relative_noise(diff, first_result, second)
            self._noise_of_difference = max(self._noise_of_difference, noise)
        return diff

    def compare_runs(self, first: Tensor, second: Tensor, rerun: TensorFunction) -> Difference:
        """Compare two runs of one forward pass, which are usually equal bit for bit. `rerun` runs it once more.

        The tolerance has an upper limit. If the model is random or keeps state, the runs that measure the noise change
        too, and this change must not count as rounding.
        """
        diff = max_difference(first, second)
        if diff.max_abs > 0.0:
            noise = NOISE_MARGIN * self.measure_noise(rerun, first)
            diff.tolerance = min(noise, _MAX_ROUNDING_RATIO * max_finite_abs(first))
        return diff

    def rounding_tolerance(self, *results: Tensor) -> float:
        """`NOISE_MARGIN` times `noise_ratio` times the largest finite absolute value of the results."""
        return NOISE_MARGIN * (self.noise_ratio * max(map(max_finite_abs, results)))

    def record_match(self, diff: Difference, *results: Tensor) -> None:
        """Record the noise of results that count as equal because they differ by no more than the tolerance.

        Results that are equal bit for bit are proven equal, whatever the noise is.
        """
        if diff.within_tolerance and diff.max_abs > 0.0:
            self._noise_of_equality = max(self._noise_of_equality, self._relative_noise(diff, *results))

    def _relative_noise(self, diff: Difference, *results: Tensor) -> float:
        """The noise behind the tolerance of a comparison, relative to how much the results vary with the tokens."""
        variation = self.variation_ratio * max(map(max_finite_abs, results))
        return diff.tolerance / NOISE_MARGIN / variation if variation > 0 else 0.0

    def weigh_case(self, case: CaseResult) -> CaseResult:
        """Return the case, or an inconclusive one if its verdict depends on a comparison that the noise decides.

        The record of comparisons is reset for the next case.
        """
        equality, difference = self._noise_of_equality, self._noise_of_difference
        self._noise_of_equality = self._noise_of_difference = 0.0
        noise = {"pass": equality, "warn": difference, "fail": difference}.get(case.verdict, 0.0)
        if noise <= MAX_CONCLUSIVE_NOISE:
            return case
        tested = "equality" if case.verdict == "pass" else "an effect"
        reason = f"the rounding noise is {noise:.0%} of the variation of the outputs, so {tested} cannot be tested"
        fix = (
            "check the model in fp32; if it is in fp32, remove the cancellation of large values that amplifies rounding"
        )
        return CaseResult("inconclusive", reason, noise, MAX_CONCLUSIVE_NOISE, case.location, fix=fix)

    def trace_attention(self, tokens: Tensor) -> list[AttentionCall]:
        """Record every attention call of one forward pass, in order. A single attention sink is the last key."""
        with OpTracer(self.model.module) as tracer:
            self.logits(tokens)
        self.uses_trig = bool(tracer.trig_calls)
        return [move_sink_last(call) for call in tracer.attentions]


def compute_once(compute: Callable[[CheckContext], T]) -> Callable[[CheckContext], T]:
    """Decorator for a function of the context: compute it once per model and dtype, and reuse the result."""

    @wraps(compute)
    def cached(ctx: CheckContext) -> T:
        key = (compute, ctx.noise_ratio)
        if key not in ctx.memo:
            ctx.memo[key] = compute(ctx)
        return cast("T", ctx.memo[key])

    return cached
