"""The model after saving and loading, or rebuilt with the same weights, and its comparison with the original."""

from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import CheckedModel, ReloadedModel
from cutaway.check.context import CheckContext, compute_once
from cutaway.check.module_state import MAX_COPIED_BYTES, perturb_weights, substitute_module, weight_bytes
from cutaway.check.numerics import LOW_PRECISION_DTYPES
from cutaway.check.report.finding import SkipCheckError
from cutaway.errors import format_error


def get_reloaded_model(ctx: CheckContext, *, allow_error: bool = False) -> ReloadedModel:
    """Save and load (or rebuild) the model and compare it with the original; computed once for all checks.

    If saving or loading raised an exception, the check is skipped unless `allow_error` is set.
    """
    reloaded = _reload_model(ctx)
    if isinstance(reloaded, SkipCheckError):
        raise reloaded
    if reloaded.error and not allow_error:
        raise SkipCheckError("needs a model that can be saved and loaded")
    return reloaded


@compute_once
def _reload_model(ctx: CheckContext) -> ReloadedModel | SkipCheckError:
    """Reload the model with perturbed weights; compare the original with the reloaded model and with the reference.

    A SkipCheckError is returned, not raised, so that `compute_once` stores it too.
    """
    model, module, logits = ctx.model, ctx.model.module, ctx.logits
    if module is None:
        return SkipCheckError("needs the module")
    if weight_bytes(module) > MAX_COPIED_BYTES:
        return SkipCheckError(f"needs a model of at most {MAX_COPIED_BYTES >> 30} GB, because it is saved")
    tokens = ctx.random_tokens()
    with perturb_weights(module, ctx.generator):
        try:
            reloaded = model.reload() if model.reload is not None else _rebuild_and_load(model)
        except SkipCheckError as error:
            return error
        except OSError as error:
            return SkipCheckError(f"needs disk space to save the model ({error})")
        except Exception as error:  # raised by the model's own code: the check save-load reports it
            return ReloadedModel(module, error=f"{type(error).__name__}: {format_error(error)}")
        reloaded.module.eval()
        _compare_constants(module, reloaded)

        def original_logits() -> Tensor:
            return logits(tokens)

        def reloaded_logits() -> Tensor:
            with substitute_module(module, reloaded.module):
                return logits(tokens)

        if (reference_logits := reloaded.reference_logits) is not None:
            # `model.to(bfloat16)` rounds RoPE frequencies. In the reference and the reloaded model, they are exact.
            is_rounded = bool(reloaded.rounded_constants)
            own_logits, own_module = (reloaded_logits, reloaded.module) if is_rounded else (original_logits, module)
            diff = ctx.compare(own_logits, lambda: reference_logits(tokens))
            reloaded.reference_difference = diff
            if not diff.within_tolerance and reloaded.find_divergent_layer is not None:
                reloaded.divergent_layer = reloaded.find_divergent_layer(own_module, tokens, ctx.noise_ratio)
        _copy_rounded_constants(module, reloaded)
        reloaded.difference = ctx.compare(original_logits, reloaded_logits)
    return reloaded


def _rebuild_and_load(model: CheckedModel) -> ReloadedModel:
    """Build a new module with `build_module`, and load the state dict of the original module into it."""
    module, build_module = model.module, model.build_module
    if build_module is None or module is None:
        raise SkipCheckError("needs build_module or reload")
    rebuilt = build_module()
    if type(rebuilt) is not type(module):
        raise SkipCheckError(f"build_module() returned a {type(rebuilt).__name__} for a {type(module).__name__}")
    rebuilt.to(model.device)
    tensors: list[Tensor] = [*rebuilt.parameters(), *rebuilt.buffers()]
    for tensor in tensors:
        tensor.data = tensor.data.float() if tensor.dtype in LOW_PRECISION_DTYPES else tensor.data
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    shapes = {name: tensor.shape for name, tensor in rebuilt.state_dict().items()}
    for name in state.keys() & shapes.keys():
        if state[name].shape != shapes[name]:
            raise SkipCheckError(f"build_module() returned a model of another size: {name} is {tuple(shapes[name])}")
    keys = rebuilt.load_state_dict(state, strict=False)
    return ReloadedModel(rebuilt, list(keys.missing_keys), list(keys.unexpected_keys))


def _constant_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that probably derive from the configuration: non-persistent buffers and frozen parameters."""
    saved = module.state_dict().keys()
    buffers: dict[str, Tensor] = {name: buffer for name, buffer in module.named_buffers() if name not in saved}
    return buffers | {name: param for name, param in module.named_parameters() if not param.requires_grad}


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _compare_constants(module: nn.Module, reloaded: ReloadedModel) -> None:
    """Set `reloaded.rounded_constants` and `reloaded.changed_constants`.

    The former are the constants of `module` that equal those of the reloaded model rounded to bf16 or fp16; the latter
    are all other constants that differ.
    """
    reloaded_tensors = _named_tensors(reloaded.module)
    for name, original in _constant_tensors(module).items():
        other = reloaded_tensors.get(name)
        if other is None or other.shape != original.shape or other.is_meta or _almost_equal(other, original):
            continue
        is_rounded = any(torch.equal(other.to(dtype).to(original.dtype), original) for dtype in LOW_PRECISION_DTYPES)
        (reloaded.rounded_constants if is_rounded else reloaded.changed_constants).append(name)


def _copy_rounded_constants(module: nn.Module, reloaded: ReloadedModel) -> None:
    """Copy into the reloaded model the constants that `model.to(bfloat16)` rounded, so that they cause no difference.

    The check rope-precision tests their rounding.
    """
    original, other = _constant_tensors(module), _named_tensors(reloaded.module)
    for name in reloaded.rounded_constants:
        other[name].data = original[name].data.clone().to(other[name].dtype)


def _almost_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if not a.is_floating_point() or not b.is_floating_point():
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(torch.isclose(a.float(), b.float(), rtol=1e-5, atol=1e-7, equal_nan=True).all())


def tied_parameters(module: nn.Module) -> dict[str, frozenset[str]]:
    """Parameter name → all names of the same tensor, for tensors with several names."""
    names: dict[tuple[Any, ...], set[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        key = (param.untyped_storage().data_ptr(), param.storage_offset(), param.shape)
        names.setdefault(key, set()).add(name)
    return {name: frozenset(group) for group in names.values() if len(group) > 1 for name in sorted(group)}
