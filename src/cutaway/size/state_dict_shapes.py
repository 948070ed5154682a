"""The tensors of a state dict, with names, shapes and roles, and the size of a checkpoint."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from cutaway.config.ffn import Moe
from cutaway.config.head import LMHead
from cutaway.config.positions import SinusoidalPosition
from cutaway.config.transformer import Config, Encoder
from cutaway.size.precision import MatrixKind, Precision
from cutaway.size.shape_pass import ExecutionConfig, Weight, inference_pass


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and uses of one tensor of the state dict; tied weights are one tensor."""

    name: str
    shape: tuple[int, ...]
    quantizable: bool = False
    """Whether quantization applies. It applies to the matrices of layers, including the stacked matrices of experts."""
    uses_muon: bool = False
    """Whether Muon applies. It applies to matrices of layers (not stacked) with more than one row and column."""
    requires_grad: bool = True
    is_parameter: bool = True
    """False for a buffer, which is saved but not counted as a parameter."""
    always_fp32: bool = False
    """Whether the tensor is stored in fp32 regardless of the model's dtype."""
    is_lookup_table: bool = False
    """Whether the tensor is used only as an embedding table, not in a matmul."""
    expert_routing: tuple[int, int] | None = None
    """(top_k, experts) for the weights of routed experts."""

    @property
    def is_output_matrix(self) -> bool:
        """Whether the tensor is the matrix of the LM head, which may be the embedding table too."""
        return self.name == "head" or (self.name == "tokens" and not self.is_lookup_table)

    @property
    def matrix_kind(self) -> MatrixKind | None:
        """The kind of matrix for quantization; None for vectors."""
        if self.quantizable:
            return "layer" if self.expert_routing is None else "experts"
        return "output" if self.is_output_matrix else "embedding" if self.is_lookup_table else None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def shard(self, dp_shard: int) -> "TensorSpec":
        """Return this tensor with the shape of its largest FSDP shard: dimension 0 divided by `dp_shard`, rounded up.

        A tensor without gradient is not sharded and returned unchanged."""
        return self if not self.requires_grad else replace(self, shape=(-(-self.shape[0] // dp_shard), *self.shape[1:]))

    def nbytes(self, precision: Precision) -> int:
        return 4 * self.numel if self.always_fp32 else precision.tensor_bytes(self.shape, self.matrix_kind)


@lru_cache(maxsize=64)
def list_weights(config: Config) -> tuple[Weight, ...]:
    """List the weights of the forward pass; tied weights are one weight.

    The explicit kernel is used because it supports every configuration and records the tables of position biases."""
    return inference_pass(config, 1, 1, ExecutionConfig(kernel="explicit")).weights


_EMBEDDING_TABLES = ("tokens", "source_tokens", "positions", "types")


@lru_cache(maxsize=64)
def list_tensors(config: Config) -> tuple[TensorSpec, ...]:
    """List all tensors of the state dict: weights of the forward pass, then the pooler, frozen tables and buffers."""
    tensors = [
        TensorSpec(
            ".".join(str(part) for part in weight.key),
            weight.shape,
            quantizable=_is_layer_matrix(weight),
            uses_muon=_is_layer_matrix(weight) and len(weight.shape) == 2 and min(weight.shape) > 1,
            is_lookup_table=not weight.in_matmul and weight.key[-1] in _EMBEDDING_TABLES,
            expert_routing=weight.expert_routing,
        )
        for weight in list_weights(config)
    ]
    d_model = config.d_model
    if isinstance(config, Encoder) and config.pooler:
        tensors += [
            TensorSpec("pooler", (d_model, d_model), quantizable=True, uses_muon=True),
            TensorSpec("pooler.bias", (d_model,)),
        ]
    if isinstance(config.head, LMHead) and config.head.bias == "fixed":
        tensors.append(TensorSpec("head.bias", (config.vocab_size,), requires_grad=False, is_parameter=False))
    for name, stack in config.stacks.items():
        position = stack.embedding.position
        if isinstance(position, SinusoidalPosition) and position.table_length is not None:
            shape = position.table_length, stack.embedding.position_dim(d_model)
            tensors.append(TensorSpec(f"{name}.positions", shape, requires_grad=False, is_lookup_table=True))
        for index, block in dict(zip(stack.weight_sets, stack.blocks, strict=True)).items():
            if isinstance(block.ffn, Moe) and block.ffn.router.selection_bias:
                bias = f"{name}.{index}.ffn.selection_bias"
                tensors.append(
                    TensorSpec(bias, (block.ffn.experts,), requires_grad=False, is_parameter=False, always_fp32=True)
                )
    return tuple(tensors)


def _is_layer_matrix(weight: Weight) -> bool:
    """Whether a weight is a matrix used in matmuls, other than the token embedding and the output matrix."""
    is_vocab_matrix = weight.key in (("tokens",), ("source_tokens",), ("head",))
    return weight.in_matmul and len(weight.shape) > 1 and not is_vocab_matrix


@dataclass(frozen=True)
class CheckpointSize:
    """Size of a checkpoint. Tied weights count once, and buffers are included."""

    num_tensors: int
    num_elements: int
    num_buffer_elements: int
    """Number of elements that are not parameters: fixed biases, the router's selection bias."""
    total_bytes: int
    """Number of bytes of tensor data; the safetensors header adds about 100 bytes per tensor."""


def checkpoint_size(config: Config, precision: Precision) -> CheckpointSize:
    tensors = list_tensors(config)
    return CheckpointSize(
        len(tensors),
        sum(tensor.numel for tensor in tensors),
        sum(tensor.numel for tensor in tensors if not tensor.is_parameter),
        sum(tensor.nbytes(precision) for tensor in tensors),
    )
