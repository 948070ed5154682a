"""Configuration and weight checks: config-fields, meta-buffers, tied-weights, unused-parameters, save-load."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cutaway.check.adapters.declared_config import find_declared_tie
from cutaway.check.checked_model import require
from cutaway.check.context import CheckContext
from cutaway.check.module_state import deepcopy_module, require_uncompiled, substitute_module
from cutaway.check.numerics import max_difference
from cutaway.check.probes.parameter_tracer import ParameterTracer
from cutaway.check.probes.reload import get_reloaded_model, tied_parameters
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError, failure, skipped, success
from cutaway.model.adapters.adapter_methods import inactive_adapter_keys

_OPTIONAL_MODULES = ("expert", "vision", "visual", "image", "audio", "speech", "pooler")
"""Modules that need not affect the logits: experts without tokens, vision and audio towers, poolers."""
_MAX_LISTED_NAMES = 3
"""Maximum number of names in a message."""


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(names[:_MAX_LISTED_NAMES]) + more


@register_check("config-fields", needs=("logits", "config_variants"), depends_on=("eval-dropout", "eval-determinism"))
def config_fields(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches a config field that is ignored: a softcap, window or scale that does not change the logits.

    Change each config field alone, with the same weights: the logits must change, or the value must be rejected.

    Cause: the field is stored in the configuration but never used, or used only on another code path (another kernel).
    Fix: pass it to the code that should use it, or reject values that this code does not support.
    """
    tokens = ctx.random_tokens()
    num_tested = num_rejected = 0
    variants = dict(require(ctx.model.config_variants)())
    base = variants.pop("")() if "" in variants else ctx.logits
    first = base(tokens)
    for name, build_variant in variants.items():
        if ctx.seconds_left <= 0:
            break
        try:
            variant = build_variant()
            diff = ctx.compare_expecting_difference(lambda: base(tokens), lambda: variant(tokens), first_result=first)
        except (ValueError, NotImplementedError, TypeError, KeyError):
            num_rejected += 1
            continue
        num_tested += 1
        # a field that is ignored changes no bit, but an ε, or a scale before a norm, may change the last ones only
        if diff.within_tolerance and (diff.max_abs == 0.0 or not torch.equal(base(tokens), first)):
            yield diff.failure(f"the config field {name} does not change the logits", name)
    if not num_tested:
        raise SkipCheckError(f"no config field could be changed; {num_rejected} changes are rejected")
    yield success(f"{num_tested} config fields change the logits, {num_rejected} changes are rejected")


@register_check("meta-buffers", needs=("logits", "module"))
def meta_buffers(ctx: CheckContext) -> CaseResult:
    """Catches buffers that are lost when a model is built on the meta device: zero frequencies, uninitialized masks.

    Search buffers for NaN. Build the model on the meta device and load the same weights: the logits must be the same.
    If that is not possible, save and load the model: buffers that change must not change the logits.

    Cause: a non-persistent buffer is computed in __init__ only, where the meta device stores no values.
    Fix: recompute it from the configuration after loading, or save it with the weights.
    """
    model, module, logits = ctx.model, ctx.module, ctx.logits
    floats = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    has_nan = [name for name, buffer in floats.items() if bool(buffer.isnan().any())]
    if has_nan:
        return failure(f"buffer {_format_names(has_nan)} has NaN values", location=has_nan[0])
    if model.load_from_meta is not None:
        loaded, tokens = model.load_from_meta().eval(), ctx.random_tokens()

        def loaded_logits() -> Tensor:
            with substitute_module(module, loaded):
                return logits(tokens)

        return ctx.compare(lambda: logits(tokens), loaded_logits).expect_equal(
            passed="built on the meta device and loaded, the model gives the same logits",
            failed="built on the meta device and loaded with the same weights, the model gives other logits",
            location=_format_names(_find_changed_buffers(module, loaded)) or None,
        )
    if model.reload is None and model.build_module is None:
        raise SkipCheckError("needs build_module, reload or load_from_meta")
    reloaded = get_reloaded_model(ctx)
    if reloaded.changed_constants and not reloaded.difference.within_tolerance:
        names = _format_names(reloaded.changed_constants)
        message = f"buffer {names} differs from that of the reloaded model, and so do the logits"
        return reloaded.difference.failure(message, reloaded.changed_constants[0])
    return success("the buffers equal those of the reloaded model")


