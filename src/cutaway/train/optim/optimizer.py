"""PyTorch's optimizers, with their state named by parameter: it needs no pickle, and no order of parameters."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.model.moe import Router
from cutaway.train.distributed.dtensor import (
    as_dtensor_like,
    is_dtensor,
    local_parameter,
    local_shard,
    num_replicas,
    to_local,
)
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DistributedContext
from cutaway.train.optim.mixed_precision import disable_onednn_without_bf16

FUSED_DEVICE_TYPES = ("cuda", "cpu", "xpu", "mps")
"""Devices on which PyTorch does a whole step of AdamW or SGD in one kernel."""
OPTIMIZER_KINDS = ("adamw", "muon", "adafactor", "sgd")


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by name; a tied tensor once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Matrices and tables shrink, embeddings too, as with GPT-2's (and nanoGPT's) two axes and more.

    Norm gains and biases do not, also where they have a second axis: one a head, one an expert, or T5's table of what
    is added to scores.
    """
    owner, _, leaf = name.rpartition(".")
    is_bias = leaf != "weight" or "positions" in owner.split(".")
    return parameter.ndim >= 2 and not is_bias and "norm" not in owner.rpartition(".")[-1]


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """All that is trained in two groups: what decays, and what does not."""
    return _split_by_weight_decay(trainable_parameters(model), weight_decay)


def muon_parameter_names(model: nn.Module) -> set[str]:
    """The matrices that Muon is for: a layer's own, in a product with the stream; not tables, not the output matrix.

    PyTorch's Muon takes single matrices only, so experts, which are stacks of them, are AdamW's. A gate that is one
    row is a vector.
    """
    output = getattr(getattr(model, "head", None), "matrix", None)
    inner = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Router) and module is not output
    ]
    return {name for name, each in trainable_parameters(model).items() if name in inner and min(each.shape) > 1}


