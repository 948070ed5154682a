"""Every tensor of a model: what a checkpoint stores, and what an optimizer keeps state for."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from cutaway.config.ffn import Moe
from cutaway.config.head import LMHead
from cutaway.config.positions import SinusoidalPosition
from cutaway.config.transformer import Config, Encoder
from cutaway.size.precision import Precision
from cutaway.size.shape_pass import ExecutionConfig, Weight, inference_pass


@dataclass(frozen=True)
class TensorSpec:
    """One tensor, once, however often it is used."""

    name: str
    shape: tuple[int, ...]
    quantizable: bool = False
    """One of a layer's matrices (or a stack of them, one an expert): what is quantized."""
    uses_muon: bool = False
    """A single matrix of a layer, of more than one row: what Muon turns."""
    requires_grad: bool = True
    is_parameter: bool = True
    """Or a buffer: stored and loaded, but not counted as a parameter."""
    always_fp32: bool = False
    """fp32 whatever the model's dtype."""
    is_lookup_table: bool = False
    """Rows are taken from it, and it is in no product."""
    expert_routing: tuple[int, int] | None = None
    """(experts that a token reaches, experts there are)."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def shard(self, dp_shard: int) -> "TensorSpec":
        """The largest share when rows are dealt out, as PyTorch's fully sharded data parallel does; what is not trained
        stays whole."""
        return self if not self.requires_grad else replace(self, shape=(-(-self.shape[0] // dp_shard), *self.shape[1:]))

    def nbytes(self, precision: Precision) -> int:
        return 4 * self.numel if self.always_fp32 else precision.tensor_bytes(self.shape, quantizable=self.quantizable)


EMBEDDING_TABLES = ("tokens", "source_tokens", "positions", "types")


@lru_cache(maxsize=64)
def list_tensors(config: Config) -> tuple[TensorSpec, ...]:
    """All of them: those that a token meets on its way, and those beside it."""
    met = inference_pass(config, 1, 1, ExecutionConfig()).weights
    held = [
        TensorSpec(
            ".".join(str(part) for part in weight.key),
            weight.shape,
            quantizable=_is_layer_matrix(weight),
            uses_muon=_is_layer_matrix(weight) and len(weight.shape) == 2 and min(weight.shape) > 1,
            is_lookup_table=not weight.in_matmul and weight.key[-1] in EMBEDDING_TABLES,
            expert_routing=weight.expert_routing,
        )
        for weight in met
    ]
    d_model = config.d_model
    if isinstance(config, Encoder) and config.pooler:
        held += [
            TensorSpec("pooler", (d_model, d_model), quantizable=True, uses_muon=True),
            TensorSpec("pooler.bias", (d_model,)),
        ]
    if isinstance(config.head, LMHead) and config.head.bias == "fixed":
        held.append(TensorSpec("head.bias", (config.vocab_size,), requires_grad=False, is_parameter=False))
    for name, stack in config.stacks.items():
        position = stack.embedding.position
        if isinstance(position, SinusoidalPosition) and position.table_length is not None:
            shape = position.table_length, stack.embedding.position_dim(d_model)
            held.append(TensorSpec(f"{name}.positions", shape, requires_grad=False, is_lookup_table=True))
        owners = stack.blocks if stack.layer_groups is None else stack.blocks[: stack.layer_groups]
        for index, block in enumerate(owners):
            if isinstance(block.ffn, Moe) and block.ffn.router.selection_bias:
                bias = f"{name}.{index}.ffn.selection_bias"
                held.append(
                    TensorSpec(bias, (block.ffn.experts,), requires_grad=False, is_parameter=False, always_fp32=True)
                )
    return tuple(held)


def _is_layer_matrix(weight: Weight) -> bool:
    """In a product and not as long as a vocabulary."""
    vocabulary = weight.key in (("tokens",), ("source_tokens",), ("head",))
    return weight.in_matmul and len(weight.shape) > 1 and not vocabulary


@dataclass(frozen=True)
class CheckpointSize:
    """What a checkpoint holds: tied weights once, buffers too."""

    num_tensors: int
    num_elements: int
    num_buffer_elements: int
    """How many of the elements are no parameters: fixed biases, a router's balance."""
    total_bytes: int
    """Of data; a safetensors header adds about a hundred a tensor."""


def checkpoint_size(config: Config, precision: Precision) -> CheckpointSize:
    every = list_tensors(config)
    return CheckpointSize(
        len(every),
        sum(each.numel for each in every),
        sum(each.numel for each in every if not each.is_parameter),
        sum(each.nbytes(precision) for each in every),
    )
