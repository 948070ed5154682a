"""PyTorch's optimisers, with their state named by parameter: it needs no pickle, and no order of parameters."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.model.moe import Router
from cutaway.train.narrow import settle
from cutaway.train.parts import alike, copies_of, cut, is_part, own, parameter_of
from cutaway.train.ranks import ALONE, Ranks

FUSED = ("cuda", "cpu", "xpu", "mps")
"""Devices on which PyTorch does a whole step of AdamW or SGD in one kernel."""
KINDS = ("adamw", "muon", "adafactor", "sgd")


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by name; a tied tensor once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def decays(name: str, parameter: Tensor) -> bool:
    """Matrices and tables shrink, embeddings too, as with GPT-2's (and nanoGPT's) two axes and more.

    Norm gains and biases do not, also where they have a second axis: one a head, one an expert, or T5's table of what
    is added to scores.
    """
    owner, _, leaf = name.rpartition(".")
    is_bias = leaf != "weight" or "positions" in owner.split(".")
    return parameter.ndim >= 2 and not is_bias and "norm" not in owner.rpartition(".")[-1]


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """All that is trained in two groups: what decays, and what does not."""
    return _split(named(model), weight_decay)


def turned(model: nn.Module) -> set[str]:
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
    return {name for name, each in named(model).items() if name in inner and min(each.shape) > 1}


class Optimiser:
    """One or several of PyTorch's, as one; rates are multiplied by a factor that the caller knows."""

    def __init__(
        self, model: nn.Module, parts: list[Optimizer], mine: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        self.parts = parts
        self.parameters = named(model)
        self.mine = mine or {}
        """What steps are taken on, where a parameter is shared: this rank's part."""
        self.rates = [[float(group["lr"]) for group in part.param_groups] for part in parts]

    def step(self, factor: float = 1.0, *, shrink: Tensor | None = None, skip: Tensor | None = None) -> None:
        """One step at `factor` times the rate, by the gradient divided by `shrink`; or none, if `skip` is true.

        Where PyTorch does a step in one kernel, that kernel divides and skips, and nobody waits to know.
        """
        for name, mine in self.mine.items():
            given = self.parameters[name].grad
            mine.data = own(self.parameters[name])  # FSDP2 may have laid it elsewhere since
            mine.grad = None if given is None else own(given)
        if skip is not None and not all(in_one_kernel(part) for part in self.parts):
            if bool(skip):
                return
            skip = None
        for part, rates in zip(self.parts, self.rates, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            if in_one_kernel(part):
                step_in_one_kernel(part, shrink, skip)
                continue
            if shrink is not None:
                torch._foreach_div_([each.grad for each in owned(part) if each.grad is not None], shrink)
            part.step()

    def zero(self) -> None:
        """Forget the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        for name in self.mine:
            self.parameters[name].grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The state, as 'what/parameter'; the tensors are those in use, so copy them before the next step."""
        found: dict[str, Tensor] = {}
        for name, parameter, part in self._owned():
            for what, value in part.state.get(parameter, {}).items():
                assert isinstance(value, Tensor), f"{what} of {name} is no tensor"
                found[f"{what}/{name}"] = alike(value, self.parameters[name])
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a state that `tensors` gave, of this model under this kind of optimiser, whatever the groups were."""
        given: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            what, _, name = key.partition("/")
            if name not in self.parameters:
                raise InputError(
                    f"the optimiser's state has '{key}', and this model trains no such weight; resume a run with its"
                    " own model"
                )
            given.setdefault(name, {})[what] = tensor
        states: dict[Optimizer, dict[Tensor, dict[str, Tensor]]] = {part: {} for part in self.parts}
        for name, parameter, part in self._owned():
            if name not in given:
                continue  # it never had a gradient
            whole = self.parameters[name]
            shapes = _state_shapes(part, whole)
            mine = {what: tuple(tensor.shape) for what, tensor in given[name].items()}
            if mine != shapes:
                raise InputError(
                    f"the optimiser's state of '{name}' is {mine}, where {type(part).__name__} keeps {shapes}; resume a"
                    " run with the optimiser it began with"
                )
            states[part][parameter] = {
                what: (tensor if what == "step" else cut(tensor, whole))
                .detach()
                .to(_home(what, part, parameter), copy=True, memory_format=torch.contiguous_format)
                for what, tensor in given[name].items()
            }
        for part, state in states.items():
            part.state.clear()
            part.state.update(state)

    def _owned(self) -> Iterator[tuple[str, nn.Parameter, Optimizer]]:
        owner = {id(each): part for part in self.parts for each in owned(part)}
        for name, parameter in self.parameters.items():
            mine = self.mine.get(name, parameter)
            yield name, mine, owner[id(mine)]


def make(
    kind: str,
    model: Transformer,
    *,
    rate: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    momentum: float | None = None,
) -> Optimiser:
    """An optimiser for all that is trained in a model.

    | kind      | what it is                                                                                      |
    |-----------|-------------------------------------------------------------------------------------------------|
    | adamw     | AdamW, in one kernel where the device has it                                                    |
    | muon      | Muon for the layers' matrices, its steps as long as AdamW's, so that one rate serves; else AdamW |
    | adafactor | Adafactor: row and column means in the place of AdamW's two averages; `rate` bounds its own     |
    | sgd       | SGD with momentum (0.9 unless given)                                                            |
    """
    parameters = named(model)
    shared = {name: parameter_of(each) for name, each in parameters.items() if is_part(each)}
    if shared and kind not in ("adamw", "sgd"):
        raise InputError(
            f"{kind} looks at whole matrices, and parallel.shards or parallel.tensor gives each rank a part; use adamw"
            " or sgd, or set both to 1"
        )
    parameters |= shared
    if not parameters:
        raise InputError("nothing in this model is trained; set requires_grad on the weights that should be")
    fused = all(each.device.type in FUSED and each.is_floating_point() for each in parameters.values())
    adam: dict[str, Any] = {"lr": rate, "betas": tuple(betas), "eps": eps, "fused": fused}
    match kind:
        case "adamw":
            return Optimiser(model, [AdamW(_split(parameters, weight_decay), **adam)], shared)
        case "muon":
            settle(next(iter(parameters.values())).device)  # it turns matrices in bf16
            mine = turned(model)
            inner = {name: each for name, each in parameters.items() if name in mine}
            rest = {name: each for name, each in parameters.items() if name not in mine}
            how: dict[str, Any] = {
                "lr": rate,
                "momentum": 0.95 if momentum is None else momentum,
                "adjust_lr_fn": "match_rms_adamw",
            }
            parts: list[Optimizer] = [Muon(_split(inner, weight_decay), **how)] if inner else []
            return Optimiser(model, [*parts, AdamW(_split(rest, weight_decay), **adam)] if rest else parts)
        case "adafactor":
            return Optimiser(model, [Adafactor(_split(parameters, weight_decay), lr=rate)])
        case "sgd":
            pull = 0.9 if momentum is None else momentum
            part = SGD(_split(parameters, weight_decay), lr=rate, momentum=pull, fused=fused)
            return Optimiser(model, [part], shared)
    raise InputError(f"optimiser '{kind}' is unknown; use one of {', '.join(KINDS)}")


def in_one_kernel(part: Optimizer) -> bool:
    """Whether a step can be vetoed on the device. SGD's first would leave its momentum as memory happened to be."""
    return isinstance(part, AdamW) and bool(part.defaults["fused"])


def step_in_one_kernel(part: Optimizer, shrink: Tensor | None, skip: Tensor | None) -> None:
    """The divisor and the veto are given where a gradient scaler would give them."""
    given: Any = part
    given.grad_scale = None if shrink is None else shrink.float()
    given.found_inf = None if skip is None else skip.float()
    try:
        part.step()
    finally:
        del given.grad_scale, given.found_inf


def owned(part: Optimizer) -> list[Tensor]:
    return [each for group in part.param_groups for each in group["params"]]


def length_of_gradient(model: nn.Module, ranks: Ranks = ALONE) -> Tensor:
    """Of all gradients together; not finite if any of them is not."""
    found = [each.grad for each in model.parameters() if each.grad is not None]
    if ranks.mesh is None:
        return nn.utils.get_total_norm(found)
    lengths = torch._foreach_norm([own(each) for each in found])
    copies = torch.tensor([copies_of(each, ranks.world) for each in found], device=lengths[0].device)
    return ranks.sum_of_all((torch.stack(lengths).square() / copies).sum()).sqrt()


def _split(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """What decays and what does not; an empty group is left out."""
    shrinking = [each for name, each in parameters.items() if decays(name, each)]
    staying = [each for name, each in parameters.items() if not decays(name, each)]
    both = [{"params": shrinking, "weight_decay": weight_decay}, {"params": staying, "weight_decay": 0.0}]
    return [group for group in both if group["params"]]


def _state_shapes(part: Optimizer, parameter: Tensor) -> dict[str, tuple[int, ...]]:
    """What each of PyTorch's optimisers keeps for a parameter, once it has stepped."""
    shape = tuple(parameter.shape)
    if isinstance(part, AdamW):
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    if isinstance(part, Adafactor):
        if len(shape) < 2:
            return {"step": (), "variance": shape}
        return {"step": (), "row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    return {"momentum_buffer": shape}


def _home(what: str, part: Optimizer, parameter: Tensor) -> torch.device:
    """Where a state tensor lives: beside its parameter, but a count of steps only if one kernel does all."""
    return parameter.device if what != "step" or part.defaults.get("fused") else torch.device("cpu")
