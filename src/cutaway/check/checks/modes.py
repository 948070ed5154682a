"""What a pass depends on beside its tokens: chance, earlier passes, the mode, who listens."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.dispatch import Dispatch
from cutaway.check.exam import MARGIN, Exam, Gap, apart, scale_of
from cutaway.check.finding import Part
from cutaway.check.reads import refuse_compiled
from cutaway.check.registry import check
from cutaway.check.target import Logits
from cutaway.check.where import first_difference
from cutaway.check.witness import Witness

SHARE = 1e-2
"""Of the largest logit: what no rounding of one and the same pass comes to."""


def seeded(logits: Logits, tokens: Tensor, seed: int) -> Tensor:
    """A pass from a given state of chance."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return logits(tokens)


@check(
    "eval-repeatable",
    catches="logits that depend on chance, or on what was read before: noise left on, a cache kept in the module",
    cause="dropout or another draw is not switched off by eval(), or a pass leaves something behind in the module",
    fix="draw only where self.training is true, and pass state as an argument instead of keeping it in the module",
    quick=True,
)
def eval_repeatable(exam: Exam) -> Iterator[Part]:
    """Read one text again from another state of chance, after other texts, and a tenth time: the logits must stay. Then
    see that a pass leaves the mode of every module as it was."""
    target = exam.target
    assert target.logits is not None
    logits, tokens = target.logits, exam.text()
    with torch.no_grad():
        given, before = tokens.clone(), beginnings(target.module)
        base = seeded(logits, given, exam.seed)
        if not torch.equal(given, tokens):
            at = int((given != tokens)[0].long().argmax())
            yield Part("fail", f"a pass changes the tokens that it is given, at position {at}", where=f"position {at}",
                       cause="an operation in place works on the caller's tensor",
                       fix="work on a copy: tokens.clone(), or masked_fill in place of masked_fill_")  # fmt: skip
            return
        for name, first in beginnings(target.module).items():
            if not torch.equal(first.nan_to_num(), before[name].nan_to_num()):
                yield Part("fail", f"a pass changes the weight {name}", where=name,
                           cause="weights are worked on in place", fix="compute from a copy of them")  # fmt: skip
                return
        yield judged(exam, logits, tokens, base, seeded(logits, tokens, exam.seed + 1), "from another random state")
        for rows, length in ((1, max(1, exam.length // 2)), (3, exam.length)):
            seeded(logits, exam.text(rows, length), exam.seed)
        yield judged(exam, logits, tokens, base, seeded(logits, tokens, exam.seed), "after other texts were read")
        if exam.seconds_a_pass < 0.02:
            for _ in range(7):
                tenth = seeded(logits, tokens, exam.seed)
            yield judged(exam, logits, tokens, base, tenth, "for the tenth time")
    if target.module is not None:
        yield modes_kept(exam, target.module)


def beginnings(module: nn.Module | None) -> dict[str, Tensor]:
    """The first numbers of each parameter: what works on weights works on these too."""
    found = {} if module is None else dict(module.named_parameters())
    return {name: each.detach().reshape(-1)[:256].clone() for name, each in found.items() if not each.is_meta}


def judged(exam: Exam, logits: Logits, tokens: Tensor, base: Tensor, other: Tensor, when: str) -> Part:
    """One pass against another. The noise is measured from one state of chance, and is never taken for more than a
    rounding: a model that draws its logits must not be excused by its own noise."""
    gap = apart(base, other)
    if gap.worst == 0.0:
        return Part("pass", f"the same logits {when}", 0.0, 0.0)
    noise = exam.noise(lambda: seeded(logits, tokens, exam.seed), base)
    gap = Gap(gap.worst, min(MARGIN * noise, SHARE * scale_of(base)), gap.index)
    where = None
    if not gap.ok:
        where = first_difference(
            exam, lambda: seeded(logits, tokens, exam.seed), lambda: seeded(logits, tokens, exam.seed + 1)
        )
    return exam.judge(gap, held=f"the same logits {when}", broken=f"other logits {when}", where=where)


def modes_kept(exam: Exam, module: nn.Module) -> Part:
    """Whether a pass leaves the modes as they were; mode-restored asks the same of writing."""
    logits, tokens = exam.target.logits, exam.text(1, min(4, exam.length))
    assert logits is not None
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        logits(tokens)
    changed = [path for path, part in module.named_modules() if part.training]
    module.eval()
    if changed:
        return Part("fail", f"a pass leaves {changed[0] or 'the model'} in training mode", where=changed[0] or None)
    return Part("pass", "a pass leaves the mode as it was")


class Draws(Dispatch):
    """While it is on, it is counted how often a mask is drawn; on the lowest level, where no caller can be missed."""

    def __init__(self, witness: Witness) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.witness = witness
        self.at: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if name in ("bernoulli", "bernoulli_", "native_dropout", "_fused_dropout"):
            self.at.append(self.witness.at[-1])
        return func(*args, **(kwargs or {}))


@check(
    "dropout-off",
    catches="dropout that eval() does not switch off: every answer is a worse one, and no two are alike",
    cause="F.dropout without training=self.training, dropout_p given to a fused kernel, or a module that eval() misses",
    fix="use nn.Dropout, or pass training=self.training (and dropout_p=0.0 in eval) to the function",
    quick=True,
)
def dropout_off(exam: Exam) -> Part:
    """Watch a pass in eval mode for any dropout: PyTorch's functions, a fused kernel's own, or a mask drawn by hand."""
    target = exam.target
    assert target.logits is not None
    with torch.no_grad(), Witness(target.module) as witness, Draws(witness) as draws:
        target.logits(exam.text())
    for dropped in witness.dropped:
        if dropped.training and dropped.share > 0:
            message = f"dropout of {dropped.share:g} is on in eval mode"
            return Part("fail", message, dropped.share, 0.0, dropped.module or None)
    for attention in witness.attentions:
        if attention.dropout > 0:
            message = f"attention drops {attention.dropout:g} of its pattern in eval mode"
            return Part("fail", message, attention.dropout, 0.0, attention.module or None)
    if draws.at:
        return Part("fail", "a mask is drawn at random in eval mode", len(draws.at), 0, draws.at[0] or None)
    return Part("pass", f"nothing is dropped ({len(witness.dropped)} dropouts are off)")


@contextmanager
def listening(module: nn.Module, ran: Counter[str], fired: Counter[str]) -> Iterator[None]:
    """While it lasts, it is counted how often each module's forward runs, and how often its hook is told."""
    handles: list[Any] = []
    before: list[tuple[nn.Module, Any]] = []

    def counting(name: str, forward: Any) -> Any:
        @wraps(forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            ran[name] += 1
            return forward(*args, **kwargs)

        return counted

    def told(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            fired[name] += 1

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


@check(
    "hooks",
    catches="modules that are run past their hooks, so that tracing, LoRA, FSDP and quantisation miss them",
    cause="module.forward(x) is called instead of module(x), or a path of its own is taken when a hook is there",
    fix="call the module itself",
    needs=("logits", "module"),
)
def hooks(exam: Exam) -> Iterator[Part]:
    """Put a hook on every module: it must be told each time that the module's forward runs, and a hook that only
    listens must change nothing."""
    module = exam.target.module
    assert module is not None
    assert exam.target.logits is not None
    refuse_compiled(module)
    logits, tokens = exam.target.logits, exam.text()
    ran: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    with torch.no_grad():
        plain = logits(tokens)
        with listening(module, ran, fired):
            heard = logits(tokens)
    missed = [name for name in ran if name and fired[name] < ran[name]]
    if missed:
        message = f"{missed[0]} ran {ran[missed[0]]} times and its hook was told {fired[missed[0]]} times"
        yield Part("fail", message, ran[missed[0]] - fired[missed[0]], 0, missed[0])
    else:
        yield Part("pass", f"the hooks of all {len(ran)} modules that ran were told")

    def listened() -> Tensor:
        with listening(module, Counter(), Counter()):
            return logits(tokens)

    gap = apart(plain, heard)
    gap = Gap(0.0, 0.0, ()) if gap.worst == 0.0 else exam.same(lambda: logits(tokens), listened, first=plain)
    yield exam.judge(
        gap, held="a hook that only listens changes nothing", broken="a hook that only listens changes the logits"
    )
