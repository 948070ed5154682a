"""Weight initialization. The docstring of `init_weights` has a table of all schemes."""

import math
import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.model.positions import SinusoidalPosition

EMBEDDING_PATTERN = r"(embed\.(token|token_types|position\.table)|head\.matrix)\.weight$"
RESIDUAL_OUTPUT_PATTERN = r"\.(attn|cross)\.f\.o\.weight$|\.ffn\.f\.(\w+\.)?down\.weight$"
QUERY_PATTERN = r"\.(attn|cross)\.f\.q\.(2\.)?weight$"  # q.2: MLA's up-projection from the latent
RELATIVE_BIAS_PATTERN = r"positions\.\d+\.table\.weight$"


def init_weights(model: nn.Module, config: cfg.Config, parameters: Iterable[tuple[str, Tensor]] | None = None) -> None:
    """Initialize all parameters of a model by the scheme `config.init`.

    | what                    | normal (GPT-2)       | xavier (2017)       | small (NeoX)        | t5              |
    |-------------------------|----------------------|---------------------|---------------------|-----------------|
    | token, position, type   | N(0, std)            | N(0, 1/√d)          | N(0, √(2/5d))       | N(0, 1)         |
    | untied output matrix    | N(0, std)            | N(0, 1/√d)          | N(0, √(2/5d))       | N(0, 1)         |
    | q                       | N(0, std)            | U(±√(6/(in + out))) | N(0, √(2/5d))       | N(0, 1/√(in·D)) |
    | o, down (residual)      | N(0, std/√sublayers) | U(±√(6/(in + out))) | N(0, 2/(layers·√d)) | N(0, 1/√in)     |
    | other matrices          | N(0, std)            | U(±√(6/(in + out))) | N(0, √(2/5d))       | N(0, 1/√in)     |
    | relative bias           | N(0, std)            | N(0, 1/√d)          | N(0, √(2/5d))       | N(0, 1/√d)      |

    Norm gains are 1 (0 with the unit offset); biases, sinks and persistent buffers are 0.
    `sublayers` is the number of sublayers in the stack: 2 per layer, 3 with cross-attention.
    `parameters` are (name, tensor) pairs to initialize instead of the model's parameters, e.g. of a sharded model.
    """
    for module in model.modules():
        if isinstance(module, SinusoidalPosition):
            module.init_table()
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved:
            nn.init.zeros_(buffer)
    for name, parameter in parameters or model.named_parameters():
        if not parameter.requires_grad:
            continue  # the frozen sinusoidal table
        if parameter.ndim < 2 or "norm" in name:
            _init_vector(model, name, parameter)
        elif isinstance(config.init, cfg.XavierInit) and not re.search(
            f"{EMBEDDING_PATTERN}|{RELATIVE_BIAS_PATTERN}", name
        ):
            bound = math.sqrt(6 / (parameter.shape[-1] + parameter.shape[-2]))
            nn.init.uniform_(parameter, -bound, bound)
        else:
            nn.init.normal_(parameter, std=_weight_std(name, parameter, config))


def _init_vector(model: nn.Module, name: str, parameter: Tensor) -> None:
    """Initialize a vector: norm gains to 1 (0 with the unit offset), biases and sinks to 0."""
    owner, _, leaf = name.rpartition(".")
    is_gain = leaf == "weight"
    offset = getattr(model.get_submodule(owner), "unit_offset", False)
    nn.init.constant_(parameter, 1.0 if is_gain and not offset else 0.0)


def _weight_std(name: str, parameter: Tensor, config: cfg.Config) -> float:
    """Standard deviation of the initial values of one matrix, from the table in `init_weights`."""
    d_model, fan_in = config.d_model, parameter.shape[-1]
    stack = config.stacks.get(name.split(".")[0])
    is_residual_output = stack is not None and re.search(RESIDUAL_OUTPUT_PATTERN, name)
    match config.init:
        case cfg.NormalInit(std=std, depth_scaled=scaled):
            if stack is None or not (scaled and is_residual_output):
                return std
            per_layer = 3 if isinstance(stack, cfg.CrossStack) else 2
            return std / math.sqrt(per_layer * stack.layers)
        case cfg.XavierInit():
            return d_model**-0.5
        case cfg.SmallInit():
            if stack is not None and is_residual_output:
                return 2 / (stack.layers * math.sqrt(d_model))
            return math.sqrt(2 / (5 * d_model))
        case cfg.T5Init():
            if re.search(EMBEDDING_PATTERN, name):
                return 1.0
            if re.search(RELATIVE_BIAS_PATTERN, name):
                return d_model**-0.5
            return (fan_in * _query_head_dim(name, config)) ** -0.5 if re.search(QUERY_PATTERN, name) else fan_in**-0.5


def _query_head_dim(name: str, config: cfg.Config) -> int:
    """Head dimension of the attention that a query matrix belongs to."""
    side, _, layer, which = name.split(".")[:4]
    block = config.stacks[side].blocks[int(layer)]
    attention = getattr(block, "cross" if which == "cross" else "attention")
    return int(attention.head_dim(config.d_model))


@torch.no_grad()
def init_weights_with_seed(
    model: nn.Module, config: cfg.Config, seed: int | None, parameters: Iterable[tuple[str, Tensor]] | None = None
) -> None:
    """Initialize the weights from `seed` without changing the global random generators.

    If `seed` is None, the global random generators are used.
    """
    if seed is None:
        init_weights(model, config, parameters)
        return
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    with torch.random.fork_rng(devices=list(devices), device_type=kind):
        torch.manual_seed(seed)
        init_weights(model, config, parameters)
