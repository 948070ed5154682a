"""Configuration and weight checks: config-fields, meta-buffers, tied-weights, unused-parameters, save-load."""

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
"""Modules that need not affect the logits: experts without tokens, vision and audio towers, poolers."""
CLEAR_DIFFERENCE_FACTOR = 1000
"""A difference beyond this multiple of the noise needs no noise measurement."""
MAX_LISTED_NAMES = 3
"""Maximum number of names in a message."""


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(names[:MAX_LISTED_NAMES]) + more


@register_check(
    "config-fields",
    catches="a config field that is ignored: a softcap, window or scale that does not change the logits",
    cause="the field is stored in the configuration and never used, or only on another code path (another kernel)",
    fix="pass it to the code that should use it, or reject values that this code does not support",
    needs=("logits", "config_variants"),
    depends_on=("eval-dropout", "eval-determinism"),
)
def config_fields(context: CheckContext) -> Iterator[CaseResult]:
    """Change each config field alone, with the same weights: the logits must change, or the value must be rejected."""
    model = context.model
    assert model.logits is not None
    assert model.config_variants is not None
    tokens = context.random_tokens()
    tested: list[str] = []
    rejected: list[str] = []
    variants = dict(model.config_variants())
    base = variants.pop("")() if "" in variants else model.logits
    with torch.no_grad():
        first = base(tokens)
    for name, build_variant in variants.items():
        if context.seconds_left <= 0:
            break
        try:
            variant = build_variant()
            with torch.no_grad():
                second = variant(tokens)
        except (ValueError, NotImplementedError, TypeError, KeyError):
            rejected.append(name)
            continue
        tested.append(name)
        # There are many fields: measure the noise only if the difference is not clear without it.
        if second.shape == first.shape and max_difference(
            first, second
        ).max_abs <= CLEAR_DIFFERENCE_FACTOR * context.noise_ratio * max_finite_abs(first):
            diff = context.compare(lambda: base(tokens), lambda: variant(tokens), first_result=first)
            if diff.within_tolerance:
                message = f"the config field {name} does not change the logits"
                yield CaseResult("fail", message, diff.max_abs, diff.tolerance, name)
    if not tested and not rejected:
        raise SkipCheckError("there is no config field to change")
    yield CaseResult("pass", f"{len(tested)} config fields change the logits, {len(rejected)} changes are rejected")


@register_check(
    "meta-buffers",
    catches="buffers that are lost when a model is built on the meta device: zero frequencies, uninitialized masks",
    cause="a non-persistent buffer is computed in __init__ only, where the meta device stores no values",
    fix="recompute it from the configuration after loading, or save it with the weights",
    needs=("logits", "module"),
)
def meta_buffers(context: CheckContext) -> Iterator[CaseResult]:
    """Search buffers for NaN. Build the model on the meta device and load these weights: it must give the same logits,
    and its buffers must equal those of a newly built model."""
    model, module = context.model, context.model.module
    assert module is not None
    assert model.logits is not None
    logits = model.logits
    floats = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    has_nan = [name for name, buffer in floats.items() if bool(buffer.isnan().any())]
    if has_nan:
        yield CaseResult("fail", f"buffer {_format_names(has_nan)} has NaN values", location=has_nan[0])
        return
    if model.load_from_meta is not None:
        loaded = model.load_from_meta()
        tokens = context.random_tokens()

        def loaded_logits() -> Tensor:
            with substitute_module(module, loaded.eval()):
                return logits(tokens)

        diff = context.compare(lambda: logits(tokens), loaded_logits)
        changed = _find_changed_buffers(module, loaded)
        yield context.expect_equal(
            diff,
            passed="built on the meta device and loaded, it gives the same logits",
            failed="built on the meta device and loaded with the same weights, it gives other logits",
            location=_format_names(changed) or None,
        )
        return
    if model.reload is None and model.build_module is None:
        raise SkipCheckError("needs build_module, reload or load_from_meta")
    reloaded = get_reloaded_model(context)
    diff = reloaded.difference
    if reloaded.changed_constants and not diff.within_tolerance:
        names = _format_names(reloaded.changed_constants)
        message = f"buffer {names} differs from that of the reloaded model, and so do the logits"
        yield CaseResult("fail", message, diff.max_abs, diff.tolerance, reloaded.changed_constants[0])
        return
    yield CaseResult("pass", "the buffers equal those of the reloaded model")


