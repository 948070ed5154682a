"""The same model a second time: saved and loaded, or made anew and filled. Its logits are asked by standing in."""

from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import CheckedModel, ReloadedModel
from cutaway.check.context import CheckContext
from cutaway.check.module_state import MAX_COPIED_BYTES, perturb_weights, substitute_module, weight_bytes
from cutaway.check.numerics import LOW_PRECISION_DTYPES
from cutaway.check.report.finding import SkipCheckError
from cutaway.errors import format_error


def get_reloaded_model(context: CheckContext, *, allow_error: bool = False) -> ReloadedModel:
    """The model saved and loaded, or made anew, and compared: once for all checks that ask about it. One that could not
    be is given only to who asks for that."""
    found = context.compute_once("reloaded_model", lambda: _reload_model(context))
    if isinstance(found, SkipCheckError):
        raise found
    assert isinstance(found, ReloadedModel)
    if found.error and not allow_error:
        raise SkipCheckError("needs a model that can be saved and loaded again")
    return found


@torch.no_grad()
def _reload_model(context: CheckContext) -> ReloadedModel | SkipCheckError:
    target, module, logits = context.model, context.model.module, context.model.logits
    if module is None:
        return SkipCheckError("needs the module")
    if weight_bytes(module) > MAX_COPIED_BYTES:
        return SkipCheckError(f"needs a model of at most {MAX_COPIED_BYTES >> 30} GB, for it is saved")
    assert logits is not None
    tokens = context.random_tokens()
    with perturb_weights(module, context.generator):
        try:
            found = target.reload() if target.reload is not None else _rebuild_and_load(target)
        except (SkipCheckError, OSError) as error:
            return error if isinstance(error, SkipCheckError) else SkipCheckError(f"needs room to save it ({error})")
        except Exception as error:  # whatever it is, it is the target's own code: the check save-load says so
            return ReloadedModel(module, error=f"{type(error).__name__}: {format_error(error)}")
        found.module.eval()
        _compare_constants(module, found)

        def second() -> Tensor:
            with substitute_module(module, found.module):
                return logits(tokens)

        def first() -> Tensor:
            return logits(tokens)

        if found.reference_logits is not None:
            other = found.reference_logits
            # Frequencies that `model.to(bfloat16)` rounded are no matter of the other implementation.
            mine = second if found.rounded_constants else first
            found.reference_difference = context.compare(mine, lambda: other(tokens))
            if not found.reference_difference.within_tolerance and found.find_divergent_layer is not None:
                found.divergent_layer = found.find_divergent_layer(
                    found.module if found.rounded_constants else module, tokens, context.noise_ratio
                )
        _copy_rounded_constants(module, found)
        found.difference = context.compare(first, second)
    return found


def _rebuild_and_load(model: CheckedModel) -> ReloadedModel:
    """What `build_module` gives, with the state of the model."""
    module, make = model.module, model.build_module
    if make is None or module is None:
        raise SkipCheckError("needs build_module or reload")
    fresh = make()
    if type(fresh) is not type(module):
        raise SkipCheckError(f"build_module() gave a {type(fresh).__name__} for a {type(module).__name__}")
    fresh.to(model.device)
    tensors: list[Tensor] = [*fresh.parameters(), *fresh.buffers()]
    for tensor in tensors:
        tensor.data = tensor.data.float() if tensor.dtype in LOW_PRECISION_DTYPES else tensor.data
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    shapes = {name: tensor.shape for name, tensor in fresh.state_dict().items()}
    for name in state.keys() & shapes.keys():
        if state[name].shape != shapes[name]:
            raise SkipCheckError(f"build_module() gave a model of other sizes: {name} is {tuple(shapes[name])}")
    said = fresh.load_state_dict(state, strict=False)
    return ReloadedModel(fresh, list(said.missing_keys), list(said.unexpected_keys))


def _constant_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What follows from the configuration, most likely: buffers that are not saved, and parameters that are frozen."""
    saved = module.state_dict().keys()
    found: dict[str, Tensor] = {name: each for name, each in module.named_buffers() if name not in saved}
    return found | {name: each for name, each in module.named_parameters() if not each.requires_grad}


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _compare_constants(module: nn.Module, reloaded: ReloadedModel) -> None:
    """Which constants are not those of the other: rounded to a narrower dtype, or others."""
    other = _named_tensors(reloaded.module)
    for name, mine in _constant_tensors(module).items():
        fresh = other.get(name)
        if fresh is None or fresh.shape != mine.shape or fresh.is_meta or _almost_equal(fresh, mine):
            continue
        rounded = any(torch.equal(fresh.to(dtype).to(mine.dtype), mine) for dtype in LOW_PRECISION_DTYPES)
        (reloaded.rounded_constants if rounded else reloaded.changed_constants).append(name)


def _copy_rounded_constants(module: nn.Module, reloaded: ReloadedModel) -> None:
    """Give the other the rounded buffers too (`model.to(bfloat16)` makes them): another check asks about these."""
    mine, other = _constant_tensors(module), _named_tensors(reloaded.module)
    for name in reloaded.rounded_constants:
        other[name].data = mine[name].data.clone().to(other[name].dtype)


def _almost_equal(a: Tensor, b: Tensor) -> bool:
    """Equal, but for a last place."""
    if not a.is_floating_point() or not b.is_floating_point():
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(torch.isclose(a.float(), b.float(), rtol=1e-5, atol=1e-7, equal_nan=True).all())


def tied_parameters(module: nn.Module) -> dict[str, frozenset[str]]:
    """Names of parameters → all names of the same tensor, where there are several."""
    names: dict[tuple[Any, ...], set[str]] = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        key = (each.untyped_storage().data_ptr(), each.storage_offset(), each.shape)
        names.setdefault(key, set()).add(name)
    return {name: frozenset(group) for group in names.values() if len(group) > 1 for name in sorted(group)}
