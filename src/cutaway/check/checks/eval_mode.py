"""What a pass depends on beside its tokens: chance, earlier passes, the mode, who listens."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import LogitsFunction
from cutaway.check.context import CheckContext
from cutaway.check.module_state import require_uncompiled
from cutaway.check.numerics import NOISE_MARGIN, Difference, max_difference, max_finite_abs
from cutaway.check.probes.first_divergence import find_first_divergence
from cutaway.check.probes.op_tracer import EagerDispatchMode, OpTracer
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult

MAX_ROUNDING_RATIO = 1e-2
"""Of the largest logit: what no rounding of one and the same pass comes to."""


def _forward_with_seed(logits: LogitsFunction, tokens: Tensor, seed: int) -> Tensor:
    """A pass from a given state of chance."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return logits(tokens)


@register_check(
    "eval-determinism",
    catches="logits that depend on chance, or on what was read before: noise left on, a cache kept in the module",
    cause="dropout or another draw is not switched off by eval(), or a pass leaves something behind in the module",
    fix="draw only where self.training is true, and pass state as an argument instead of keeping it in the module",
    preflight=True,
)
def eval_determinism(context: CheckContext) -> Iterator[CaseResult]:
    """Read one text again from another state of chance, after other texts, and a tenth time: the logits must stay. Then
    see that a pass leaves the mode of every module as it was."""
    target = context.model
    assert target.logits is not None
    logits, tokens = target.logits, context.random_tokens()
    with torch.no_grad():
        given, before = tokens.clone(), _sample_parameters(target.module)
        base = _forward_with_seed(logits, given, context.seed)
        if not torch.equal(given, tokens):
            at = int((given != tokens)[0].long().argmax())
            yield CaseResult(
                "fail",
                f"a pass changes the tokens that it is given, at position {at}",
                location=f"position {at}",
                cause="an operation in place works on the caller's tensor",
                fix="work on a copy: tokens.clone(), or masked_fill in place of masked_fill_",
            )
            return
        for name, first in _sample_parameters(target.module).items():
            if not torch.equal(first.nan_to_num(), before[name].nan_to_num()):
                yield CaseResult(
                    "fail",
                    f"a pass changes the weight {name}",
                    location=name,
                    cause="weights are worked on in place",
                    fix="compute from a copy of them",
                )
                return
        yield _compare_runs(
            context,
            logits,
            tokens,
            base,
            _forward_with_seed(logits, tokens, context.seed + 1),
            "from another random state",
        )
        for rows, length in ((1, max(1, context.seq_len // 2)), (3, context.seq_len)):
            _forward_with_seed(logits, context.random_tokens(rows, length), context.seed)
        yield _compare_runs(
            context,
            logits,
            tokens,
            base,
            _forward_with_seed(logits, tokens, context.seed),
            "after other texts were read",
        )
        if context.seconds_per_forward < 0.02:
            for _ in range(7):
                tenth = _forward_with_seed(logits, tokens, context.seed)
            yield _compare_runs(context, logits, tokens, base, tenth, "for the tenth time")
    if target.module is not None:
        yield _check_mode_preserved(context, target.module)


def _sample_parameters(module: nn.Module | None) -> dict[str, Tensor]:
    """The first numbers of each parameter: what works on weights works on these too."""
    found = {} if module is None else dict(module.named_parameters())
    return {name: each.detach().reshape(-1)[:256].clone() for name, each in found.items() if not each.is_meta}


def _compare_runs(
    context: CheckContext,
    logits: LogitsFunction,
    tokens: Tensor,
    first_logits: Tensor,
    second_logits: Tensor,
    condition: str,
) -> CaseResult:
    """One pass against another. The noise is measured from one state of chance, and is never taken for more than a
    rounding: a model that draws its logits must not be excused by its own noise."""
    gap = max_difference(first_logits, second_logits)
    if gap.max_abs == 0.0:
        return CaseResult("pass", f"the same logits {condition}", 0.0, 0.0)
    noise = context.measure_noise(lambda: _forward_with_seed(logits, tokens, context.seed), first_logits)
    gap = Difference(
        gap.max_abs, min(NOISE_MARGIN * noise, MAX_ROUNDING_RATIO * max_finite_abs(first_logits)), gap.index
    )
    where = None
    if not gap.within_tolerance:
        where = find_first_divergence(
            context,
            lambda: _forward_with_seed(logits, tokens, context.seed),
            lambda: _forward_with_seed(logits, tokens, context.seed + 1),
        )
    return context.expect_equal(
        gap, passed=f"the same logits {condition}", failed=f"other logits {condition}", location=where
    )


def _check_mode_preserved(context: CheckContext, module: nn.Module) -> CaseResult:
    """Whether a pass leaves the modes as they were; mode-restored asks the same of writing."""
    logits, tokens = context.model.logits, context.random_tokens(1, min(4, context.seq_len))
    assert logits is not None
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        logits(tokens)
    changed = [path for path, part in module.named_modules() if part.training]
    module.eval()
    if changed:
        return CaseResult(
            "fail", f"a pass leaves {changed[0] or 'the model'} in training mode", location=changed[0] or None
        )
    return CaseResult("pass", "a pass leaves the mode as it was")


class RandomMaskTracer(EagerDispatchMode):
    """While it is on, it is counted how often a mask is drawn; on the lowest level, where no caller can be missed."""

    def __init__(self, op_tracer: OpTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op_tracer = op_tracer
        self.module_paths: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if name in ("bernoulli", "bernoulli_", "native_dropout", "_fused_dropout"):
            self.module_paths.append(self.op_tracer.module_stack[-1])
        return func(*args, **(kwargs or {}))


@register_check(
    "eval-dropout",
    catches="dropout that eval() does not switch off: every answer is a worse one, and no two are alike",
    cause="F.dropout without training=self.training, dropout_p given to a fused kernel, or a module that eval() misses",
    fix="use nn.Dropout, or pass training=self.training (and dropout_p=0.0 in eval) to the function",
    preflight=True,
)
def eval_dropout(context: CheckContext) -> CaseResult:
    """Watch a pass in eval mode for any dropout: PyTorch's functions, a fused kernel's own, or a mask drawn by hand."""
    target = context.model
    assert target.logits is not None
    with torch.no_grad(), OpTracer(target.module) as witness, RandomMaskTracer(witness) as draws:
        target.logits(context.random_tokens())
    for dropped in witness.dropouts:
        if dropped.training and dropped.p > 0:
            message = f"dropout of {dropped.p:g} is on in eval mode"
            return CaseResult("fail", message, dropped.p, 0.0, dropped.module or None)
    for attention in witness.attentions:
        if attention.dropout_p > 0:
            message = f"attention drops {attention.dropout_p:g} of its pattern in eval mode"
            return CaseResult("fail", message, attention.dropout_p, 0.0, attention.module or None)
    if draws.module_paths:
        return CaseResult(
            "fail", "a mask is drawn at random in eval mode", len(draws.module_paths), 0, draws.module_paths[0] or None
        )
    return CaseResult("pass", f"nothing is dropped ({len(witness.dropouts)} dropouts are off)")


@contextmanager
def _count_forward_calls(module: nn.Module, num_forwards: Counter[str], num_hook_calls: Counter[str]) -> Iterator[None]:
    """While it lasts, it is counted how often each module's forward runs, and how often its hook is told."""
    handles: list[Any] = []
    before: list[tuple[nn.Module, Any]] = []

    def counting(name: str, forward: Any) -> Any:
        @wraps(forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            num_forwards[name] += 1
            return forward(*args, **kwargs)

        return counted

    def told(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            num_hook_calls[name] += 1

        return count

    try:
        for name, part in module.named_modules():
            handles.append(part.register_forward_hook(told(name)))
            before.append((part, part.__dict__.get("forward")))
            part.__dict__["forward"] = counting(name, part.forward)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for part, forward in before:
            del part.__dict__["forward"]
            if forward is not None:
                part.__dict__["forward"] = forward


@register_check(
    "forward-hooks",
    catches="modules that are run past their hooks, so that tracing, LoRA, FSDP and quantization miss them",
    cause="module.forward(x) is called instead of module(x), or a path of its own is taken when a hook is there",
    fix="call the module itself",
    needs=("logits", "module"),
)
def forward_hooks(context: CheckContext) -> Iterator[CaseResult]:
    """Put a hook on every module: it must be told each time that the module's forward runs, and a hook that only
    listens must change nothing."""
    module = context.model.module
    assert module is not None
    assert context.model.logits is not None
    require_uncompiled(module)
    logits, tokens = context.model.logits, context.random_tokens()
    ran: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    with torch.no_grad():
        plain = logits(tokens)
        with _count_forward_calls(module, ran, fired):
            heard = logits(tokens)
    missed = [name for name in ran if name and fired[name] < ran[name]]
    if missed:
        message = f"{missed[0]} ran {ran[missed[0]]} times and its hook was told {fired[missed[0]]} times"
        yield CaseResult("fail", message, ran[missed[0]] - fired[missed[0]], 0, missed[0])
    else:
        yield CaseResult("pass", f"the hooks of all {len(ran)} modules that ran were told")

    def listened() -> Tensor:
        with _count_forward_calls(module, Counter(), Counter()):
            return logits(tokens)

    gap = max_difference(plain, heard)
    gap = (
        Difference(0.0, 0.0, ())
        if gap.max_abs == 0.0
        else context.compare(lambda: logits(tokens), listened, first_result=plain)
    )
    yield context.expect_equal(
        gap, passed="a hook that only listens changes nothing", failed="a hook that only listens changes the logits"
    )
