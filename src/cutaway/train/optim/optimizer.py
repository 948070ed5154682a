"""Optimizers (AdamW, Muon, Adafactor, SGD) with a state dict of tensors, keyed by parameter name."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from cutaway.errors import InputError
from cutaway.model.moe import Router
from cutaway.train.distributed.dtensor import as_dtensor_like, is_dtensor, local_shard, num_replicas, to_local
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DistributedContext
from cutaway.train.optim.adamw_8bit import AdamW8bit, state_shapes
from cutaway.train.optim.mixed_precision import disable_onednn_without_bf16
from cutaway.train.recipe.schema import AdafactorConfig, AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig

FUSED_DEVICE_TYPES = ("cuda", "cpu", "xpu", "mps")
"""Device types for which PyTorch has fused AdamW and SGD kernels."""


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name; tied parameters appear once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies to the parameter.

    Weight decay applies to weight matrices and embedding tables, as in GPT-2 and nanoGPT. It does not apply to norm
    gains and biases, even if they have two dimensions, such as a gain or bias per head or per expert and T5's table of
    relative position biases.
    """
    owner, _, leaf = name.rpartition(".")
    is_bias = leaf not in ("weight", "lora_a", "lora_b") or "positions" in owner.split(".")
    return parameter.ndim >= 2 and not is_bias and "norm" not in owner.rpartition(".")[-1]


