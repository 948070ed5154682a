"""What a model holds: its weights and buffers after saving and loading, its ties, its modes, its settings."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cutaway.check.again import again, copied, shared, standing_in
from cutaway.check.exam import CannotError, Exam, apart, scale_of
from cutaway.check.finding import Part
from cutaway.check.reads import Reads, refuse_compiled
from cutaway.check.registry import check

ELSEWHERE = ("expert", "vision", "visual", "image", "audio", "speech", "pooler")
"""Parts that logits need not reach: experts that no token chose, towers that read no text, a vector for sentences."""
PLAIN = 1000
"""Times the noise: plainly another result."""
FEW = 3
"""Names that a message gives."""


def few(names: list[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more


@check(
    "config-fields",
    catches="a setting that is read and then dropped: a soft-cap, window or scale that changes nothing",
    cause="the setting is stored in the configuration and never passed on, or only on another path (another kernel)",
    fix="pass it to the code that should use it, or refuse a value that this code does not honour",
    needs=("logits", "variants"),
    after=("dropout-off", "eval-repeatable"),
)
def config_fields(exam: Exam) -> Iterator[Part]:
    """Change each setting alone, with the same weights: the logits must change, or the setting must be refused."""
    target = exam.target
    assert target.logits is not None
    assert target.variants is not None
    tokens = exam.text()
    tried: list[str] = []
    refused: list[str] = []
    made = dict(target.variants())
    base = made.pop("")() if "" in made else target.logits
    with torch.no_grad():
        first = base(tokens)
    for name, make in made.items():
        if exam.left <= 0:
            break
        try:
            other = make()
            with torch.no_grad():
                second = other(tokens)
        except (ValueError, NotImplementedError, TypeError, KeyError):
            refused.append(name)
            continue
        tried.append(name)
        # What is plainly another result needs no noise to be judged by: there are many settings, and this is quick.
        if second.shape == first.shape and apart(first, second).worst <= PLAIN * exam.ratio * scale_of(first):
            gap = exam.same(lambda: base(tokens), lambda: other(tokens), first=first)
            if gap.ok:
                yield Part("fail", f"the setting {name} changes nothing", gap.worst, gap.bound, name)
    if not tried and not refused:
        raise CannotError("there is no setting to try")
    yield Part("pass", f"{len(tried)} settings change the logits, {len(refused)} are refused")


@check(
    "meta-buffers",
    catches="buffers that are lost when a model is made on the meta device: frequencies of zeros, masks of garbage",
    cause="a buffer that is not saved is computed in __init__ only, where the meta device keeps no numbers",
    fix="compute it anew after loading (from the configuration), or save it with the weights",
    needs=("logits", "module"),
)
def meta_buffers(exam: Exam) -> Iterator[Part]:
    """Look for NaN in buffers. Fill a model of shapes alone with these weights, as loading does: it must give the same
    logits, and its buffers must be those of a fresh model."""
    target, module = exam.target, exam.target.module
    assert module is not None
    assert target.logits is not None
    logits = target.logits
    bad = [name for name, each in module.named_buffers() if each.is_floating_point() and bool(each.isnan().any())]
    if bad:
        yield Part("fail", f"buffer {few(bad)} holds NaN", where=bad[0])
        return
    if target.from_shapes is not None:
        other = target.from_shapes()
        tokens = exam.text()

        def filled() -> Tensor:
            with standing_in(module, other.eval()):
                return logits(tokens)

        gap = exam.same(lambda: logits(tokens), filled)
        lost = lost_buffers(module, other)
        yield exam.judge(
            gap,
            held="made on the meta device and filled, it gives the same logits",
            broken="made on the meta device and filled with the same weights, it gives other logits",
            where=few(lost) or None,
        )
        return
    if target.reloaded is None and target.make is None:
        raise CannotError("needs make, reloaded or from_shapes")
    found = again(exam)
    if found.apart and not found.gap.ok:
        message = f"buffer {few(found.apart)} is not what a model that is loaded anew has, and the logits differ"
        yield Part("fail", message, found.gap.worst, found.gap.bound, found.apart[0])
        return
    yield Part("pass", "the buffers are those of a model that is loaded anew")


def lost_buffers(module: nn.Module, other: nn.Module) -> list[str]:
    """Names of buffers that differ."""
    mine = dict(module.named_buffers())
    return [
        name
        for name, each in other.named_buffers()
        if name in mine and (each.shape != mine[name].shape or apart(each, mine[name]).worst > 1e-6)
    ]


@check(
    "ties",
    catches="a head that is silently no longer the embedding (or shares it against the configuration)",
    cause="the weights were copied instead of shared, or the tie was lost in loading, copying or moving the model",
    fix="share the module or the Parameter itself, and tie again after loading",
    needs=("logits", "module"),
)
def ties(exam: Exam) -> Iterator[Part]:
    """See which table is looked up and which matrix makes the logits: one storage if they are tied, two if not. Copy
    the model, and save and load it where that can be done: what was one tensor must be one again."""
    module, target = exam.target.module, exam.target
    assert module is not None
    refuse_compiled(module)
    yield from head_and_table(exam, module)
    before = shared(module)
    try:
        yield from lost_ties(before, shared(copied(module)), "copied")
        if target.reloaded is not None or target.make is not None:
            yield from lost_ties(before, shared(again(exam).module), "saved and loaded again")
    except CannotError as error:
        yield Part("skip", f"skipped: {error}")


def head_and_table(exam: Exam, module: nn.Module) -> Iterator[Part]:
    """Whether the head is the embedding, against what is said of it."""
    target = exam.target
    assert target.logits is not None
    with torch.no_grad(), Reads(module, target.vocab) as reads:
        target.logits(exam.text())
    if reads.head is None or not reads.tables:
        yield Part("skip", "skipped: it cannot be seen which matrix makes the logits")
        return
    head, tables = reads.names[reads.head][0], [reads.names[at][0] for at in reads.tables]
    one = reads.head in reads.tables
    values = dict(module.named_parameters(remove_duplicate=False))
    twins = [each for each in tables if values[each].shape == values[head].shape]
    equal = [each for each in twins if not one and torch.equal(values[each], values[head]) and varied(values[head])]
    if equal and target.tied is not False:
        message = f"{head} and {equal[0]} have the same values and are stored apart: they will part in training"
        yield Part("fail", message, where=head)
    elif target.tied and not one and twins:
        yield Part("fail", f"said to be tied, but {head} and {twins[0]} are two tensors", where=head)
    elif target.tied is False and one:
        yield Part("fail", f"said not to be tied, but the head is the table {head}", where=head)
    elif one:
        yield Part("pass", f"the head is the table {head}")
    else:
        yield Part("pass", f"the head {head} is a matrix of its own")


def varied(x: Tensor) -> bool:
    """Whether a tensor's values are no constant."""
    return bool(x.numel() > 1 and (x != x.flatten()[0]).any())


