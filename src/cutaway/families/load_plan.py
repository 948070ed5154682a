"""Load plan: match checkpoint keys to model keys; find missing, unexpected and mismatched keys before reading."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from cutaway.config import Config, EmbeddingHead, LatentAttention
from cutaway.families.family import Family
from cutaway.families.safetensors_reader import TensorInfo
from cutaway.families.weight_conversion import ConversionOp, WeightMapping
from cutaway.model import Transformer


@dataclass(frozen=True)
class TensorConversion:
    """Checkpoint keys, model keys, and the operation that converts between them."""

    checkpoint_keys: tuple[str, ...]
    model_keys: tuple[str, ...]
    op: ConversionOp
    d_head: int
    """Head dimension of the layer; 0 outside of layers."""
    save_only: bool = False
    """`WeightMapping.save_only`: saved in addition to another conversion of the same model tensor."""


@dataclass
class LoadPlan:
    """Conversions to perform, and the keys that are computed, ignored, missing, unexpected or mismatched."""

    conversions: list[TensorConversion] = field(default_factory=list)
    duplicates: list[tuple[TensorConversion, TensorConversion]] = field(default_factory=list)
    """Pairs of conversions to the same model tensor: (the one that is not loaded, the one that is loaded)."""
    computed_weights: list[str] = field(default_factory=list)
    """Model keys that are not in the file and are computed from the configuration."""
    ignored_weights: dict[str, str] = field(default_factory=dict)
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    mismatched_keys: list[str] = field(default_factory=list)

    @property
    def all_conversions(self) -> list[TensorConversion]:
        return [*self.conversions, *(duplicate for duplicate, _ in self.duplicates)]


def canonical_keys(model: Transformer) -> dict[str, str]:
    """Return {state dict key: first key of the same tensor}. The two differ for tied weights."""
    first_key: dict[int, str] = {}
    return {name: first_key.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def expand_mappings(rows: Sequence[WeightMapping], config: Config, model: Transformer) -> Iterator[TensorConversion]:
    """Yield the tensor conversions of a model: each mapping is expanded for every layer, weight, bias and expert."""
    state = model.state_dict(keep_vars=True)
    for mapping in rows:
        if mapping.condition is not None and not mapping.condition(config):
            continue
        for i, d_head in _matching_layers(mapping, config):
            for leaf in ("", ".weight", ".bias"):
                model_keys = tuple(_format_key(target, i, config) + leaf for target in mapping.model_keys)
                present = [name in state for name in model_keys]
                if not any(present):
                    continue
                assert all(present), f"mapping {mapping} has only some of {model_keys}"
                key = _format_key(mapping.checkpoint_key, i, config) + leaf
                count = state[model_keys[0]].shape[0] if "{e}" in key else 1
                checkpoint_keys = tuple(key.replace("{e}", str(e)) for e in range(count))
                yield TensorConversion(checkpoint_keys, model_keys, mapping.op, d_head, mapping.save_only)


def _matching_layers(mapping: WeightMapping, config: Config) -> Iterator[tuple[int, int]]:
    """Yield (layer index, head dimension) of each layer that a mapping covers, or (0, 0) if its keys have no {i}."""
    if "{i}" not in mapping.model_keys[0]:
        yield 0, 0
        return
    stack = config.stacks.get(mapping.model_keys[0].split(".")[0])
    for i, block in enumerate(stack.blocks if stack else ()):
        attention = block.attention
        yield i, attention.d_nope if isinstance(attention, LatentAttention) else attention.head_dim(config.d_model)


def _format_key(pattern: str, layer: int, config: Config) -> str:
    if "{g}" in pattern:
        (stack,) = config.stacks.values()
        group, index = divmod(stack.weight_sets[layer], stack.layers_per_group)
        pattern = pattern.replace("{g}", str(group)).replace("{j}", str(index))
    return pattern.replace("{i}", str(layer))


def build_load_plan(
    family: Family, config: Config, model: Transformer, tensor_infos: Mapping[str, TensorInfo]
) -> tuple[LoadPlan, dict[str, str]]:
    """Return the load plan, whose checkpoint keys are the family's, and a dict {key of the family: key in the file}."""
    file_keys = _normalize_checkpoint_keys(family, config, tensor_infos)
    plan = LoadPlan()
    canonical = canonical_keys(model)
    loaded: dict[str, TensorConversion] = {}
    expected: dict[str, TensorConversion] = {}
    loadable = [mapping for mapping in family.weight_mappings_for(config) if not mapping.save_only]
    for conversion in expand_mappings(loadable, config, model):
        model_keys = tuple(canonical[name] for name in conversion.model_keys)
        conversion = replace(conversion, model_keys=model_keys)
        expected.setdefault(model_keys[0], conversion)
        if not any(name in file_keys for name in conversion.checkpoint_keys):
            continue
        if model_keys[0] not in loaded:
            plan.conversions.append(conversion)
            loaded.update(dict.fromkeys(model_keys, conversion))
        elif conversion.checkpoint_keys != loaded[model_keys[0]].checkpoint_keys:
            plan.duplicates.append((conversion, loaded[model_keys[0]]))
    missing: dict[str, None] = {}
    mapped = {name for conversion in expected.values() for name in conversion.model_keys}
    trainable = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    for name in dict.fromkeys(canonical.values()):
        if name not in loaded and name not in trainable and name in expected:
            plan.computed_weights.append(name)
        elif name not in loaded and name in expected:
            missing.update(dict.fromkeys(expected[name].checkpoint_keys))
        elif name not in loaded and name not in mapped:
            missing[f"(family '{family.name}' has no mapping for {name})"] = None
    lm_head_keys = {row.checkpoint_key for row in family.weight_mappings if row.model_keys[0].startswith("head.")}
    used = {name for conversion in plan.all_conversions for name in conversion.checkpoint_keys}
    plan.missing_keys = [*missing, *sorted(used - file_keys.keys() - missing.keys())]
    for name in sorted(file_keys.keys() - used):
        reason = family.reason_ignored(name, max(stack.layers for stack in config.stacks.values()))
        reason = reason or tensor_infos[file_keys[name]].reason_ignored or None
        if reason is None and isinstance(config.head, EmbeddingHead) and name.rpartition(".")[0] in lm_head_keys:
            reason = "LM head, which an embedding model does not have"
        if reason is None:
            plan.unexpected_keys.append(file_keys[name])
        else:
            plan.ignored_weights[file_keys[name]] = reason
    infos = {name: tensor_infos[file_key] for name, file_key in file_keys.items()}
    plan.mismatched_keys = list(_find_mismatched_keys(plan, model, infos))
    return plan, file_keys