def param_groups(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups with and without weight decay; empty groups are left out."""
    decayed = [each for name, each in parameters.items() if has_weight_decay(name, each)]
    not_decayed = [each for name, each in parameters.items() if not has_weight_decay(name, each)]
    groups = ((decayed, weight_decay), (not_decayed, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def muon_parameter_names(model: nn.Module) -> set[str]:
    """Names of the parameters Muon optimizes: weight matrices inside layers, not embedding tables or the output matrix.

    PyTorch's Muon supports 2-D matrices only, so the stacked weights of experts use AdamW. A matrix with a single row
    or column is a vector and uses AdamW too.
    """
    output_matrix = getattr(getattr(model, "head", None), "matrix", None)
    layer_weights = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Router) and module is not output_matrix
    ]
    return {name for name, each in trainable_parameters(model).items() if name in layer_weights and min(each.shape) > 1}


class OptimizersContainer:
    """Several PyTorch optimizers with the interface of one. The learning rate factor is an argument of `step`."""

    def __init__(
        self, model: nn.Module, optimizers: list[Optimizer], lr: float, local_parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.optimizers, self.lr = optimizers, lr
        self.parameters = trainable_parameters(model)
        self.local_parameters = local_parameters
        """This rank's shard of each sharded parameter (DTensor). The optimizers update the shards."""

    def step(self, lr_factor: float = 1.0, *, grad_divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Update the parameters with `lr_factor` times the learning rate and the gradient divided by `grad_divisor`.

        If `skip` is true, the parameters stay unchanged. The fused AdamW kernel and AdamW8bit divide the gradient and
        skip the update on the device, without synchronization.
        """
        for name, local in self.local_parameters.items():
            grad = self.parameters[name].grad
            local.data = to_local(self.parameters[name])  # FSDP2 may have reallocated the shard
            local.grad = None if grad is None else to_local(grad)
        if skip is not None and not all(_can_skip_on_device(optimizer) for optimizer in self.optimizers):
            if bool(skip):
                return
            skip = None
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * lr_factor
            if _can_skip_on_device(optimizer):
                _fused_step(optimizer, grad_divisor, skip)
                continue
            grads = [each.grad for each in optimizer_parameters(optimizer) if each.grad is not None]
            if grad_divisor is not None:
                torch._foreach_div_(grads, grad_divisor)
            optimizer.step()

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for name in self.local_parameters:
            self.parameters[name].grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """State tensors by '<state>/<parameter>', e.g. 'exp_avg/embed.weight'.

        The tensors are not copies, and the next step changes them; clone them to keep the current values.
        """
        state_dict: dict[str, Tensor] = {}
        for name, parameter, optimizer in self._iter_parameters():
            for state_name, value in optimizer.state.get(parameter, {}).items():
                assert isinstance(value, Tensor), f"{state_name} of {name} is not a tensor"
                state_dict[f"{state_name}/{name}"] = as_dtensor_like(value, self.parameters[name])
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load a state dict of the same model and kind of optimizer. Parameter groups and sharding may differ."""
        loaded: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state_dict.items():
            state_name, _, name = key.partition("/")
            if name not in self.parameters:
                raise InputError(
                    f"the optimizer state has '{key}', but the model has no such trainable parameter; resume the run"
                    " with its own model"
                )
            loaded.setdefault(name, {})[state_name] = tensor
        states: dict[Optimizer, dict[Tensor, dict[str, Tensor]]] = {optimizer: {} for optimizer in self.optimizers}
        for name, parameter, optimizer in self._iter_parameters():
            if name not in loaded:
                continue  # the parameter never had a gradient
            full_parameter = self.parameters[name]
            expected_shapes = _state_shapes(optimizer, full_parameter)
            shapes = {state_name: tuple(tensor.shape) for state_name, tensor in loaded[name].items()}
            if shapes != expected_shapes:
                raise InputError(
                    f"the optimizer state of '{name}' has shapes {shapes}, but {type(optimizer).__name__} has"
                    f" {expected_shapes}; resume the run with the optimizer it started with"
                )
            state = states[optimizer][parameter] = {}
            for state_name, tensor in loaded[name].items():
                local = tensor if state_name == "step" else local_shard(tensor, full_parameter)
                device = _state_device(state_name, optimizer, parameter)
                state[state_name] = local.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        for optimizer, state_of_parameter in states.items():
            optimizer.state.clear()
            optimizer.state.update(state_of_parameter)

    def _iter_parameters(self) -> Iterator[tuple[str, nn.Parameter, Optimizer]]:
        """Iterate over (name, parameter, its optimizer). For a sharded parameter, yield the local shard."""
        owner = {id(each): optimizer for optimizer in self.optimizers for each in optimizer_parameters(optimizer)}
        for name, parameter in self.parameters.items():
            local = self.local_parameters.get(name, parameter)
            yield name, local, owner[id(local)]


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> OptimizersContainer:
    """Build the optimizer of all trainable parameters of a model.

    | kind      | optimizer                                                                                           |
    |-----------|-----------------------------------------------------------------------------------------------------|
    | adamw     | AdamW, with a fused kernel where the device has one; AdamW8bit with state_dtype = 'int8'            |
    | muon      | Muon for the weight matrices inside layers, AdamW for the other parameters, with the same `lr`      |
    | adafactor | Adafactor: row and column averages of the second moment, no momentum; `lr` bounds the relative step |
    | sgd       | SGD with momentum                                                                                   |

    Updates of Muon are scaled to the RMS of AdamW updates, so that both can use the same learning rate.
    """
    parameters = trainable_parameters(model)
    sharded = {name: nn.Parameter(to_local(each)) for name, each in parameters.items() if is_dtensor(each)}
    if sharded and config.kind not in ("adamw", "sgd"):
        raise InputError(
            f"optimizer.kind = '{config.kind}' needs full matrices, but parallel.dp_shard or parallel.tp shards them;"
            " use adamw or sgd, or set both to 1"
        )
    if sharded and isinstance(config, AdamWConfig) and config.state_dtype == "int8":
        raise InputError(
            "optimizer.state_dtype = 'int8' quantizes blocks of full parameters, but parallel.dp_shard or parallel.tp"
            " shards them; use 'fp32', or set both to 1"
        )
    parameters |= sharded
    if not parameters:
        raise InputError("the model has no trainable parameter; set requires_grad on the weights to train")
    fused = all(each.device.type in FUSED_DEVICE_TYPES and each.is_floating_point() for each in parameters.values())
    lr, weight_decay = config.lr, config.weight_decay
    optimizers: list[Optimizer] = []
    match config:
        case MuonConfig():
            # Muon orthogonalizes matrices in bf16.
            disable_onednn_without_bf16(next(iter(parameters.values())).device)
            names = muon_parameter_names(model) & parameters.keys()
            matrices = {name: each for name, each in parameters.items() if name in names}
            parameters = {name: each for name, each in parameters.items() if name not in names}
            if matrices:
                groups = param_groups(matrices, weight_decay)
                optimizers.append(Muon(groups, lr=lr, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"))
        case AdafactorConfig():
            optimizers.append(Adafactor(param_groups(parameters, weight_decay), lr=lr))
        case SGDConfig():
            groups = param_groups(parameters, weight_decay)
            optimizers.append(SGD(groups, lr=lr, momentum=config.momentum, fused=fused))
    if isinstance(config, AdamWConfig | MuonConfig) and parameters:
        groups = param_groups(parameters, weight_decay)
        if isinstance(config, AdamWConfig) and config.state_dtype == "int8":
            optimizers.append(AdamW8bit(groups, lr=lr, betas=config.betas, eps=config.eps))
        else:
            optimizers.append(AdamW(groups, lr=lr, betas=config.betas, eps=config.eps, fused=fused))
    return OptimizersContainer(model, optimizers, lr, sharded)


def _can_skip_on_device(optimizer: Optimizer) -> bool:
    """Whether the optimizer can skip a step on the device. Only fused AdamW and AdamW8bit can.

    If fused SGD skipped its first step, its momentum buffers would stay uninitialized.
    """
    return isinstance(optimizer, AdamW8bit) or (isinstance(optimizer, AdamW) and bool(optimizer.defaults["fused"]))


def _fused_step(optimizer: Optimizer, grad_divisor: Tensor | None, skip: Tensor | None) -> None:
    """Run an optimizer step, passing divisor and skip flag in the attributes that torch.amp.GradScaler sets."""
    if isinstance(optimizer, AdamW8bit):
        optimizer.step(grad_divisor=grad_divisor, skip=skip)
        return
    untyped: Any = optimizer
    untyped.grad_scale = None if grad_divisor is None else grad_divisor.float()
    untyped.found_inf = None if skip is None else skip.float()
    try:
        optimizer.step()
    finally:
        del untyped.grad_scale, untyped.found_inf


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def total_grad_norm(model: nn.Module, dist_context: DistributedContext = SINGLE_PROCESS) -> Tensor:
    """Norm of the vector of all gradients, over all ranks. It is not finite if any gradient is not finite."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if dist_context.mesh is None:
        return nn.utils.get_total_norm(grads)
    norms = torch._foreach_norm([to_local(grad) for grad in grads])
    # A gradient replicated on r ranks would count r times in the sum over ranks.
    replicas = torch.tensor([num_replicas(grad, dist_context.world_size) for grad in grads], device=norms[0].device)
    return dist_context.sum_over_ranks((torch.stack(norms).square() / replicas).sum()).sqrt()


def _state_shapes(optimizer: Optimizer, parameter: Tensor) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the state that an optimizer has for a parameter after its first step."""
    shape = tuple(parameter.shape)
    if isinstance(optimizer, AdamW8bit):
        return state_shapes(parameter)
    if isinstance(optimizer, AdamW):
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    if isinstance(optimizer, Adafactor):
        if len(shape) < 2:
            return {"step": (), "variance": shape}
        return {"step": (), "row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    return {"momentum_buffer": shape}


def _state_device(state_name: str, optimizer: Optimizer, parameter: Tensor) -> torch.device:
    """Device of a state tensor: the device of the parameter, or the CPU for the step count of an unfused optimizer."""
    return parameter.device if state_name != "step" or optimizer.defaults.get("fused") else torch.device("cpu")
