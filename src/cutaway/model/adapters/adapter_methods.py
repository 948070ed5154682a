"""Adapters of a model: add, select, merge and remove LoRA adapters. `AdapterMethods` is a base class of Transformer."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.config.node import build_config_error
from cutaway.errors import InputError
from cutaway.model.adapters.lora import (
    ADAPTED_CLASSES,
    AdaptedLayer,
    LoRAEmbedding,
    LoRAGroupedLinear,
    adapt_layer,
    merged_layer,
    use_row_adapters,
)
from cutaway.model.layers import EmbeddingTable
from cutaway.model.parallel.process_group import check_not_split

T = TypeVar("T", bound="AdapterMethods")
ADAPTER_KEY = ".adapters."
"""Part of the state dict keys of adapter weights."""
BASE_ADAPTER = "__base__"
"""Name of the base model where the name of an adapter is expected, as in PEFT."""


class AdapterMethods:
    """Methods of a model that concern its adapters. The names are those of PEFT."""

    _adapters: dict[str, cfg.LoRA]

    @property
    def adapters(self) -> dict[str, cfg.LoRA]:
        """Configuration of each adapter by name."""
        return dict(self.__dict__.get("_adapters", {}))

    @property
    def active_adapter(self) -> str | None:
        """Name of the adapter that the forward pass applies; None if there is none, or if adapters are disabled."""
        if not self.adapters:
            return None
        return next((layer.active_adapter for layer in adapted_layers(self._module()).values()), None)

    def add_adapter(
        self: T, config: cfg.LoRA | Mapping[str, Any], name: str = "default", *, seed: int | None = None
    ) -> T:
        """Add a LoRA adapter and select it. All other parameters are frozen; those of the adapter are trainable.

        At first the adapter does not change the output, because B is zero. `seed` determines the initial A.
        """
        config = read_lora_config(config)
        _check_ranks(self._module(), config)
        return self.insert_adapter(config, name, seed=seed)

    def insert_adapter(self: T, config: cfg.LoRA, name: str, *, seed: int | None = None) -> T:
        """`add_adapter` for an adapter from a file, whose rank may be larger than the dimensions of a layer."""
        model = self._module()
        check_not_split(model, "an adapter")
        if getattr(model, "offloaded_modules", ()):
            raise InputError(
                "an adapter cannot be added to offloaded weights; load the model on one device, or save it with the"
                " adapter merged into the weights, with ct.save"
            )
        if name in self.adapters or not is_adapter_name(name):
            reason = "exists already" if name in self.adapters else "is not a name of letters, digits, '_' and '-'"
            raise InputError(f"adapter '{name}' {reason}; pass another name")
        self.unmerge_adapter()  # magnitudes of DoRA are initialized from the base weights
        layers = adaptable_layers(model)
        config.check_targets(layers)
        sites = {site: layer for site, layer in layers.items() if config.matches(site)}
        _check_dora(config, sites)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        replaced = {layer: adapt_layer(layer) for layer in dict.fromkeys(sites.values())}
        _replace_modules(model, replaced)
        with _seeded(seed):
            for site, layer in sites.items():
                adapted = replaced[layer]
                if name in adapted.adapters:
                    continue  # the layer is shared by several blocks
                adapted.adapters[name] = _new_weights(adapted, config, site)
        self.__dict__.setdefault("_adapters", {})[name] = config
        self.set_adapter(name)
        return self

    def set_adapter(self: T, name: str | None) -> T:
        """Select the adapter that the forward pass applies, and make it trainable. None: the base model."""
        self.check_adapter(name)
        for layer in adapted_layers(self._module()).values():
            layer.unmerge()
            layer.active_adapter = name
            for adapter_name, adapter in layer.adapters.items():
                adapter.requires_grad_(adapter_name == name)
        return self

    @contextmanager
    def use_adapter(self, name: str | None) -> Iterator[None]:
        """Context in which the forward pass applies another adapter, or the base model (None)."""
        self.check_adapter(name)
        self._check_unmerged()
        layers = list(adapted_layers(self._module()).values())
        before = [layer.active_adapter for layer in layers]
        for layer in layers:
            layer.active_adapter = name
        try:
            yield
        finally:
            for layer, previous in zip(layers, before, strict=True):
                layer.active_adapter = previous

    @contextmanager
    def use_adapters(self, adapter_names: Sequence[str | None]) -> Iterator[None]:
        """Context in which row i of each batch has the adapter `adapter_names[i]`; None is the base model.

        It applies in the calling thread only, so that other threads can use other adapters of this model.
        """
        for name in adapter_names:
            self.check_adapter(name)
        self._check_unmerged()
        device = next(self._module().parameters()).device
        with use_row_adapters(adapter_names, device):
            yield

    def check_adapter(self, name: str | None) -> None:
        """Raise InputError if the model has no adapter of this name. None is the base model."""
        if name is not None and not isinstance(name, str):
            raise InputError(f"the adapter is {name!r:.40}; pass the name of an adapter, or None for the base model")
        if name is None or name in self.adapters:
            return
        if not self.adapters:
            raise InputError(f"there is no adapter '{name}', because the model has none; load it with adapters=")
        raise InputError(f"there is no adapter '{name}'; add it first, or use one of: {', '.join(self.adapters)}")

    @property
    def has_expert_adapters(self) -> bool:
        """Whether experts have adapters. All rows of a batch then need the same adapter."""
        if not self.adapters:
            return False
        return any(isinstance(layer, LoRAGroupedLinear) for layer in adapted_layers(self._module()).values())

    @property
    def has_merged_adapter(self) -> bool:
        """Whether an adapter is merged into the weights, in place."""
        if not self.adapters:
            return False
        return any(layer._base_weight is not None for layer in adapted_layers(self._module()).values())

    def is_mergeable(self, name: str | None) -> bool:
        """Whether an adapter can be merged into the weights: not if it adapts an embedding that is tied to the head."""
        table = getattr(getattr(self._module(), "head", None), "matrix", None)
        return not (isinstance(table, LoRAEmbedding) and name is not None and name in table.adapters)

    def check_mergeable(self, name: str | None) -> None:
        """Raise InputError if an adapter cannot be merged into the weights."""
        if not self.is_mergeable(name):
            raise InputError(
                "the embedding has an adapter, but the output matrix is tied to the embedding, so merging would change"
                " it too; use the adapter unmerged, or train one without the target 'embed'"
            )

    def disable_adapters(self) -> Any:
        """Context in which the forward pass is that of the base model."""
        return self.use_adapter(None)

    def merge_adapter(self: T) -> T:
        """Add the active adapter to the weights, in place. `unmerge_adapter` restores them bit for bit."""
        model = self._module()
        self.check_mergeable(self.active_adapter)
        for layer in adapted_layers(model).values():
            layer.merge()
        return self

    def unmerge_adapter(self: T) -> T:
        """Restore the weights of the base model after `merge_adapter`."""
        for layer in adapted_layers(self._module()).values():
            layer.unmerge()
        return self

    def delete_adapter(self: T, name: str) -> T:
        """Remove an adapter. If it is the active one, the forward pass is that of the base model."""
        if name not in self.adapters:
            raise InputError(f"there is no adapter '{name}'; the model has: {', '.join(self.adapters) or 'none'}")
        for layer in adapted_layers(self._module()).values():
            if layer.active_adapter == name:
                layer.unmerge()
                layer.active_adapter = None
            if name in layer.adapters:
                del layer.adapters[name]
        del self._adapters[name]
        return self

    def merge_and_unload(self: T) -> T:
        """Return a model without adapters that computes the same as this one with its active adapter.

        Layers without an adapter share their weights with this model. A quantized base is dequantized.
        """
        model = self._module()
        self.check_mergeable(self.active_adapter)
        layers = dict.fromkeys(adapted_layers(model).values())
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        plain = copy.deepcopy(model, memo)
        copies = {id(layer): memo[id(layer)] for layer in layers}
        _replace_modules(plain, {copies[id(layer)]: merged_layer(layer) for layer in layers})
        plain.__dict__.pop("_adapters", None)
        return plain  # type: ignore[return-value]

    def _check_unmerged(self) -> None:
        if self.has_merged_adapter:
            raise InputError("an adapter is merged into the weights; call unmerge_adapter() first")

    def _module(self) -> nn.Module:
        assert isinstance(self, nn.Module)
        return self


def is_adapter_name(name: str) -> bool:
    """Whether a name can be that of an adapter: the key of a module, without dots."""
    return re.fullmatch(r"[\w-]+", name) is not None and not hasattr(nn.ModuleDict, name) and name != BASE_ADAPTER


def read_lora_config(config: cfg.LoRA | Mapping[str, Any]) -> cfg.LoRA:
    """Return a LoRA configuration, given as an object or a dict."""
    from pydantic import ValidationError

    if isinstance(config, cfg.LoRA):
        return config
    if not isinstance(config, Mapping):
        raise InputError(
            f"the configuration of an adapter is a {type(config).__name__}; pass a dict or a cutaway.config.LoRA, such"
            " as {'rank': 8, 'targets': ['attn.q', 'attn.v']}"
        )
    try:
        return cfg.LoRA.model_validate(dict(config))
    except ValidationError as error:
        raise build_config_error(error, config, num_tags=0) from None


def adaptable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that can have an adapter, by site name: 'blocks.0.attn.q', 'embed', or 'encoder.blocks.0.attn.q'.

    The names are those of `ct.trace`. Encoder-decoders have the prefixes `encoder.` and `decoder.`.
    """
    stacks = [name for name in ("encoder", "decoder") if hasattr(model, name)]
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        stack, _, path = name.partition(".")
        is_adaptable = isinstance(module, AdaptedLayer) or type(module) in ADAPTED_CLASSES
        if stack not in stacks or not is_adaptable or ADAPTER_KEY in f"{name}.":
            continue
        is_position_table = path.startswith(("embed.position", "positions")) or path == "embed.token_types"
        if is_position_table:
            continue
        site = "embed" if path == "embed.token" else path.replace(".f.", ".").replace("_cross.", "cross.")
        layers[site if len(stacks) == 1 else f"{stack}.{site}"] = module
    return layers


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """Layers with adapters by module name. A layer that several blocks share appears once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLayer)}


def describe_adapter(model: AdapterMethods) -> str | None:
    """One line about the active adapter: name, method, rank and number of layers. None if there is none."""
    name = model.active_adapter
    if name is None:
        return None
    config = model.adapters[name]
    method = ("DoRA" if config.use_dora else "LoRA") + (" (rsLoRA)" if config.use_rslora else "")
    count = sum(name in layer.adapters for layer in adapted_layers(model._module()).values())
    return f"adapter {name}: {method} of rank {config.rank} on {count} layers"


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """State dict of what is trained with an adapter: the adapters, and the head of a task, which is trained fully."""
    has_task_head = isinstance(getattr(getattr(model, "config", None), "head", None), cfg.TaskHead)
    prefixes = ("head.",) if has_task_head else ()
    return {
        name: tensor for name, tensor in model.state_dict().items() if ADAPTER_KEY in name or name.startswith(prefixes)
    }


def inactive_adapter_keys(model: nn.Module) -> set[str]:
    """State dict keys of the adapters that the forward pass does not apply."""
    keys: set[str] = set()
    for path, layer in adapted_layers(model).items():
        inactive = [name for name in layer.adapters if layer.active is None or name != layer.active_adapter]
        for name in inactive:
            keys.update(f"{path}{ADAPTER_KEY}{name}.{leaf}" for leaf in layer.adapters[name].state_dict())
    return keys


def _check_dora(config: cfg.LoRA, sites: Mapping[str, nn.Module]) -> None:
    for site, layer in sites.items():
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if config.use_dora and (weight.ndim != 2 or isinstance(layer, EmbeddingTable)):
            problem = f"use_dora is for linear layers, but '{site}' is not one"
            raise InputError(f"{problem}; leave it out of targets, or set use_dora to false")


def _check_ranks(model: nn.Module, config: cfg.LoRA) -> None:
    for site, layer in adaptable_layers(model).items():
        weight: Tensor = layer.weight  # type: ignore[assignment]
        rank, shape = config.rank_of(site), tuple(weight.shape)
        if config.matches(site) and rank > min(shape[-2:]):
            raise InputError(
                f"adapter rank {rank} is more than the smaller dimension of '{site}', whose weight is {shape}; use a"
                f" rank of at most {min(shape[-2:])}, or rank_pattern"
            )


def _new_weights(layer: AdaptedLayer, config: cfg.LoRA, site: str) -> nn.Module:
    """Initialized adapter weights of a layer, on its device, in fp32 or in the dtype of the layer if that is wider."""
    reference = next((t for t in (*layer.parameters(), *layer.buffers())), torch.empty(0))
    weights = layer.new_weights(config.rank_of(site), config.scaling_of(site), config.dropout)
    dtype = torch.promote_types(reference.dtype, torch.float32) if reference.is_floating_point() else torch.float32
    weights = weights.to(dtype=dtype)
    if isinstance(layer, LoRAEmbedding):  # as in PEFT: A is zero and B is N(0, 1)
        nn.init.zeros_(weights.lora_a)
        nn.init.normal_(weights.lora_b)
    else:
        weights.reset_parameters()
    if config.use_dora:
        weights.magnitude = nn.Parameter(layer.base_weight().to(dtype).norm(dim=-1).cpu())
    return weights.to(reference.device).train(layer.training)


def _replace_modules(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> None:
    """Replace submodules wherever they occur: a module may be shared by several parents."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # unlike named_children, with repeated modules
            if child is not None and child in replaced:
                parent._modules[name] = replaced[child]


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Context in which the CPU random generator has this seed. None: the generator is used as it is."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
