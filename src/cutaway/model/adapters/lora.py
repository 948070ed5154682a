"""LoRA layers: a linear layer, an embedding table or the experts of a MoE layer with low-rank adapters.

An adapted layer is a subclass of the layer that it replaces, and has the same parameters `weight` and `bias`, frozen.
So the state dict of the base model keeps its keys, and code that reads the weights of a layer works on adapted layers.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.model.adapters.quantized_linear import QuantizedLinear
from cutaway.model.layers import EmbeddingTable, Linear
from cutaway.model.moe import GroupedLinear, grouped_linear
from cutaway.quantization.quantized_tensor import QuantizedTensor


class LoRAWeights(nn.Module):
    """A and B of one layer, and the factor on B·A. Expert layers have one A and one B per expert (leading dim e)."""

    def __init__(
        self, in_features: int, out_features: int, rank: int, scaling: float, dropout: float, *leading: int
    ) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.empty(*leading, rank, in_features))
        self.lora_b = nn.Parameter(torch.empty(*leading, out_features, rank))
        self.magnitude: nn.Parameter | None = None
        """DoRA: the norm of each row of the adapted weight, (out_features,)."""
        self.rank, self.scaling, self.dropout = rank, scaling, dropout

    def reset_parameters(self) -> None:
        """Initialize A uniformly in ±1/√in and B with zeros, so that the layer computes the same as without adapter."""
        bound = 1 / math.sqrt(self.lora_a.shape[-1])
        nn.init.uniform_(self.lora_a, -bound, bound)
        nn.init.zeros_(self.lora_b)

    def delta_weight(self) -> Tensor:
        """scaling·B·A, the difference to the base weight (without DoRA)."""
        return self.scaling * (self.lora_b @ self.lora_a)

    def forward(self, x: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch o"]:
        """scaling·B·A·dropout(x)."""
        x = self.cast_input(F.dropout(x, self.dropout, self.training))
        return F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scaling

    def cast_input(self, x: Tensor) -> Tensor:
        """x in the dtype of A. With autocast, x is not cast, so that adapters of the same x save it only once."""
        is_autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        return x if is_autocast else x.to(self.lora_a.dtype)


@dataclass(frozen=True)
class RowAdapters:
    """Adapter of each row of a batch. None: the base layer."""

    names: tuple[str | None, ...]
    rows: dict[str, Tensor]
    """Indices of the rows of each adapter, if the rows have different adapters."""

    @property
    def is_mixed(self) -> bool:
        return bool(self.rows)


_ROW_ADAPTERS: ContextVar[RowAdapters | None] = ContextVar("cutaway_row_adapters", default=None)


@contextmanager
def use_row_adapters(names: Sequence[str | None], device: torch.device) -> Iterator[None]:
    """Context in which row i of a batch has the adapter `names[i]`, in the calling thread only."""
    token = _ROW_ADAPTERS.set(_group_rows(tuple(names), device))
    try:
        yield
    finally:
        _ROW_ADAPTERS.reset(token)


@lru_cache(maxsize=64)  # decode steps have the same rows until a request ends, and a copy to a GPU would synchronize
def _group_rows(names: tuple[str | None, ...], device: torch.device) -> RowAdapters:
    rows: dict[str, Tensor] = {}
    if len(set(names)) > 1:
        for name in dict.fromkeys(name for name in names if name is not None):
            with torch.inference_mode(False):  # the tensor may be used in a training step later
                rows[name] = torch.tensor([i for i, each in enumerate(names) if each == name], device=device)
    return RowAdapters(names, rows)


def _row_adapters() -> RowAdapters | None:
    # torch.compile does not trace context variables. Compiled models have one adapter, which is merged or active.
    return None if torch.compiler.is_compiling() else _ROW_ADAPTERS.get()


class AdaptedLayer(nn.Module):
    """Mixin of the layers below: adapters by name, the active one, and merging into the weight."""

    adapters: nn.ModuleDict
    active_adapter: str | None
    """Name of the adapter that `forward` applies. None: the base layer."""
    weight: Any
    _base_weight: Tensor | None
    """Copy of the base weight while an adapter is merged into `weight`."""

    @property
    def active(self) -> LoRAWeights | None:
        """Weights of the active adapter. None if there is none, or if it is merged into the weight."""
        name, selected = self.active_adapter, _row_adapters()
        if selected is not None:
            if selected.is_mixed:
                raise InputError(
                    "the rows of this batch have different adapters, which adapters of experts do not support; pass the"
                    " prompts of each adapter in a batch of their own"
                )
            name = selected.names[0]
        if name is None or self._base_weight is not None or name not in self.adapters:
            return None
        adapter = self.adapters[name]
        assert isinstance(adapter, LoRAWeights)
        return adapter

    def new_weights(self, rank: int, scaling: float, dropout: float) -> LoRAWeights:
        """Uninitialized adapter weights with the shapes of this layer."""
        raise NotImplementedError

    def base_weight(self) -> Tensor:
        """The base weight as a dense tensor."""
        weight: Tensor = self.weight
        return weight

    def add_update(self, adapter: LoRAWeights, x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
        """Output with an adapter for the input x. y is the output of the base layer."""
        delta = adapter(x).to(y.dtype)
        if adapter.magnitude is None:
            return y + delta
        # DoRA: every row of W + scaling·B·A is normalized and multiplied by its magnitude. The norm is a constant in
        # the backward pass (section 4.3 of the paper).
        with torch.no_grad():
            norm = (self.base_weight().to(adapter.lora_a.dtype) + adapter.delta_weight()).norm(dim=-1)
        ratio = (adapter.magnitude / norm).to(y.dtype)
        return ratio * (y + delta) if bias is None else ratio * (y - bias + delta) + bias

    def merged_weight(self) -> Tensor:
        """Weight of a plain layer that computes the same as this layer with its active adapter."""
        adapter, weight = self.active, self.base_weight()
        if adapter is None:
            return weight
        with torch.no_grad():
            dtype = torch.promote_types(adapter.lora_a.dtype, weight.dtype)
            merged = weight.to(dtype) + adapter.delta_weight().to(dtype)
            if adapter.magnitude is not None:
                merged = merged * (adapter.magnitude / merged.norm(dim=-1)).unsqueeze(-1)
            return merged.to(weight.dtype)

    def merge(self) -> None:
        """Add the active adapter to the weight. `unmerge` restores the base weight bit for bit."""
        if self.active is None:
            return
        if isinstance(self, QuantizedLinear) or isinstance(self.weight, QuantizedTensor):
            raise InputError(
                "an adapter cannot be merged in place into a quantized base, because the sum would be rounded again;"
                " use merge_and_unload(), which returns a model with dense weights"
            )
        merged = self.merged_weight()
        self._base_weight = self.weight.detach().clone()
        self.weight.data.copy_(merged)

    def unmerge(self) -> None:
        if self._base_weight is not None:
            self.weight.data.copy_(self._base_weight)
            self._base_weight = None


def _apply_adapter(layer: AdaptedLayer, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """Output of a layer with its active adapter, or with the adapter of each row. y is the output of the base layer."""
    selected = _row_adapters()
    if selected is None or not selected.is_mixed:
        adapter = layer.active
        return y if adapter is None else layer.add_update(adapter, x, y, bias)
    if len(y) != len(selected.names):
        raise InputError(
            f"the batch has {len(y)} rows, but adapters of {len(selected.names)} rows are selected; pass one adapter"
            " name per row"
        )
    for name, rows in selected.rows.items():
        if name in layer.adapters:
            weights = layer.adapters[name]
            assert isinstance(weights, LoRAWeights)
            y = y.index_copy(0, rows, layer.add_update(weights, x[rows], y[rows], bias))
    return y


class LoRALinear(AdaptedLayer, Linear):
    """Linear layer with LoRA adapters."""

    def new_weights(self, rank: int, scaling: float, dropout: float) -> LoRAWeights:
        return LoRAWeights(self.in_features, self.out_features, rank, scaling, dropout)

    def forward(self, x: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch o"]:
        return _apply_adapter(self, x, F.linear(x, self.weight, self.bias), self.bias)


class LoRAQuantizedLinear(AdaptedLayer, QuantizedLinear):
    """Quantized linear layer with LoRA adapters (QLoRA). https://arxiv.org/abs/2305.14314"""

    def new_weights(self, rank: int, scaling: float, dropout: float) -> LoRAWeights:
        return LoRAWeights(self.in_features, self.out_features, rank, scaling, dropout)

    def base_weight(self) -> Tensor:
        return self.dequantize()

    def forward(self, x: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch o"]:
        return _apply_adapter(self, x, QuantizedLinear.forward(self, x), self.bias)


class LoRAEmbedding(AdaptedLayer, EmbeddingTable):
    """Embedding table with LoRA adapters: row id of W + scaling·(B·A)ᵀ."""

    def new_weights(self, rank: int, scaling: float, dropout: float) -> LoRAWeights:
        return LoRAWeights(self.num_embeddings, self.embedding_dim, rank, scaling, dropout)

    def merged_weight(self) -> Tensor:
        adapter = self.active
        if adapter is None:
            return self.base_weight()
        with torch.no_grad():
            return (self.weight.to(adapter.lora_a.dtype) + adapter.delta_weight().mT).to(self.weight.dtype)

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d"]:
        return _apply_adapter(self, ids, EmbeddingTable.forward(self, ids))

    def add_update(self, adapter: LoRAWeights, x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
        delta = F.embedding(x, adapter.lora_a.mT) @ adapter.lora_b.mT * adapter.scaling
        return y + delta.to(y.dtype)


class LoRAGroupedLinear(AdaptedLayer, GroupedLinear):
    """Linear layers of all experts, with LoRA adapters per expert."""

    def new_weights(self, rank: int, scaling: float, dropout: float) -> LoRAWeights:
        num_experts, out_features, in_features = self.weight.shape
        return LoRAWeights(in_features, out_features, rank, scaling, dropout, num_experts)

    def forward(self, x: Float[Tensor, "n i"], offsets: Int[Tensor, " e"]) -> Float[Tensor, "n o"]:
        y = GroupedLinear.forward(self, x, offsets)
        adapter = self.active
        if adapter is None:
            return y
        dropped = adapter.cast_input(F.dropout(x, adapter.dropout, self.training))
        delta = grouped_linear(grouped_linear(dropped, adapter.lora_a, offsets), adapter.lora_b, offsets)
        return y + (delta * adapter.scaling).to(y.dtype)


def effective_weight(layer: nn.Module) -> Tensor:
    """Weight of a layer with its active adapter: what an analysis of the weights has to read."""
    weight: Tensor = layer.merged_weight() if isinstance(layer, AdaptedLayer) else layer.weight  # type: ignore[assignment]
    return weight


ADAPTED_CLASSES: dict[type[nn.Module], type[AdaptedLayer]] = {
    Linear: LoRALinear,
    QuantizedLinear: LoRAQuantizedLinear,
    EmbeddingTable: LoRAEmbedding,
    GroupedLinear: LoRAGroupedLinear,
}
"""Class of the adapted layer by the class of the layer that it replaces."""


def adapt_layer(layer: nn.Module) -> AdaptedLayer:
    """Return a layer that has the parameters of `layer`, frozen, and no adapter yet."""
    if isinstance(layer, AdaptedLayer):
        return layer
    adapted = _copy_as(layer, ADAPTED_CLASSES[type(layer)])
    assert isinstance(adapted, AdaptedLayer)
    adapted.adapters, adapted.active_adapter, adapted._base_weight = nn.ModuleDict(), None, None
    return adapted


def merged_layer(layer: AdaptedLayer) -> nn.Module:
    """Return a plain layer that computes the same as `layer` with its active adapter. The weight is a new tensor."""
    if isinstance(layer, LoRAQuantizedLinear):
        merged = Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        merged.bias = layer.bias
    else:
        plain = next(base for base, adapted in ADAPTED_CLASSES.items() if adapted is type(layer))
        merged = _copy_as(layer, plain)  # type: ignore[assignment]
        for name in ("adapters", "active_adapter", "_base_weight"):
            merged._modules.pop(name, None)
            merged.__dict__.pop(name, None)
    if layer.active is not None or isinstance(layer, LoRAQuantizedLinear):
        merged.weight = nn.Parameter(layer.merged_weight(), requires_grad=False)
    elif layer._base_weight is not None:  # merged in place: `unmerge` will change the weight of `layer`
        merged.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    return merged


def _copy_as(layer: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Return a module of another class with the same attributes, parameters, buffers and hooks."""
    copied = cls.__new__(cls)
    copied.__dict__ = {
        name: dict(value) if isinstance(value, dict) and name in ("_parameters", "_buffers", "_modules") else value
        for name, value in layer.__dict__.items()
    }
    return copied
