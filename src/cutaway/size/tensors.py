"""Every tensor of a model: what a checkpoint stores, and what an optimizer keeps state for."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from cutaway.config.embedding import Head
from cutaway.config.ffn import Moe
from cutaway.config.positions import Sinusoidal
from cutaway.config.transformer import Config, Encoder
from cutaway.size.numbers import Numbers
from cutaway.size.walk import Setting, Weight, read


@dataclass(frozen=True)
class Held:
    """One tensor, once, however often it is used."""

    name: str
    shape: tuple[int, ...]
    matrix: bool = False
    """One of a layer's matrices (or a stack of them, one an expert): what is quantised."""
    turned: bool = False
    """A single matrix of a layer, of more than one row: what Muon turns."""
    trained: bool = True
    parameter: bool = True
    """Or a buffer: stored and loaded, but not counted as a parameter."""
    wide: bool = False
    """fp32 whatever the model's dtype."""
    looked_up: bool = False
    """Rows are taken from it, and it is in no product."""
    share: tuple[int, int] | None = None
    """(experts that a token reaches, experts there are)."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def shard(self, devices: int) -> "Held":
        """The largest share when rows are dealt out, as PyTorch's fully sharded data parallel does; what is not trained
        stays whole."""
        return self if not self.trained else replace(self, shape=(-(-self.shape[0] // devices), *self.shape[1:]))

    def bytes(self, numbers: Numbers) -> int:
        return 4 * self.elements if self.wide else numbers.bytes_of(self.shape, matrix=self.matrix)


TABLES = ("tokens", "source tokens", "positions", "types")


@lru_cache(maxsize=64)
def tensors(config: Config) -> tuple[Held, ...]:
    """All of them: those that a token meets on its way, and those beside it."""
    met = read(config, 1, 1, Setting()).weights
    held = [
        Held(
            ".".join(str(part) for part in weight.key),
            weight.shape,
            matrix=is_matrix(weight),
            turned=is_matrix(weight) and len(weight.shape) == 2 and min(weight.shape) > 1,
            looked_up=not weight.multiplied and weight.key[-1] in TABLES,
            share=weight.share,
        )
        for weight in met
    ]
    d_model = config.d_model
    if isinstance(config, Encoder) and config.pooler:
        held += [Held("pooler", (d_model, d_model), matrix=True, turned=True), Held("pooler.bias", (d_model,))]
    if isinstance(config.head, Head) and config.head.bias == "fixed":
        held.append(Held("head.bias", (config.vocab_size,), trained=False, parameter=False))
    for name, stack in config.stacks.items():
        position = stack.embedding.position
        if isinstance(position, Sinusoidal) and position.table is not None:
            shape = position.table, stack.embedding.sum_width(d_model)
            held.append(Held(f"{name}.positions", shape, trained=False, looked_up=True))
        owners = stack.blocks if stack.groups is None else stack.blocks[: stack.groups]
        for index, block in enumerate(owners):
            if isinstance(block.ffn, Moe) and block.ffn.router.selection_bias:
                bias = f"{name}.{index}.ffn.selection_bias"
                held.append(Held(bias, (block.ffn.experts,), trained=False, parameter=False, wide=True))
    return tuple(held)


def is_matrix(weight: Weight) -> bool:
    """In a product and not as long as a vocabulary."""
    vocabulary = weight.key in (("tokens",), ("source tokens",), ("head",))
    return weight.multiplied and len(weight.shape) > 1 and not vocabulary


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds: tied weights once, buffers too."""

    tensors: int
    elements: int
    buffers: int
    """How many of the elements are no parameters: fixed biases, a router's balance."""
    bytes: int
    """Of data; a safetensors header adds about a hundred a tensor."""


def stored(config: Config, numbers: Numbers) -> Stored:
    every = tensors(config)
    return Stored(
        len(every),
        sum(each.elements for each in every),
        sum(each.elements for each in every if not each.parameter),
        sum(each.bytes(numbers) for each in every),
    )