def _find_changed_buffers(module: nn.Module, other: nn.Module) -> list[str]:
    """Names of buffers that differ."""
    original = dict(module.named_buffers())
    return [
        name
        for name, buffer in other.named_buffers()
        if name in original
        and (buffer.shape != original[name].shape or max_difference(buffer, original[name]).max_abs > 1e-6)
    ]


@register_check(
    "tied-weights",
    catches="an output head that no longer shares the embedding matrix, or shares it against the configuration",
    cause="the weights are copied instead of shared, or the tie is lost in loading, copying or moving the model",
    fix="share the module or the Parameter itself, and tie again after loading",
    needs=("logits", "module"),
)
def tied_weights(context: CheckContext) -> Iterator[CaseResult]:
    """Record which embedding matrix the tokens index and which matrix computes the logits: one storage if they are
    tied, two if not. Copy the model, and save and load it if possible: tied parameters must stay tied."""
    module, model = context.model.module, context.model
    assert module is not None
    require_uncompiled(module)
    yield from _check_tied_head(context, module)
    before = tied_parameters(module)
    try:
        yield from _compare_ties(before, tied_parameters(deepcopy_module(module)), "copied")
        if model.reload is not None or model.build_module is not None:
            yield from _compare_ties(before, tied_parameters(get_reloaded_model(context).module), "saved and loaded")
    except SkipCheckError as error:
        yield CaseResult("skip", f"skipped: {error}")


def _check_tied_head(context: CheckContext, module: nn.Module) -> Iterator[CaseResult]:
    """Whether the head shares the embedding matrix, compared with `tied_embeddings`."""
    model = context.model
    assert model.logits is not None
    with torch.no_grad(), ParameterTracer(module, model.vocab_size) as tracer:
        model.logits(context.random_tokens())
    if tracer.head_ptr is None or not tracer.embedding_ptrs:
        yield CaseResult("skip", "skipped: the matrix that computes the logits was not recorded")
        return
    head = tracer.parameter_names[tracer.head_ptr][0]
    embeddings = [tracer.parameter_names[ptr][0] for ptr in tracer.embedding_ptrs]
    is_tied = tracer.head_ptr in tracer.embedding_ptrs
    params = dict(module.named_parameters(remove_duplicate=False))
    same_shape = [name for name in embeddings if params[name].shape == params[head].shape]
    copies = [name for name in same_shape if not is_tied and torch.equal(params[name], params[head])]
    copies = copies if _is_not_constant(params[head]) else []
    if copies and model.tied_embeddings is not False:
        message = f"{head} and {copies[0]} are separate tensors with equal values: training will make them differ"
        yield CaseResult("fail", message, location=head)
    elif model.tied_embeddings and not is_tied and same_shape:
        message = f"tied_embeddings is True, but {head} and {same_shape[0]} are two tensors"
        yield CaseResult("fail", message, location=head)
    elif model.tied_embeddings is False and is_tied:
        yield CaseResult("fail", f"tied_embeddings is False, but the head is the embedding {head}", location=head)
    elif is_tied:
        yield CaseResult("pass", f"the head is the embedding {head}")
    else:
        yield CaseResult("pass", f"the head {head} is a separate matrix")


def _is_not_constant(x: Tensor) -> bool:
    """Whether a tensor has different values."""
    return bool(x.numel() > 1 and (x != x.flatten()[0]).any())


def _compare_ties(
    before: dict[str, frozenset[str]], after: dict[str, frozenset[str]], operation: str
) -> Iterator[CaseResult]:
    """Compare the groups of tied parameters before and after an operation."""
    for name, group in before.items():
        if not group <= after.get(name, frozenset({name})):
            other = sorted(group - after.get(name, frozenset({name})))[0]
            yield CaseResult(
                "fail", f"{name} and {other} are one tensor, but two after the model is {operation}", location=name
            )
            return
    for name, group in after.items():
        if not group <= before.get(name, frozenset({name})):
            other = sorted(group - before.get(name, frozenset({name})))[0]
            yield CaseResult(
                "fail", f"{name} and {other} are two tensors, but one after the model is {operation}", location=name
            )
            return
    yield CaseResult("pass", f"{len(set(before.values()))} ties are kept when the model is {operation}")


