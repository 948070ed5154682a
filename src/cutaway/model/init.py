"""Fresh weights, from one table."""

import math
import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cutaway.config import Config, CrossStack, Normal, Small, T5Init, Xavier
from cutaway.model.positions import Sinusoidal

EMBEDDING = r"(embed\.(token|types|position\.table)|head\.matrix)\.weight$"
WRITES = r"\.(attn|cross)\.f\.o\.weight$|\.ffn\.f\.(\w+\.)?down\.weight$"
QUERY = r"\.(attn|cross)\.f\.q\.(2\.)?weight$"  # MLA's q.0 leads down to the latent
TABLE = r"positions\.\d+\.table\.weight$"


def initialise(model: nn.Module, config: Config, parameters: Iterable[tuple[str, Tensor]] | None = None) -> None:
    """Draw every parameter anew.

    | what                    | normal (GPT-2)       | xavier (2017)       | small (NeoX)        | t5              |
    |-------------------------|----------------------|---------------------|---------------------|-----------------|
    | token, position, type   | N(0, std)            | N(0, 1/√d)          | N(0, √(2/5d))       | N(0, 1)         |
    | untied output matrix    | N(0, std)            | N(0, 1/√d)          | N(0, √(2/5d))       | N(0, 1)         |
    | q                       | N(0, std)            | U(±√(6/(in + out))) | N(0, √(2/5d))       | N(0, 1/√(in·D)) |
    | o and down, which write | N(0, std/√sublayers) | U(±√(6/(in + out))) | N(0, 2/(layers·√d)) | N(0, 1/√in)     |
    | other matrices          | N(0, std)            | U(±√(6/(in + out))) | N(0, √(2/5d))       | N(0, 1/√in)     |
    | relative bias           | N(0, std)            | N(0, 1/√d)          | N(0, √(2/5d))       | N(0, 1/√d)      |

    Always: norm gains 1 (0 with the unit offset); biases, sinks and saved buffers 0.
    `sublayers` is how many things write to the stream the matrix stands in (2 a layer, 3 with cross-attention).
    Other tensors can be filled in the `parameters`' place, one after another, where the model itself has parts of them.
    """
    for module in model.modules():
        if isinstance(module, Sinusoidal):
            module.fill_table()
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved:
            nn.init.zeros_(buffer)
    for name, parameter in parameters or model.named_parameters():
        if not parameter.requires_grad:
            continue  # a frozen table of sinusoids
        if parameter.ndim < 2 or "norm" in name:
            fill_vector(model, name, parameter)
        elif isinstance(config.init, Xavier) and not re.search(f"{EMBEDDING}|{TABLE}", name):
            bound = math.sqrt(6 / (parameter.shape[-1] + parameter.shape[-2]))
            nn.init.uniform_(parameter, -bound, bound)
        else:
            nn.init.normal_(parameter, std=std_of(name, parameter, config))


def fill_vector(model: nn.Module, name: str, parameter: Tensor) -> None:
    """Norm gains start where the norm changes nothing; biases and sinks at zero."""
    owner, _, leaf = name.rpartition(".")
    is_gain = leaf == "weight"
    offset = getattr(model.get_submodule(owner), "unit_offset", False)
    nn.init.constant_(parameter, 1.0 if is_gain and not offset else 0.0)


def std_of(name: str, parameter: Tensor, config: Config) -> float:
    """The table's entry for one matrix."""
    d_model, fan_in = config.d_model, parameter.shape[-1]
    stack = config.stacks.get(name.split(".")[0])
    writes = stack is not None and re.search(WRITES, name)
    match config.init:
        case Normal(std=std, depth_scaled=scaled):
            if stack is None or not (scaled and writes):
                return std
            per_layer = 3 if isinstance(stack, CrossStack) else 2
            return std / math.sqrt(per_layer * stack.layers)
        case Xavier():
            return d_model**-0.5
        case Small():
            return 2 / (stack.layers * math.sqrt(d_model)) if writes and stack else math.sqrt(2 / (5 * d_model))
        case T5Init():
            if re.search(EMBEDDING, name):
                return 1.0
            if re.search(TABLE, name):
                return d_model**-0.5
            return (fan_in * head_width(name, config)) ** -0.5 if re.search(QUERY, name) else fan_in**-0.5


def head_width(name: str, config: Config) -> int:
    """The width of a head of the attention whose query matrix this is."""
    side, _, layer, which = name.split(".")[:4]
    block = config.stacks[side].blocks[int(layer)]
    attention = getattr(block, "cross" if which == "cross" else "attention")
    width: int = (
        attention.d_nope + attention.d_rope if attention.kind == "latent" else attention.head_width(config.d_model)
    )
    return width


@torch.no_grad()
def draw(
    model: nn.Module, config: Config, seed: int | None, parameters: Iterable[tuple[str, Tensor]] | None = None
) -> None:
    """Initialise, from `seed` alone if it is given, leaving the global generators as they were."""
    if seed is None:
        initialise(model, config, parameters)
        return
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    with torch.random.fork_rng(devices=list(devices), device_type=kind):
        torch.manual_seed(seed)
        initialise(model, config, parameters)
