"""Whether a step in pieces, or with less memory, is the same step."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from cutaway.check.checks.learning import SAMPLED, gradients, trained_tensors
from cutaway.check.checks.loss import Settled, offered
from cutaway.check.entropy import HIDDEN
from cutaway.check.exam import Exam
from cutaway.check.finding import Part
from cutaway.check.reads import refuse_compiled
from cutaway.check.registry import check


@check(
    "accumulation",
    catches="gradient accumulation that is not the whole batch: short pieces weigh as much as long ones",
    cause="each piece's mean is taken, and the means are averaged, however many labels each piece has",
    fix="sum the losses of all pieces, and divide by the count of labels in all of them",
    needs=("loss", "accumulated"),
    after=("rows-apart", "loss-shift", "loss-uniform", "loss-pads"),
)
@torch.no_grad()
def accumulation(exam: Exam) -> Iterator[Part]:
    """Cut a batch into pieces with few and many labels: accumulated, they must have the loss of the whole batch."""
    assert exam.target.accumulated is not None
    accumulated = exam.target.accumulated
    tokens = exam.text(3)
    labels = tokens.clone()
    labels[0, 3:] = HIDDEN
    pieces = [(tokens[:1], labels[:1]), (tokens[1:], labels[1:])]
    summed: Callable[[], Tensor] = lambda: accumulated(pieces).float().reshape(1)  # noqa: E731
    with Settled(exam, tokens):
        whole = offered(exam, tokens, labels)
        means = [float(offered(exam, *piece)) for piece in pieces]
        gap = exam.same(lambda: offered(exam, tokens, labels), summed, first=whole)
        gap.bound = max(gap.bound, 1e-5 * max(1.0, abs(float(whole))))
        value = float(summed())
    known = {"the mean of the pieces' means": sum(means) / 2, "the sum of the pieces' means": sum(means)}
    why = next((f"; it is {name}" for name, other in known.items() if abs(value - other) <= gap.bound), "")
    broken = f"two pieces accumulate to {value:.4g}, and the whole batch has a loss of {float(whole):.4g}{why}"
    yield exam.judge(gap, held="accumulated pieces are the whole batch", broken=broken)


@check(
    "recomputation",
    catches="activation checkpointing that changes what is learned: other dropout masks, or gradients that are lost",
    cause="the second pass draws anew or sees other state, or inputs without a gradient cut the graph (reentrant)",
    fix="torch.utils.checkpoint with use_reentrant=False and preserve_rng_state=True",
    needs=("logits", "module", "recomputed"),
)
def recomputation(exam: Exam) -> Iterator[Part]:
    """In training mode, from one state of chance: the loss and the gradients with recomputation must be those without,
    as the model is, and with its dropouts at 0.3."""
    target = exam.target
    assert target.module is not None
    assert target.recomputed is not None
    module, switch = target.module, target.recomputed
    refuse_compiled(module)
    tokens = exam.text(1, min(8, exam.length))

    def made(on: bool) -> Tensor:
        module.train()
        switch(on)
        try:
            return gradients(exam, tokens)
        finally:
            switch(False)
            module.eval()

    drops = [part for part in module.modules() if isinstance(part, nn.Dropout)]
    shares = [part.p for part in drops]
    try:
        for share in (None, 0.3) if drops and not exam.slow else (None,):
            for part in drops if share is not None else ():
                part.p = share  # type: ignore[assignment]
            plain = made(False)
            gap = exam.same(lambda: made(False), lambda: made(True), first=plain, gradients=True)
            when = "" if share is None else f" with dropout of {share:g}"
            held = f"loss and gradients are the same with recomputation{when}"
            part_ = exam.judge(gap, held=held, broken=f"recomputation changes the loss or the gradients{when}")
            part_.where = part_.where or (place(exam, gap.index[0]) if not gap.ok else None)
            yield part_
    finally:
        for part, p in zip(drops, shares, strict=True):
            part.p = p


def place(exam: Exam, index: int) -> str:
    """Which parameter's gradient a number of the sample is of."""
    if index == 0:
        return "the loss"
    seen = 1
    for name, each in trained_tensors(exam).items():
        seen += len(range(0, each.numel(), max(1, each.numel() // SAMPLED)))
        if index < seen:
            return f"the gradient of {name}"
    return ""