def rename_legacy_key(family: Family, name: str) -> str:
    """Return the family's current name of a tensor."""
    for old, new in family.weight_renamings:
        name = re.sub(old, new, name)
    return name


def _normalize_checkpoint_keys(
    family: Family, config: Config, tensor_infos: Mapping[str, TensorInfo]
) -> dict[str, str]:
    """Return {key of the family: key in the file}: legacy names are replaced and missing prefixes added."""
    prefix = family.base_model_prefix
    is_base_model = prefix and not any(name.startswith(prefix) for name in tensor_infos)
    mappings = (*family.weight_mappings, *family.weight_mappings_for(config))
    keys = [mapping.checkpoint_key for mapping in mappings]
    heads = {key.split(".")[0] for key in keys if not key.startswith(prefix)}
    file_keys = {}
    for file_key in tensor_infos:
        name = rename_legacy_key(family, file_key)
        if is_base_model and name.split(".")[0] not in heads:
            name = prefix + name
        file_keys[name] = file_key
    return file_keys


def _find_mismatched_keys(plan: LoadPlan, model: Transformer, tensor_infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield a description of each tensor whose dtype or shape does not match the Config."""
    state = model.state_dict(keep_vars=True)
    for conversion in plan.all_conversions:
        if any(name not in tensor_infos for name in conversion.checkpoint_keys):
            continue
        tensors = [torch.empty(state[name].shape, device="meta") for name in conversion.model_keys]
        expected = conversion.op.to_checkpoint(tensors, conversion.d_head)
        for name, tensor in zip(conversion.checkpoint_keys, expected, strict=True):
            info = tensor_infos[name]
            if not info.dtype.is_floating_point:
                yield f"'{name}' is stored as integers ({info.storage_type}) without a scale"
            if info.shape != tuple(tensor.shape):
                yield f"'{name}' has shape {list(info.shape)}, but config.json requires {list(tensor.shape)}"