def lost_ties(before: dict[str, frozenset[str]], after: dict[str, frozenset[str]], how: str) -> Iterator[Part]:
    for name, group in before.items():
        if not group <= after.get(name, frozenset({name})):
            other = sorted(group - after.get(name, frozenset({name})))[0]
            yield Part("fail", f"{name} and {other} are one tensor, and two when the model is {how}", where=name)
            return
    for name, group in after.items():
        if not group <= before.get(name, frozenset({name})):
            other = sorted(group - before.get(name, frozenset({name})))[0]
            yield Part("fail", f"{name} and {other} are two tensors, and one when the model is {how}", where=name)
            return
    yield Part("pass", f"{len(set(before.values()))} ties stay when the model is {how}")


UNSEEN = "layers are kept in a list or a dict of Python's: no optimiser, no state_dict() and no .to() knows of them"
REGISTER = "keep them in nn.ModuleList, nn.ModuleDict or nn.ParameterList"


@check(
    "tensors-used",
    catches="weights that are never read, or left out when the model is loaded: fresh numbers where trained ones were",
    cause="a name in the file and in the model differ, or a layer, bias or norm was made and never called",
    fix="load strictly and look at what is missing and unexpected; call the part, or remove it",
    needs=("logits", "module"),
)
def tensors_used(exam: Exam) -> Iterator[Part]:
    """Save and load (where that can be done): no tensor missing, none left over. Then watch a pass, a batch, and the
    loss in training: every parameter must be read by some operation."""
    module, target = exam.target.module, exam.target
    assert module is not None
    assert target.logits is not None
    if target.reloaded is not None or target.make is not None:
        try:
            found = again(exam)
            for what, names in (("missing from", found.missing), ("not taken from", found.unexpected)):
                if names:
                    yield Part("fail", f"{few(names)}: {what} what was saved, when it is loaded again", where=names[0])
            if not found.missing and not found.unexpected:
                yield Part("pass", "every saved tensor is taken, and none is missing")
        except CannotError as error:
            yield Part("skip", f"skipped: {error}")
    refuse_compiled(module)
    reads = Reads(module)
    with torch.no_grad(), reads:
        target.logits(exam.text())
        if reads.unread:
            target.logits(exam.text(8))
        if reads.unread and target.loss is not None:
            tokens = exam.text(2)
            target.loss(tokens, tokens)
    if not reads.places:
        raise CannotError("needs code whose operations can be seen")
    if reads.strange:
        shape = tuple(reads.strange[0])
        message = f"a pass reads a parameter of shape {shape} that is not among the model's parameters"
        yield Part("fail", message, len(set(reads.strange)), 0, cause=UNSEEN, fix=REGISTER)
        return
    declared = " ".join(str(getattr(part, "_tied_weights_keys", "") or "") for part in module.modules())
    unread = [name for name in reads.unread if name not in declared]
    passed = [name for name in unread if any(word in name.lower().replace("shared_expert", "") for word in ELSEWHERE)]
    if dead := [name for name in unread if name not in passed]:
        message = f"{few(dead)}: no pass reads {'it' if len(dead) == 1 else 'them'}"
        yield Part("fail", message, len(dead), 0, dead[0])
    else:
        more = f", but for {few(passed)}, which need not be" if passed else ""
        yield Part("pass", f"every parameter is read{more}")


@check(
    "export",
    catches="a model that is another one when it was saved and loaded again",
    cause="a tensor, buffer or setting is not saved, is saved under another name, or is transposed on one way only",
    fix="write everything that the logits depend on, and compare logits after every change of the format",
    needs=("logits", "reloaded|make|exported"),
)
def export(exam: Exam) -> Part:
    """Save (with weights moved a little from where they began, if the model is small), load, compare the logits."""
    target = exam.target
    assert target.logits is not None
    logits = target.logits
    if target.exported is not None:
        tokens, other = exam.text(), target.exported()
        gap = exam.same(lambda: logits(tokens), lambda: other(tokens))
        where = None
    else:
        found = again(exam, broken=True)
        if found.broke:
            return Part("fail", f"it cannot be saved and loaded again: {found.broke}")
        gap, where = found.gap, few([*found.missing, *found.unexpected, *found.apart]) or None
    return exam.judge(
        gap,
        held="saved and loaded again it gives the same logits",
        broken="saved and loaded again it gives other logits",
        where=where,
    )
