"""The load plan: which tensors of a file become which of the model's, and what is left over; before any is read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cutaway.config import Config, LatentAttention
from cutaway.families.family import Family
from cutaway.families.safetensors_reader import TensorInfo
from cutaway.families.weight_conversion import ConversionOp, WeightMapping
from cutaway.model import Transformer


@dataclass(frozen=True)
class TensorConversion:
    """Tensors of the checkpoint, tensors of the model, and how the ones become the others."""

    checkpoint_keys: tuple[str, ...]
    model_keys: tuple[str, ...]
    op: ConversionOp
    d_head: int


@dataclass
class LoadPlan:
    """What loading will do."""

    conversions: list[TensorConversion] = field(default_factory=list)
    duplicates: list[tuple[TensorConversion, TensorConversion]] = field(default_factory=list)
    """Further names under which a file keeps a tensor that the model has once, with the conversion that takes it."""
    computed_weights: list[str] = field(default_factory=list)
    """Ours that are not in the file and follow from the configuration."""
    ignored_weights: dict[str, str] = field(default_factory=dict)
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    mismatched_keys: list[str] = field(default_factory=list)


def canonical_keys(model: Transformer) -> dict[str, str]:
    """Every name in the state dict → the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def expand_mappings(
    mappings: Sequence[WeightMapping], config: Config, model: Transformer
) -> Iterator[TensorConversion]:
    """The mappings written out for every layer, leaf and expert that this model has."""
    state = model.state_dict(keep_vars=True)
    for row in mappings:
        if row.condition is not None and not row.condition(config):
            continue
        for i, d_head in _matching_layers(row, config):
            for leaf in ("", ".weight", ".bias"):
                model_keys = tuple(_format_key(target, i, config) + leaf for target in row.model_keys)
                present = [name in state for name in model_keys]
                if not any(present):
                    continue
                assert all(present), f"mapping {row} has only some of {model_keys}"
                key = _format_key(row.checkpoint_key, i, config) + leaf
                count = state[model_keys[0]].shape[0] if "{e}" in key else 1
                checkpoint_keys = tuple(key.replace("{e}", str(e)) for e in range(count))
                yield TensorConversion(checkpoint_keys, model_keys, row.op, d_head)


def _matching_layers(mapping: WeightMapping, config: Config) -> Iterator[tuple[int, int]]:
    """The layers that a mapping is about, with the width of a head in each."""
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
        pattern = pattern.replace("{g}", str(layer * (stack.layer_groups or stack.layers) // stack.layers))
    return pattern.replace("{i}", str(layer))


def build_load_plan(
    family: Family, config: Config, model: Transformer, tensor_infos: Mapping[str, TensorInfo]
) -> tuple[LoadPlan, dict[str, str]]:
    """The plan, in the family's names, and those names → the file's."""
    named = normalize_checkpoint_keys(family, tensor_infos)
    plan = LoadPlan()
    first = canonical_keys(model)
    taken: dict[str, TensorConversion] = {}
    wanted: dict[str, TensorConversion] = {}
    for step in expand_mappings(family.weight_mappings, config, model):
        model_keys = tuple(first[name] for name in step.model_keys)
        step = TensorConversion(step.checkpoint_keys, model_keys, step.op, step.d_head)
        wanted.setdefault(model_keys[0], step)
        if not any(name in named for name in step.checkpoint_keys):
            continue
        if model_keys[0] not in taken:
            plan.conversions.append(step)
            taken.update(dict.fromkeys(model_keys, step))
        elif step.checkpoint_keys != taken[model_keys[0]].checkpoint_keys:
            plan.duplicates.append((step, taken[model_keys[0]]))
    missing: dict[str, None] = {}
    given = {name for step in wanted.values() for name in step.model_keys}
    trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    for name in dict.fromkeys(first.values()):
        if name not in taken and name not in trained and name in wanted:
            plan.computed_weights.append(name)
        elif name not in taken and name in wanted:
            missing.update(dict.fromkeys(wanted[name].checkpoint_keys))
        elif name not in taken and name not in given:
            missing[f"(no mapping of family '{family.name}' gives {name})"] = None
    used = {
        name for step in (*plan.conversions, *(copy for copy, _ in plan.duplicates)) for name in step.checkpoint_keys
    }
    plan.missing_keys = [*missing, *sorted(used - named.keys() - missing.keys())]
    for name in sorted(named.keys() - used):
        why = family.reason_ignored(name, max(stack.layers for stack in config.stacks.values()))
        if why is None:
            plan.unexpected_keys.append(named[name])
        else:
            plan.ignored_weights[named[name]] = why
    plan.mismatched_keys = list(
        _find_mismatched_keys(plan, model, {name: tensor_infos[there] for name, there in named.items()})
    )
    return plan, named


def normalize_checkpoint_keys(family: Family, tensor_infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """The family's names for the tensors of a file → the file's own: older spellings, and trunks without a prefix."""
    bare = family.base_model_prefix and not any(name.startswith(family.base_model_prefix) for name in tensor_infos)
    heads = {
        row.checkpoint_key.split(".")[0]
        for row in family.weight_mappings
        if not row.checkpoint_key.startswith(family.base_model_prefix)
    }
    named = {}
    for there in tensor_infos:
        name = there
        for old, new in family.weight_renamings:
            name = re.sub(old, new, name)
        if bare and name.split(".")[0] not in heads:
            name = family.base_model_prefix + name
        named[name] = there
    return named


def _find_mismatched_keys(plan: LoadPlan, model: Transformer, tensor_infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Tensors whose shape in the file is not what the configuration says: ours, converted back on meta."""
    state = model.state_dict(keep_vars=True)
    for step in (*plan.conversions, *(copy for copy, _ in plan.duplicates)):
        if any(name not in tensor_infos for name in step.checkpoint_keys):
            continue
        expected = step.op.to_checkpoint(
            [torch.empty(state[name].shape, device="meta") for name in step.model_keys], step.d_head
        )
        for name, tensor in zip(step.checkpoint_keys, expected, strict=True):
            if not tensor_infos[name].dtype.is_floating_point:
                stored = tensor_infos[name].storage_type
                yield f"'{name}' is stored as {stored}, whole numbers that mean nothing without a scale"
            if tensor_infos[name].shape != tuple(tensor.shape):
                yield f"'{name}' is {list(tensor_infos[name].shape)}, and config.json makes it {list(tensor.shape)}"
