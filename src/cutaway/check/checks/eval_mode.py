"""Evaluation mode checks: eval-determinism, eval-dropout, forward-hooks."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from cutaway.check.checked_model import LogitsFunction
from cutaway.check.context import CheckContext
from cutaway.check.module_state import fork_rng, is_compiled, require_uncompiled
from cutaway.check.numerics import Args, EagerDispatchMode, Kwargs, TorchFunction, max_difference, op_name
from cutaway.check.probes.first_divergence import find_first_divergence
from cutaway.check.probes.op_tracer import OpTracer
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, failure, success

_NUM_RANDOM_RUNS = 20
"""Number of runs with other random states of a model that draws random numbers in eval mode."""
_EMPTY_FUNCTIONS = (torch.empty, torch.empty_like, Tensor.new_empty)
_EMPTY_CAUSE = "a tensor of torch.empty is read before all of its values are written"
_EMPTY_FIX = "use torch.zeros, or write or mask every value that is read"


def _forward_with_seed(logits: LogitsFunction, tokens: Tensor, seed: int) -> Tensor:
    """Run a forward pass with a seeded random state."""
    with fork_rng():
        torch.manual_seed(seed)
        return logits(tokens)


@register_check("eval-determinism", preflight=True)
def eval_determinism(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches logits that depend on the random state or on earlier forward passes: noise left on, state in the module.

    Run one sequence with another random state (several ones if the model draws random numbers), after other sequences,
    ten times, and with other values in uninitialized tensors: the logits must be equal. A forward pass must not change
    its input, the parameters, or the training flag of any module.

    Cause: eval() does not disable dropout or other random ops, or a forward pass leaves state in the module.
    Fix: use randomness only if self.training is True, and pass state as an argument instead of storing it.
    """
    model = ctx.model
    logits, tokens = ctx.logits, ctx.random_tokens()
    inputs, before = tokens.clone(), _sample_parameters(model.module)
    base = _forward_with_seed(logits, inputs, ctx.seed)
    if not torch.equal(inputs, tokens):
        position = int((inputs != tokens)[0].long().argmax())
        yield failure(
            f"a forward pass changes its input tokens, at position {position}",
            location=f"position {position}",
            cause="an in-place op changes the caller's tensor",
            fix="use a copy: tokens.clone(), or masked_fill instead of masked_fill_",
        )
        return
    for name, first in _sample_parameters(model.module).items():
        if not torch.equal(first.nan_to_num(), before[name].nan_to_num()):
            yield failure(
                f"a forward pass changes the parameter {name}",
                location=name,
                cause="an in-place op changes a parameter",
                fix="use an out-of-place op, or a copy of the parameter",
            )
            return
    if not ctx.is_slow and (case := _check_uninitialized_memory(ctx, tokens)) is not None:
        yield case
    other = _forward_with_seed(logits, tokens, ctx.seed + 1)
    yield _compare_runs(ctx, tokens, base, other, "with another random state")
    if _draws_random_numbers(ctx, tokens):  # a rare random event may not occur in two runs
        for seed in range(2, 2 + _NUM_RANDOM_RUNS):
            other = _forward_with_seed(logits, tokens, ctx.seed + seed)
            if not torch.equal(other, base):
                yield _compare_runs(ctx, tokens, base, other, "with another random state")
                break
    for batch_size, length in ((1, max(1, ctx.seq_len // 2)), (3, ctx.seq_len)):
        _forward_with_seed(logits, ctx.random_tokens(batch_size, length), ctx.seed)
    other = _forward_with_seed(logits, tokens, ctx.seed)
    yield _compare_runs(ctx, tokens, base, other, "after other sequences")
    if ctx.seconds_per_forward < 0.02:
        for _ in range(7):
            tenth = _forward_with_seed(logits, tokens, ctx.seed)
        yield _compare_runs(ctx, tokens, base, tenth, "in the tenth run")
    if model.module is not None:
        yield _check_mode_preserved(ctx, model.module)


def _draws_random_numbers(ctx: CheckContext, tokens: Tensor) -> bool:
    """Whether a forward pass on the CPU advances torch's random state."""
    if ctx.is_slow or tokens.device.type != "cpu":
        return False
    with fork_rng():
        before = torch.get_rng_state()
        ctx.logits(tokens)
        return not torch.equal(before, torch.get_rng_state())


class _FillEmpty(TorchFunctionMode):
    """Function mode that fills uninitialized floating-point tensors, such as those of torch.empty, with a multiple of a
    pattern."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.num_filled = value, 0

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY_FUNCTIONS and isinstance(out, Tensor) and out.is_floating_point():
            pattern = (
                torch.arange(out.numel(), device=out.device).remainder(7) - 3
            )  # a constant may cancel in a softmax
            out.copy_(self.value * pattern.reshape(out.shape))
            self.num_filled += 1
        return out


def _check_uninitialized_memory(ctx: CheckContext, tokens: Tensor) -> CaseResult | None:
    """Check that the values in uninitialized tensors do not change the logits; None if there are no such tensors."""
    if ctx.model.module is not None and is_compiled(ctx.model.module):
        return None
    with _FillEmpty(0.5) as mode:
        filled = _forward_with_seed(ctx.logits, tokens, ctx.seed)
    if not mode.num_filled:
        return None
    with _FillEmpty(-2.0):
        other = _forward_with_seed(ctx.logits, tokens, ctx.seed)

    def run() -> Tensor:
        with _FillEmpty(0.5):
            return _forward_with_seed(ctx.logits, tokens, ctx.seed)

    diff = ctx.compare_runs(filled, other, run)
    if diff.within_tolerance:
        return success("uninitialized tensors do not change the logits")
    message = "the logits depend on uninitialized memory, such as of torch.empty"
    return diff.failure(message, cause=_EMPTY_CAUSE, fix=_EMPTY_FIX)


def _sample_parameters(module: nn.Module | None) -> dict[str, Tensor]:
    """Copies of the first values of each parameter, to detect in-place changes."""
    params = {} if module is None else dict(module.named_parameters())
    return {name: param.detach().reshape(-1)[:256].clone() for name, param in params.items() if not param.is_meta}


def _compare_runs(ctx: CheckContext, tokens: Tensor, first: Tensor, second: Tensor, condition: str) -> CaseResult:
    """Compare the logits of two runs of the same tokens. `condition` describes the second run in the message."""

    def run(seed: int = ctx.seed) -> Tensor:
        return _forward_with_seed(ctx.logits, tokens, seed)

    diff = ctx.compare_runs(first, second, run)
    location = None if diff.within_tolerance else find_first_divergence(ctx, run, lambda: run(ctx.seed + 1))
    return diff.expect_equal(
        passed=f"the logits are equal {condition}", failed=f"the logits differ {condition}", location=location
    )


def _check_mode_preserved(ctx: CheckContext, module: nn.Module) -> CaseResult:
    """Check that a forward pass changes no module's training flag. (The check mode-restored does so for generation.)"""
    logits, tokens = ctx.logits, ctx.random_tokens(1, min(4, ctx.seq_len))
    submodules = dict(module.named_modules())  # without those that the forward pass may add, such as a cache
    with fork_rng():
        logits(tokens)
    changed = [name for name, submodule in submodules.items() if submodule.training]
    module.eval()
    if changed:
        return failure(
            f"a forward pass leaves {changed[0] or 'the model'} in training mode", location=changed[0] or None
        )
    return success("a forward pass keeps the mode of every module")


class _RandomMaskTracer(EagerDispatchMode):
    """Dispatch mode that records the module of every op that draws a random mask, whatever function called the op."""

    def __init__(self, op_tracer: OpTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op_tracer = op_tracer
        self.module_paths: list[str] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if op_name(func) in ("bernoulli", "bernoulli_", "native_dropout", "_fused_dropout"):
            self.module_paths.append(self.op_tracer.module_stack[-1])
        return func(*args, **(kwargs or {}))


@register_check("eval-dropout", preflight=True)
def eval_dropout(ctx: CheckContext) -> CaseResult:
    """Catches dropout that is active in eval mode: outputs are worse, and differ between runs.

    Trace a forward pass in eval mode: no dropout function may be active, no fused kernel may have dropout_p > 0, and no
    random mask may be drawn.

    Cause: F.dropout without training=self.training, dropout_p in a fused kernel, or a module that eval() misses.
    Fix: use nn.Dropout, or pass training=self.training (and dropout_p=0.0 in eval) to the function.
    """
    with OpTracer(ctx.model.module) as tracer, _RandomMaskTracer(tracer) as random_masks:
        ctx.logits(ctx.random_tokens())
    for dropout in tracer.dropouts:
        if dropout.training and dropout.p > 0:
            message = f"dropout with p={dropout.p:g} is active in eval mode"
            return failure(message, dropout.p, 0.0, dropout.module or None)
    for attention in tracer.attentions:
        if attention.dropout_p > 0:
            message = f"attention dropout with p={attention.dropout_p:g} is active in eval mode"
            return failure(message, attention.dropout_p, 0.0, attention.module or None)
    if paths := random_masks.module_paths:
        return failure("a random mask is drawn in eval mode", len(paths), 0, paths[0] or None)
    return success(f"no dropout is active ({len(tracer.dropouts)} dropout calls are disabled)")


@contextmanager
def _count_forward_calls(module: nn.Module, num_forwards: Counter[str], num_hook_calls: Counter[str]) -> Iterator[None]:
    """Count how often each module's forward runs, and how often its forward hook is called."""

    def count_forward(name: str, forward: TorchFunction, *args: object, **kwargs: object) -> object:
        num_forwards[name] += 1
        return forward(*args, **kwargs)

    def count_hook(name: str, *_: object) -> None:
        num_hook_calls[name] += 1

    with ExitStack() as stack:
        for name, submodule in module.named_modules():
            stack.enter_context(submodule.register_forward_hook(partial(count_hook, name)))
            counted = wraps(submodule.forward)(partial(count_forward, name, submodule.forward))
            stack.enter_context(patch.object(submodule, "forward", counted))
        yield


@register_check("forward-hooks", needs=("logits", "module"))
def forward_hooks(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches modules that run without their forward hooks, so that tracing, LoRA, FSDP and quantization miss them.

    Register a forward hook on every module: it must be called each time the module's forward runs, and a hook that
    changes nothing must not change the logits.

    Cause: module.forward(x) is called instead of module(x), or another code path is used if there are hooks.
    Fix: call the module: module(x).
    """
    module = ctx.module
    require_uncompiled(module)
    logits, tokens = ctx.logits, ctx.random_tokens()
    num_forwards: Counter[str] = Counter()
    num_hook_calls: Counter[str] = Counter()
    base = ctx.base_logits(tokens)
    with _count_forward_calls(module, num_forwards, num_hook_calls):
        hooked = logits(tokens)
    missed = [name for name in num_forwards if name and num_hook_calls[name] < num_forwards[name]]
    if missed:
        name = missed[0]
        message = f"{name} ran {num_forwards[name]} times, but its hook was called {num_hook_calls[name]} times"
        yield failure(message, num_forwards[name] - num_hook_calls[name], 0, name)
    else:
        yield success(f"the hooks of all {len(num_forwards)} modules that ran were called")

    def hooked_logits() -> Tensor:
        with _count_forward_calls(module, Counter(), Counter()):
            return logits(tokens)

    diff = max_difference(base, hooked)
    if diff.max_abs > 0.0:
        diff = ctx.compare(lambda: logits(tokens), hooked_logits, first_result=base)
    yield diff.expect_equal(passed="forward hooks do not change the logits", failed="forward hooks change the logits")
