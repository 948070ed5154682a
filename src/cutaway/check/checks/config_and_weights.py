"""What a model holds: its weights and buffers after saving and loading, its ties, its modes, its settings."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cutaway.check.context import CheckContext
from cutaway.check.module_state import deepcopy_module, require_uncompiled, substitute_module
from cutaway.check.numerics import max_difference, max_finite_abs
from cutaway.check.probes.parameter_tracer import ParameterTracer
from cutaway.check.probes.reload import get_reloaded_model, tied_parameters
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError

OPTIONAL_MODULES = ("expert", "vision", "visual", "image", "audio", "speech", "pooler")
"""Parts that logits need not reach: experts that no token chose, towers that read no text, a vector for sentences."""
CLEAR_DIFFERENCE_FACTOR = 1000
"""Times the noise: plainly another result."""
MAX_LISTED_NAMES = 3
"""Names that a message gives."""


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(names[:MAX_LISTED_NAMES]) + more


@register_check(
    "config-fields",
    catches="a setting that is read and then dropped: a soft-cap, window or scale that changes nothing",
    cause="the setting is stored in the configuration and never passed on, or only on another path (another kernel)",
    fix="pass it to the code that should use it, or refuse a value that this code does not honor",
    needs=("logits", "config_variants"),
    depends_on=("eval-dropout", "eval-determinism"),
)
def config_fields(context: CheckContext) -> Iterator[CaseResult]:
    """Change each setting alone, with the same weights: the logits must change, or the setting must be refused."""
    target = context.model
    assert target.logits is not None
    assert target.config_variants is not None
    tokens = context.random_tokens()
    tried: list[str] = []
    refused: list[str] = []
    made = dict(target.config_variants())
    base = made.pop("")() if "" in made else target.logits
    with torch.no_grad():
        first = base(tokens)
    for name, make in made.items():
        if context.seconds_left <= 0:
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
        if second.shape == first.shape and max_difference(
            first, second
        ).max_abs <= CLEAR_DIFFERENCE_FACTOR * context.noise_ratio * max_finite_abs(first):
            gap = context.compare(lambda: base(tokens), lambda: other(tokens), first_result=first)
            if gap.within_tolerance:
                yield CaseResult("fail", f"the setting {name} changes nothing", gap.max_abs, gap.tolerance, name)
    if not tried and not refused:
        raise SkipCheckError("there is no setting to try")
    yield CaseResult("pass", f"{len(tried)} settings change the logits, {len(refused)} are refused")


@register_check(
    "meta-buffers",
    catches="buffers that are lost when a model is made on the meta device: frequencies of zeros, masks of garbage",
    cause="a buffer that is not saved is computed in __init__ only, where the meta device keeps no numbers",
    fix="compute it anew after loading (from the configuration), or save it with the weights",
    needs=("logits", "module"),
)
def meta_buffers(context: CheckContext) -> Iterator[CaseResult]:
    """Look for NaN in buffers. Fill a model of shapes alone with these weights, as loading does: it must give the same
    logits, and its buffers must be those of a fresh model."""
    target, module = context.model, context.model.module
    assert module is not None
    assert target.logits is not None
    logits = target.logits
    bad = [name for name, each in module.named_buffers() if each.is_floating_point() and bool(each.isnan().any())]
    if bad:
        yield CaseResult("fail", f"buffer {_format_names(bad)} holds NaN", location=bad[0])
        return
    if target.load_from_meta is not None:
        other = target.load_from_meta()
        tokens = context.random_tokens()

        def filled() -> Tensor:
            with substitute_module(module, other.eval()):
                return logits(tokens)

        gap = context.compare(lambda: logits(tokens), filled)
        lost = _find_changed_buffers(module, other)
        yield context.expect_equal(
            gap,
            passed="made on the meta device and filled, it gives the same logits",
            failed="made on the meta device and filled with the same weights, it gives other logits",
            location=_format_names(lost) or None,
        )
        return
    if target.reload is None and target.build_module is None:
        raise SkipCheckError("needs build_module, reload or load_from_meta")
    found = get_reloaded_model(context)
    if found.changed_constants and not found.difference.within_tolerance:
        names = _format_names(found.changed_constants)
        message = f"buffer {names} is not what a model that is loaded anew has, and the logits differ"
        yield CaseResult(
            "fail", message, found.difference.max_abs, found.difference.tolerance, found.changed_constants[0]
        )
        return
    yield CaseResult("pass", "the buffers are those of a model that is loaded anew")


def _find_changed_buffers(module: nn.Module, other: nn.Module) -> list[str]:
    """Names of buffers that differ."""
    mine = dict(module.named_buffers())
    return [
        name
        for name, each in other.named_buffers()
        if name in mine and (each.shape != mine[name].shape or max_difference(each, mine[name]).max_abs > 1e-6)
    ]


@register_check(
    "tied-weights",
    catches="a head that is silently no longer the embedding (or shares it against the configuration)",
    cause="the weights were copied instead of shared, or the tie was lost in loading, copying or moving the model",
    fix="share the module or the Parameter itself, and tie again after loading",
    needs=("logits", "module"),
)
def tied_weights(context: CheckContext) -> Iterator[CaseResult]:
    """See which table is looked up and which matrix makes the logits: one storage if they are tied, two if not. Copy
    the model, and save and load it where that can be done: what was one tensor must be one again."""
    module, target = context.model.module, context.model
    assert module is not None
    require_uncompiled(module)
    yield from _check_tied_head(context, module)
    before = tied_parameters(module)
    try:
        yield from _compare_ties(before, tied_parameters(deepcopy_module(module)), "copied")
        if target.reload is not None or target.build_module is not None:
            yield from _compare_ties(
                before, tied_parameters(get_reloaded_model(context).module), "saved and loaded again"
            )
    except SkipCheckError as error:
        yield CaseResult("skip", f"skipped: {error}")


def _check_tied_head(context: CheckContext, module: nn.Module) -> Iterator[CaseResult]:
    """Whether the head is the embedding, against what is said of it."""
    target = context.model
    assert target.logits is not None
    with torch.no_grad(), ParameterTracer(module, target.vocab_size) as reads:
        target.logits(context.random_tokens())
    if reads.head_ptr is None or not reads.embedding_ptrs:
        yield CaseResult("skip", "skipped: it cannot be seen which matrix makes the logits")
        return
    head, tables = (
        reads.parameter_names[reads.head_ptr][0],
        [reads.parameter_names[at][0] for at in reads.embedding_ptrs],
    )
    one = reads.head_ptr in reads.embedding_ptrs
    values = dict(module.named_parameters(remove_duplicate=False))
    twins = [each for each in tables if values[each].shape == values[head].shape]
    equal = [
        each for each in twins if not one and torch.equal(values[each], values[head]) and _is_not_constant(values[head])
    ]
    if equal and target.tied_embeddings is not False:
        message = f"{head} and {equal[0]} have the same values and are stored apart: they will part in training"
        yield CaseResult("fail", message, location=head)
    elif target.tied_embeddings and not one and twins:
        yield CaseResult("fail", f"said to be tied, but {head} and {twins[0]} are two tensors", location=head)
    elif target.tied_embeddings is False and one:
        yield CaseResult("fail", f"said not to be tied, but the head is the table {head}", location=head)
    elif one:
        yield CaseResult("pass", f"the head is the table {head}")
    else:
        yield CaseResult("pass", f"the head {head} is a matrix of its own")


def _is_not_constant(x: Tensor) -> bool:
    """Whether a tensor's values are no constant."""
    return bool(x.numel() > 1 and (x != x.flatten()[0]).any())


