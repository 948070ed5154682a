"""Adapters of a configuration: the layers that they adapt, their weights, and the bytes of the frozen base."""

from collections.abc import Iterator, Mapping
from itertools import product
from math import ceil
from typing import Any

from cutaway.config.lora import LoRA
from cutaway.config.node import build_config_error
from cutaway.config.transformer import Config
from cutaway.errors import InputError
from cutaway.size.precision import Precision
from cutaway.size.shape_pass import Weight
from cutaway.size.shape_pass.adapters import FrozenBase, LayerAdapter, quantized_bytes
from cutaway.size.shape_pass.tensor import WeightKey
from cutaway.size.state_dict_shapes import TensorSpec, list_tensors, list_weights

QUANTIZATIONS = ("none", "nf4", "int8")
_NF4_BLOCK_SIZE = 64
_QUERY_LATENT_PARTS = {"q_down": "q.0", "q": "q.2"}
"""Names of the two matrices of a query latent (MLA), which the model applies one after the other."""
_FUSED_LAYERS = (("q", "k", "v"), ("gate", "up"), ("o",), ("down",))
"""Layers with the same input, whose adapters compiled steps fuse (`train/kernels/lora.py`)."""
_RANK_MULTIPLE = 16
_TOKEN_TABLES = (("tokens",), ("source_tokens",))


def read_adapter(adapter: LoRA | Mapping[str, Any] | None) -> LoRA | None:
    """Return a LoRA configuration, given as an object or a dict."""
    from pydantic import ValidationError

    if adapter is None or isinstance(adapter, LoRA):
        return adapter
    if not isinstance(adapter, Mapping):
        raise InputError(f"adapter is {adapter!r}; pass a dict such as {{'rank': 16}}, or a LoRA configuration")
    try:
        return LoRA.model_validate(dict(adapter))
    except ValidationError as error:
        raise build_config_error(error, adapter, num_tags=0) from None


def build_frozen_base(config: Config, adapter: LoRA | None, quantization: str) -> FrozenBase | None:
    """Return the adapted layers and the quantization of a frozen base; None if all weights are trained."""
    if adapter is None:
        return None
    base = FrozenBase(_find_adapted_layers(config, adapter), None if quantization == "none" else quantization)
    for weight in list_weights(config):
        is_matrix = weight.in_matmul and len(weight.shape) == 2
        if quantization == "nf4" and is_matrix and base.quantization_of(weight.key) and weight.numel % _NF4_BLOCK_SIZE:
            raise InputError(
                f"quantization 'nf4' needs weights with a multiple of {_NF4_BLOCK_SIZE} elements, but"
                f" {'.'.join(map(str, weight.key))} has the shape {weight.shape}; use int8"
            )
    return base


def _find_adapted_layers(config: Config, adapter: LoRA) -> dict[WeightKey, LayerAdapter]:
    """Adapter of each weight. Raises InputError if a target matches no layer, or a rank is too large."""
    adapters: dict[WeightKey, LayerAdapter] = {}
    sites: list[str] = []
    for weight in list_weights(config):
        is_table = weight.key in _TOKEN_TABLES
        is_layer = weight.key[0] in config.stacks and weight.in_matmul and len(weight.shape) > 1
        if not is_table and (not is_layer or weight.key[-1] == "router"):
            continue
        for site in _site_names(config, weight):
            sites.append(site)
            if weight.key in adapters or not adapter.matches(site):
                continue
            rank, smallest = adapter.rank_of(site), min(weight.shape[-2:])
            if rank > smallest:
                raise InputError(
                    f"adapter rank {rank} is more than the smaller dimension of '{site}', whose weight is"
                    f" {weight.shape}; use a rank of at most {smallest}, or rank_pattern"
                )
            adapters[weight.key] = LayerAdapter(rank, 0.0 if is_table else adapter.dropout, adapter.use_dora)
    adapter.check_targets(sites)
    return adapters


def _site_names(config: Config, weight: Weight) -> Iterator[str]:
    """Site names of a weight, as in `ct.trace`; a weight that several layers share has several."""
    several = len(config.stacks) == 2
    if weight.key in _TOKEN_TABLES:
        separate = getattr(config, "source_vocab_size", None) is not None
        for name in config.stacks:
            is_source = weight.key == ("source_tokens",)
            if not separate or is_source == (name == "encoder"):
                yield f"{name}.embed" if several else "embed"
        return
    stack, *rest = weight.key
    prefix = f"{stack}." if several else ""
    if not isinstance(rest[0], int):  # the projection of a factorized embedding
        yield f"{prefix}embed.{rest[0]}"
        return
    owner, *parts = rest
    has_query_latent = parts[-1] in _QUERY_LATENT_PARTS and (stack, owner, *parts[:-1], "q_down") in {
        each.key for each in list_weights(config)
    }
    if has_query_latent:
        parts[-1] = _QUERY_LATENT_PARTS[str(parts[-1])]
    for index, weight_set in enumerate(config.stacks[str(stack)].weight_sets):
        if weight_set == owner:
            yield f"{prefix}blocks.{index}.{'.'.join(map(str, parts))}"


def list_adapter_tensors(config: Config, base: FrozenBase) -> tuple[TensorSpec, ...]:
    """List the weights of the adapters, which are in fp32."""
    tensors = []
    for weight in list_weights(config):
        adapter = base.adapters.get(weight.key)
        if adapter is None:
            continue
        *leading, d_out, d_in = weight.shape
        if weight.key in _TOKEN_TABLES:  # A has a column per token
            d_out, d_in = d_in, d_out
        shapes = {"lora_a": (*leading, adapter.rank, d_in), "lora_b": (*leading, d_out, adapter.rank)}
        if adapter.use_dora:
            shapes["magnitude"] = (d_out,)
        name = ".".join(str(part) for part in weight.key)
        tensors += [TensorSpec(f"{name}.{part}", shape, always_fp32=True) for part, shape in shapes.items()]
    return tuple(tensors)


def frozen_bytes(config: Config, base: FrozenBase, precision: Precision) -> int:
    """Number of bytes of the frozen weights and buffers, with the scales of quantized weights."""
    matrices = {
        ".".join(str(part) for part in weight.key): weight.key
        for weight in list_weights(config)
        if weight.in_matmul and len(weight.shape) == 2
    }
    matrices["pooler"] = ("encoder", "pooler")
    total = 0
    for tensor in list_tensors(config):
        kind = base.quantization_of(matrices[tensor.name]) if tensor.name in matrices else None
        total += tensor.nbytes(precision) if kind is None else quantized_bytes(tensor.numel, tensor.shape[0], kind)
    return total


def fused_column_bytes(config: Config, base: FrozenBase, precision: Precision) -> int:
    """Number of bytes of the columns of B that compiled steps store beside the frozen weights.

    A row of a weight has a column for each rank of the layers with the same input.
    """
    if not base.is_fusible:
        return 0
    weights = {weight.key: weight for weight in list_weights(config)}
    parents = {key[:-1] for key in base.adapters}
    num_elements = 0
    for parent, names in product(parents, _FUSED_LAYERS):
        keys = [(*parent, name) for name in names]
        is_fused = all(
            key in base.adapters and (*key, "bias") not in weights and len(weights[key].shape) == 2 for key in keys
        )
        if is_fused:
            num_columns = ceil(sum(base.adapters[key].rank for key in keys) / _RANK_MULTIPLE) * _RANK_MULTIPLE
            num_elements += num_columns * sum(weights[key].shape[0] for key in keys)
    return precision.tensor_bytes((num_elements,))