UNREGISTERED_CAUSE = "layers are in a Python list or dict: optimizers, state_dict() and .to() do not include them"
UNREGISTERED_FIX = "use nn.ModuleList, nn.ModuleDict or nn.ParameterList"


@register_check(
    "unused-parameters",
    catches="parameters that are never used, or not loaded: random values instead of trained ones",
    cause="a name differs between checkpoint and model, or a layer, bias or norm is created and never called",
    fix="load with strict=True and inspect missing and unexpected keys; call the module, or remove it",
    needs=("logits", "module"),
)
def unused_parameters(context: CheckContext) -> Iterator[CaseResult]:
    """Save and load (if possible): no missing and no unexpected keys. Then trace a forward pass, a batch and the
    training loss: every parameter must be read by some op."""
    module, model = context.model.module, context.model
    assert module is not None
    assert model.logits is not None
    if model.reload is not None or model.build_module is not None:
        try:
            reloaded = get_reloaded_model(context)
            for kind, names in (("missing", reloaded.missing_keys), ("unexpected", reloaded.unexpected_keys)):
                if names:
                    message = f"{kind} keys when the saved model is loaded: {_format_names(names)}"
                    yield CaseResult("fail", message, location=names[0])
            if not reloaded.missing_keys and not reloaded.unexpected_keys:
                yield CaseResult("pass", "there are no missing and no unexpected keys")
        except SkipCheckError as error:
            yield CaseResult("skip", f"skipped: {error}")
    require_uncompiled(module)
    tracer = ParameterTracer(module)
    with torch.no_grad(), tracer:
        model.logits(context.random_tokens())
        if tracer.unread_parameters:
            model.logits(context.random_tokens(8))
        if tracer.unread_parameters and model.loss is not None:
            tokens = context.random_tokens(2)
            model.loss(tokens, tokens)
    if not tracer.read_ptrs:
        raise SkipCheckError("needs code whose ops can be traced")
    if tracer.unregistered_shapes:
        shape = tuple(tracer.unregistered_shapes[0])
        message = f"the forward pass reads a parameter of shape {shape} that module.parameters() does not have"
        yield CaseResult(
            "fail", message, len(set(tracer.unregistered_shapes)), 0, cause=UNREGISTERED_CAUSE, fix=UNREGISTERED_FIX
        )
        return
    declared = " ".join(str(getattr(submodule, "_tied_weights_keys", "") or "") for submodule in module.modules())
    unread = [name for name in tracer.unread_parameters if name not in declared]
    optional = [
        name for name in unread if any(part in name.lower().replace("shared_expert", "") for part in OPTIONAL_MODULES)
    ]
    if dead := [name for name in unread if name not in optional]:
        message = f"the forward pass does not read {_format_names(dead)}"
        yield CaseResult("fail", message, len(dead), 0, dead[0])
    else:
        exceptions = f", except {_format_names(optional)}, which may be unused" if optional else ""
        yield CaseResult("pass", f"every parameter is read{exceptions}")


@register_check(
    "save-load",
    catches="a model that gives other logits after saving and loading",
    cause="a tensor, buffer or config field is not saved, is saved under another name, or is transposed one way only",
    fix="save everything that the logits depend on, and compare logits after every change of the format",
    needs=("logits", "reload|build_module|reload_logits"),
)
def save_load(context: CheckContext) -> CaseResult:
    """Save (with slightly perturbed weights, if the model is small), load, and compare the logits."""
    model = context.model
    assert model.logits is not None
    logits = model.logits
    if model.reload_logits is not None:
        tokens, reload_logits = context.random_tokens(), model.reload_logits()
        diff = context.compare(lambda: logits(tokens), lambda: reload_logits(tokens))
        location = None
    else:
        reloaded = get_reloaded_model(context, allow_error=True)
        if reloaded.error:
            return CaseResult("fail", f"saving and loading failed: {reloaded.error}")
        diff = reloaded.difference
        names = [*reloaded.missing_keys, *reloaded.unexpected_keys, *reloaded.changed_constants]
        location = _format_names(names) or None
    return context.expect_equal(
        diff,
        passed="after saving and loading it gives the same logits",
        failed="after saving and loading it gives other logits",
        location=location,
    )