def _find_changed_buffers(module: nn.Module, other: nn.Module) -> list[str]:
    """Names of buffers whose values differ between the two modules."""
    original = dict(module.named_buffers())
    return [
        name
        for name, buffer in other.named_buffers()
        if name in original
        and (buffer.shape != original[name].shape or max_difference(buffer, original[name]).max_abs > 1e-6)
    ]


@register_check("tied-weights", needs=("logits", "module"))
def tied_weights(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches an output head that no longer shares the embedding matrix, or shares it against the configuration.

    Record the embedding matrix that the tokens index and the matrix that computes the logits: they must be one tensor
    if tied, and two if not. Copy the model, and save and load it if possible: tied parameters must stay tied.

    Cause: the weights are copied instead of shared, or the tie is lost in loading, copying or moving the model.
    Fix: share the module or the Parameter itself, and tie again after loading.
    """
    module, model = ctx.module, ctx.model
    require_uncompiled(module)
    yield _check_tied_head(ctx)
    before = tied_parameters(module)
    try:
        yield _compare_ties(before, tied_parameters(deepcopy_module(module)), "copied")
        if model.reload is not None or model.build_module is not None:
            yield _compare_ties(before, tied_parameters(get_reloaded_model(ctx).module), "saved and loaded")
    except SkipCheckError as error:
        yield skipped(error)


def _check_tied_head(ctx: CheckContext) -> CaseResult:
    """Check that the head shares the embedding matrix if, and only if, `tied_embeddings` says so."""
    is_tied_expected, declaration = ctx.model.tied_embeddings, "tied_embeddings"
    if is_tied_expected is None:
        is_tied_expected, declaration = find_declared_tie(ctx.module), "the configuration for tied embeddings"
    with ParameterTracer(ctx.module, ctx.model.vocab_size) as tracer:
        ctx.logits(ctx.random_tokens())
    if tracer.head_ptr is None or not tracer.embedding_ptrs:
        return skipped("the matrix that computes the logits was not recorded")
    head = tracer.parameter_names[tracer.head_ptr][0]
    embeddings = [tracer.parameter_names[ptr][0] for ptr in tracer.embedding_ptrs]
    if tracer.head_ptr in tracer.embedding_ptrs:
        if is_tied_expected is False:
            return failure(f"{declaration} is False, but the head is the embedding {head}", location=head)
        return success(f"the head is the embedding {head}")
    params = dict(ctx.module.named_parameters(remove_duplicate=False))
    same_shape = [name for name in embeddings if params[name].shape == params[head].shape]
    copies = [name for name in same_shape if torch.equal(params[name], params[head])]
    if copies and _is_not_constant(params[head]) and is_tied_expected is not False:
        message = f"{head} and {copies[0]} are separate tensors with equal values: training will make them differ"
        return failure(message, location=head)
    if is_tied_expected and same_shape:
        return failure(f"{declaration} is True, but {head} and {same_shape[0]} are two tensors", location=head)
    return success(f"the head {head} is a separate matrix")


def _is_not_constant(x: Tensor) -> bool:
    """Whether a tensor has at least two different values."""
    return bool(x.numel() > 1 and (x != x.flatten()[0]).any())


def _compare_ties(before: dict[str, frozenset[str]], after: dict[str, frozenset[str]], operation: str) -> CaseResult:
    """Return a failure if parameters are tied only before or only after `operation`, else a success."""
    for groups, others, change in ((before, after, "one tensor, but two"), (after, before, "two tensors, but one")):
        for name, group in groups.items():
            if lost := sorted(group - others.get(name, frozenset({name}))):
                return failure(f"{name} and {lost[0]} are {change} after the model is {operation}", location=name)
    return success(f"{len(set(before.values()))} ties are kept when the model is {operation}")


_UNREGISTERED_CAUSE = "layers are in a Python list or dict: optimizers, state_dict() and .to() do not include them"
_UNREGISTERED_FIX = "use nn.ModuleList, nn.ModuleDict or nn.ParameterList"


@register_check("unused-parameters", needs=("logits", "module"))
def unused_parameters(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches parameters that are never used, or not loaded: random values instead of trained ones.

    Save and load the model, if possible: there must be no missing and no unexpected keys. Then trace forward
    passes of a sequence, of a batch and of the training loss: every parameter must be read by some op.

    Cause: a name differs between checkpoint and model, or a layer, bias or norm is created and never called.
    Fix: load with strict=True and inspect missing and unexpected keys; call the module, or remove it.
    """
    module, model = ctx.module, ctx.model
    if model.reload is not None or model.build_module is not None:
        try:
            reloaded = get_reloaded_model(ctx)
            for kind, names in (("missing", reloaded.missing_keys), ("unexpected", reloaded.unexpected_keys)):
                if names:
                    message = f"{kind} keys when the saved model is loaded: {_format_names(names)}"
                    yield failure(message, location=names[0])
            if not reloaded.missing_keys and not reloaded.unexpected_keys:
                yield success("there are no missing and no unexpected keys")
        except SkipCheckError as error:
            yield skipped(error)
    require_uncompiled(module)
    tracer = ParameterTracer(module)
    with tracer:
        ctx.logits(ctx.random_tokens())
        if tracer.unread_parameters:
            ctx.logits(ctx.random_tokens(8))
        if tracer.unread_parameters and model.loss is not None:
            tokens = ctx.random_tokens(2)
            model.loss(tokens, tokens)
    if not tracer.read_ptrs:
        raise SkipCheckError("needs code whose ops can be traced")
    if tracer.unregistered_shapes:
        shape = tuple(tracer.unregistered_shapes[0])
        message = f"the forward pass reads a parameter of shape {shape} that module.parameters() does not have"
        yield failure(
            message, len(set(tracer.unregistered_shapes)), 0, cause=_UNREGISTERED_CAUSE, fix=_UNREGISTERED_FIX
        )
        return
    declared = " ".join(str(getattr(submodule, "_tied_weights_keys", "") or "") for submodule in module.modules())
    inactive = inactive_adapter_keys(module)
    unread = [name for name in tracer.unread_parameters if name not in declared and name not in inactive]
    optional = [
        name for name in unread if any(part in name.lower().replace("shared_expert", "") for part in _OPTIONAL_MODULES)
    ]
    if dead := [name for name in unread if name not in optional]:
        yield failure(f"the forward pass does not read {_format_names(dead)}", len(dead), 0, dead[0])
    else:
        exceptions = f", except {_format_names(optional)}, which may be unused" if optional else ""
        yield success(f"every parameter is read{exceptions}")


@register_check("save-load", needs=("logits", "reload|build_module|reload_logits"))
def save_load(ctx: CheckContext) -> CaseResult:
    """Catches a model that gives other logits after saving and loading.

    Save the model (with slightly perturbed weights, if it is small), load it, and compare the logits.

    Cause: a tensor, buffer or config field is not saved, is saved under another name, or is transposed only when saved
    or only when loaded.
    Fix: save everything that the logits depend on, and compare logits after every change of the format.
    """
    model, logits = ctx.model, ctx.logits
    if model.reload_logits is not None:
        tokens, reload_logits = ctx.random_tokens(), model.reload_logits()
        diff = ctx.compare(lambda: logits(tokens), lambda: reload_logits(tokens))
        location = None
    else:
        reloaded = get_reloaded_model(ctx, allow_error=True)
        if reloaded.error:
            return failure(f"saving and loading failed: {reloaded.error}")
        diff = reloaded.difference
        names = [*reloaded.missing_keys, *reloaded.unexpected_keys, *reloaded.changed_constants]
        location = _format_names(names) or None
    return diff.expect_equal(
        passed="after saving and loading, the model gives the same logits",
        failed="after saving and loading, the model gives other logits",
        location=location,
    )