def _compare_ties(
    before: dict[str, frozenset[str]], after: dict[str, frozenset[str]], operation: str
) -> Iterator[CaseResult]:
    for name, group in before.items():
        if not group <= after.get(name, frozenset({name})):
            other = sorted(group - after.get(name, frozenset({name})))[0]
            yield CaseResult(
                "fail", f"{name} and {other} are one tensor, and two when the model is {operation}", location=name
            )
            return
    for name, group in after.items():
        if not group <= before.get(name, frozenset({name})):
            other = sorted(group - before.get(name, frozenset({name})))[0]
            yield CaseResult(
                "fail", f"{name} and {other} are two tensors, and one when the model is {operation}", location=name
            )
            return
    yield CaseResult("pass", f"{len(set(before.values()))} ties stay when the model is {operation}")


UNREGISTERED_CAUSE = (
    "layers are kept in a list or a dict of Python's: no optimizer, no state_dict() and no .to() knows of them"
)
UNREGISTERED_FIX = "keep them in nn.ModuleList, nn.ModuleDict or nn.ParameterList"


@register_check(
    "unused-parameters",
    catches="weights that are never read, or left out when the model is loaded: fresh numbers where trained ones were",
    cause="a name in the file and in the model differ, or a layer, bias or norm was made and never called",
    fix="load strictly and look at what is missing and unexpected; call the part, or remove it",
    needs=("logits", "module"),
)
def unused_parameters(context: CheckContext) -> Iterator[CaseResult]:
    """Save and load (where that can be done): no tensor missing, none left over. Then watch a pass, a batch, and the
    loss in training: every parameter must be read by some operation."""
    module, target = context.model.module, context.model
    assert module is not None
    assert target.logits is not None
    if target.reload is not None or target.build_module is not None:
        try:
            found = get_reloaded_model(context)
            for what, names in (("missing from", found.missing_keys), ("not taken from", found.unexpected_keys)):
                if names:
                    yield CaseResult(
                        "fail",
                        f"{_format_names(names)}: {what} what was saved, when it is loaded again",
                        location=names[0],
                    )
            if not found.missing_keys and not found.unexpected_keys:
                yield CaseResult("pass", "every saved tensor is taken, and none is missing")
        except SkipCheckError as error:
            yield CaseResult("skip", f"skipped: {error}")
    require_uncompiled(module)
    reads = ParameterTracer(module)
    with torch.no_grad(), reads:
        target.logits(context.random_tokens())
        if reads.unread_parameters:
            target.logits(context.random_tokens(8))
        if reads.unread_parameters and target.loss is not None:
            tokens = context.random_tokens(2)
            target.loss(tokens, tokens)
    if not reads.read_ptrs:
        raise SkipCheckError("needs code whose operations can be seen")
    if reads.unregistered_shapes:
        shape = tuple(reads.unregistered_shapes[0])
        message = f"a pass reads a parameter of shape {shape} that is not among the model's parameters"
        yield CaseResult(
            "fail", message, len(set(reads.unregistered_shapes)), 0, cause=UNREGISTERED_CAUSE, fix=UNREGISTERED_FIX
        )
        return
    declared = " ".join(str(getattr(part, "_tied_weights_keys", "") or "") for part in module.modules())
    unread = [name for name in reads.unread_parameters if name not in declared]
    passed = [
        name for name in unread if any(word in name.lower().replace("shared_expert", "") for word in OPTIONAL_MODULES)
    ]
    if dead := [name for name in unread if name not in passed]:
        message = f"{_format_names(dead)}: no pass reads {'it' if len(dead) == 1 else 'them'}"
        yield CaseResult("fail", message, len(dead), 0, dead[0])
    else:
        more = f", but for {_format_names(passed)}, which need not be" if passed else ""
        yield CaseResult("pass", f"every parameter is read{more}")


@register_check(
    "save-load",
    catches="a model that is another one when it was saved and loaded again",
    cause="a tensor, buffer or setting is not saved, is saved under another name, or is transposed on one way only",
    fix="write everything that the logits depend on, and compare logits after every change of the format",
    needs=("logits", "reload|build_module|reload_logits"),
)
def save_load(context: CheckContext) -> CaseResult:
    """Save (with weights moved a little from where they began, if the model is small), load, compare the logits."""
    target = context.model
    assert target.logits is not None
    logits = target.logits
    if target.reload_logits is not None:
        tokens, other = context.random_tokens(), target.reload_logits()
        gap = context.compare(lambda: logits(tokens), lambda: other(tokens))
        where = None
    else:
        found = get_reloaded_model(context, allow_error=True)
        if found.error:
            return CaseResult("fail", f"it cannot be saved and loaded again: {found.error}")
        gap, where = (
            found.difference,
            _format_names([*found.missing_keys, *found.unexpected_keys, *found.changed_constants]) or None,
        )
    return context.expect_equal(
        gap,
        passed="saved and loaded again it gives the same logits",
        failed="saved and loaded again it gives other logits",
        location=where,
    )