class OptimizersContainer:
    """One or several of PyTorch's, as one; rates are multiplied by a factor that the caller knows."""

    def __init__(
        self, model: nn.Module, optimizers: list[Optimizer], local_parameters: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        self.optimizers = optimizers
        self.parameters = trainable_parameters(model)
        self.local_parameters = local_parameters or {}
        """What steps are taken on, where a parameter is shared: this rank's part."""
        self.base_lrs = [[float(group["lr"]) for group in part.param_groups] for part in optimizers]

    def step(self, lr_factor: float = 1.0, *, grad_divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        """One step at `lr_factor` times the lr, by the gradient divided by `grad_divisor`; or none, if `skip` is true.

        Where PyTorch does a step in one kernel, that kernel divides and skips, and nobody waits to know.
        """
        for name, mine in self.local_parameters.items():
            given = self.parameters[name].grad
            mine.data = to_local(self.parameters[name])  # FSDP2 may have laid it elsewhere since
            mine.grad = None if given is None else to_local(given)
        if skip is not None and not all(_can_skip_on_device(part) for part in self.optimizers):
            if bool(skip):
                return
            skip = None
        for part, rates in zip(self.optimizers, self.base_lrs, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * lr_factor
            if _can_skip_on_device(part):
                _fused_step(part, grad_divisor, skip)
                continue
            if grad_divisor is not None:
                torch._foreach_div_(
                    [each.grad for each in optimizer_parameters(part) if each.grad is not None], grad_divisor
                )
            part.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self.optimizers:
            part.zero_grad(set_to_none=True)
        for name in self.local_parameters:
            self.parameters[name].grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """The state, as 'what/parameter'; the tensors are those in use, so copy them before the next step."""
        found: dict[str, Tensor] = {}
        for name, parameter, part in self._iter_parameters():
            for what, value in part.state.get(parameter, {}).items():
                assert isinstance(value, Tensor), f"{what} of {name} is no tensor"
                found[f"{what}/{name}"] = as_dtensor_like(value, self.parameters[name])
        return found

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take a state that `state_dict` gave, of this model under this kind of optimizer, whatever the groups were."""
        given: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state_dict.items():
            what, _, name = key.partition("/")
            if name not in self.parameters:
                raise InputError(
                    f"the optimizer's state has '{key}', and this model trains no such weight; resume a run with its"
                    " own model"
                )
            given.setdefault(name, {})[what] = tensor
        states: dict[Optimizer, dict[Tensor, dict[str, Tensor]]] = {part: {} for part in self.optimizers}
        for name, parameter, part in self._iter_parameters():
            if name not in given:
                continue  # it never had a gradient
            whole = self.parameters[name]
            shapes = _state_shapes(part, whole)
            mine = {what: tuple(tensor.shape) for what, tensor in given[name].items()}
            if mine != shapes:
                raise InputError(
                    f"the optimizer's state of '{name}' is {mine}, where {type(part).__name__} keeps {shapes}; resume a"
                    " run with the optimizer it began with"
                )
            states[part][parameter] = {
                what: (tensor if what == "step" else local_shard(tensor, whole))
                .detach()
                .to(_state_device(what, part, parameter), copy=True, memory_format=torch.contiguous_format)
                for what, tensor in given[name].items()
            }
        for part, state in states.items():
            part.state.clear()
            part.state.update(state)

    def _iter_parameters(self) -> Iterator[tuple[str, nn.Parameter, Optimizer]]:
        owner = {id(each): part for part in self.optimizers for each in optimizer_parameters(part)}
        for name, parameter in self.parameters.items():
            mine = self.local_parameters.get(name, parameter)
            yield name, mine, owner[id(mine)]


def build_optimizer(
    kind: str,
    model: Transformer,
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    momentum: float | None = None,
) -> OptimizersContainer:
    """An optimizer for all that is trained in a model.

    | kind      | what it is                                                                                      |
    |-----------|-------------------------------------------------------------------------------------------------|
    | adamw     | AdamW, in one kernel where the device has it                                                    |
    | muon      | Muon for the layers' matrices, its steps as long as AdamW's, so that one rate serves; else AdamW |
    | adafactor | Adafactor: row and column means in the place of AdamW's two averages; `lr` bounds its own       |
    | sgd       | SGD with momentum (0.9 unless given)                                                            |
    """
    parameters = trainable_parameters(model)
    shared = {name: local_parameter(each) for name, each in parameters.items() if is_dtensor(each)}
    if shared and kind not in ("adamw", "sgd"):
        raise InputError(
            f"{kind} looks at whole matrices, and parallel.dp_shard or parallel.tp gives each rank a part; use adamw"
            " or sgd, or set both to 1"
        )
    parameters |= shared
    if not parameters:
        raise InputError("nothing in this model is trained; set requires_grad on the weights that should be")
    fused = all(each.device.type in FUSED_DEVICE_TYPES and each.is_floating_point() for each in parameters.values())
    adam: dict[str, Any] = {"lr": lr, "betas": tuple(betas), "eps": eps, "fused": fused}
    match kind:
        case "adamw":
            return OptimizersContainer(model, [AdamW(_split_by_weight_decay(parameters, weight_decay), **adam)], shared)
        case "muon":
            disable_onednn_without_bf16(next(iter(parameters.values())).device)  # it turns matrices in bf16
            mine = muon_parameter_names(model)
            inner = {name: each for name, each in parameters.items() if name in mine}
            rest = {name: each for name, each in parameters.items() if name not in mine}
            how: dict[str, Any] = {
                "lr": lr,
                "momentum": 0.95 if momentum is None else momentum,
                "adjust_lr_fn": "match_rms_adamw",
            }
            parts: list[Optimizer] = [Muon(_split_by_weight_decay(inner, weight_decay), **how)] if inner else []
            return OptimizersContainer(
                model, [*parts, AdamW(_split_by_weight_decay(rest, weight_decay), **adam)] if rest else parts
            )
        case "adafactor":
            return OptimizersContainer(model, [Adafactor(_split_by_weight_decay(parameters, weight_decay), lr=lr)])
        case "sgd":
            pull = 0.9 if momentum is None else momentum
            part = SGD(_split_by_weight_decay(parameters, weight_decay), lr=lr, momentum=pull, fused=fused)
            return OptimizersContainer(model, [part], shared)
    raise InputError(f"optimizer '{kind}' is unknown; use one of {', '.join(OPTIMIZER_KINDS)}")


def _can_skip_on_device(optimizer: Optimizer) -> bool:
    """Whether a step can be vetoed on the device. SGD's first would leave its momentum as memory happened to be."""
    return isinstance(optimizer, AdamW) and bool(optimizer.defaults["fused"])


def _fused_step(optimizer: Optimizer, grad_divisor: Tensor | None, skip: Tensor | None) -> None:
    """The divisor and the veto are given where a gradient scaler would give them."""
    given: Any = optimizer
    given.grad_scale = None if grad_divisor is None else grad_divisor.float()
    given.found_inf = None if skip is None else skip.float()
    try:
        optimizer.step()
    finally:
        del given.grad_scale, given.found_inf


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def total_grad_norm(model: nn.Module, dist_context: DistributedContext = SINGLE_PROCESS) -> Tensor:
    """Of all gradients together; not finite if any of them is not."""
    found = [each.grad for each in model.parameters() if each.grad is not None]
    if dist_context.mesh is None:
        return nn.utils.get_total_norm(found)
    lengths = torch._foreach_norm([to_local(each) for each in found])
    copies = torch.tensor([num_replicas(each, dist_context.world_size) for each in found], device=lengths[0].device)
    return dist_context.sum_over_ranks((torch.stack(lengths).square() / copies).sum()).sqrt()


def _split_by_weight_decay(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """What decays and what does not; an empty group is left out."""
    shrinking = [each for name, each in parameters.items() if has_weight_decay(name, each)]
    staying = [each for name, each in parameters.items() if not has_weight_decay(name, each)]
    both = [{"params": shrinking, "weight_decay": weight_decay}, {"params": staying, "weight_decay": 0.0}]
    return [group for group in both if group["params"]]


def _state_shapes(optimizer: Optimizer, parameter: Tensor) -> dict[str, tuple[int, ...]]:
    """What each of PyTorch's optimizers keeps for a parameter, once it has stepped."""
    shape = tuple(parameter.shape)
    if isinstance(optimizer, AdamW):
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    if isinstance(optimizer, Adafactor):
        if len(shape) < 2:
            return {"step": (), "variance": shape}
        return {"step": (), "row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    return {"momentum_buffer": shape}


def _state_device(state_name: str, optimizer: Optimizer, parameter: Tensor) -> torch.device:
    """Where a state tensor lives: beside its parameter, but a count of steps only if one kernel does all."""
    return parameter.device if state_name != "step" or optimizer.defaults.get("fused") else torch.device("cpu")
