"""The plan: which tensors of a file become which of the model's, and what is left over. Made before any is read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cutaway.config import Config, Latent
from cutaway.families.family import Family
from cutaway.families.rows import Row, Same
from cutaway.families.store import Entry
from cutaway.model import Transformer


@dataclass(frozen=True)
class Step:
    """Their tensors, ours, and how one becomes the other."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    op: Same
    d_head: int


@dataclass
class Plan:
    """What loading will do."""

    steps: list[Step] = field(default_factory=list)
    copies: list[tuple[Step, Step]] = field(default_factory=list)
    """Further names under which a file keeps a tensor that the model has once, with the step that takes it."""
    computed: list[str] = field(default_factory=list)
    """Ours that are not in the file and follow from the configuration."""
    ignored: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)


def canonical(model: Transformer) -> dict[str, str]:
    """Every name in the state dict → the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def steps_of(rows: Sequence[Row], config: Config, model: Transformer) -> Iterator[Step]:
    """The rows written out for every layer, leaf and expert that this model has."""
    state = model.state_dict(keep_vars=True)
    for row in rows:
        if row.where is not None and not row.where(config):
            continue
        for i, d_head in _layers(row, config):
            for leaf in ("", ".weight", ".bias"):
                ours = tuple(_fill(target, i, config) + leaf for target in row.targets)
                present = [name in state for name in ours]
                if not any(present):
                    continue
                assert all(present), f"row {row} has only some of {ours}"
                theirs = _fill(row.theirs, i, config) + leaf
                count = state[ours[0]].shape[0] if "{e}" in theirs else 1
                yield Step(tuple(theirs.replace("{e}", str(e)) for e in range(count)), ours, row.op, d_head)


def _layers(row: Row, config: Config) -> Iterator[tuple[int, int]]:
    """The layers that a row is about, with the width of a head in each."""
    if "{i}" not in row.targets[0]:
        yield 0, 0
        return
    stack = config.stacks.get(row.targets[0].split(".")[0])
    for i, block in enumerate(stack.blocks if stack else ()):
        attention = block.attention
        yield i, attention.d_nope if isinstance(attention, Latent) else attention.head_width(config.d_model)


def _fill(name: str, i: int, config: Config) -> str:
    if "{g}" in name:
        (stack,) = config.stacks.values()
        name = name.replace("{g}", str(i * (stack.groups or stack.layers) // stack.layers))
    return name.replace("{i}", str(i))


def make_plan(
    family: Family, config: Config, model: Transformer, entries: Mapping[str, Entry]
) -> tuple[Plan, dict[str, str]]:
    """The plan, in the family's names, and those names → the file's."""
    named = current_names(family, entries)
    plan = Plan()
    first = canonical(model)
    taken: dict[str, Step] = {}
    wanted: dict[str, Step] = {}
    for step in steps_of(family.rows, config, model):
        ours = tuple(first[name] for name in step.ours)
        step = Step(step.theirs, ours, step.op, step.d_head)
        wanted.setdefault(ours[0], step)
        if not any(name in named for name in step.theirs):
            continue
        if ours[0] not in taken:
            plan.steps.append(step)
            taken.update(dict.fromkeys(ours, step))
        elif step.theirs != taken[ours[0]].theirs:
            plan.copies.append((step, taken[ours[0]]))
    missing: dict[str, None] = {}
    given = {name for step in wanted.values() for name in step.ours}
    trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    for name in dict.fromkeys(first.values()):
        if name not in taken and name not in trained and name in wanted:
            plan.computed.append(name)
        elif name not in taken and name in wanted:
            missing.update(dict.fromkeys(wanted[name].theirs))
        elif name not in taken and name not in given:
            missing[f"(no row of family '{family.name}' gives {name})"] = None
    used = {name for step in (*plan.steps, *(copy for copy, _ in plan.copies)) for name in step.theirs}
    plan.missing = [*missing, *sorted(used - named.keys() - missing.keys())]
    for name in sorted(named.keys() - used):
        why = family.why_ignored(name, max(stack.layers for stack in config.stacks.values()))
        if why is None:
            plan.unexpected.append(named[name])
        else:
            plan.ignored[named[name]] = why
    plan.misshapen = list(_misshapen(plan, model, {name: entries[there] for name, there in named.items()}))
    return plan, named


def current_names(family: Family, entries: Mapping[str, Entry]) -> dict[str, str]:
    """The family's names for the tensors of a file → the file's own: older spellings, and trunks without a prefix."""
    bare = family.prefix and not any(name.startswith(family.prefix) for name in entries)
    heads = {row.theirs.split(".")[0] for row in family.rows if not row.theirs.startswith(family.prefix)}
    named = {}
    for there in entries:
        name = there
        for old, new in family.renamed:
            name = re.sub(old, new, name)
        if bare and name.split(".")[0] not in heads:
            name = family.prefix + name
        named[name] = there
    return named


def _misshapen(plan: Plan, model: Transformer, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Tensors whose shape in the file is not what the configuration says: ours, taken back through the row, on meta."""
    state = model.state_dict(keep_vars=True)
    for step in (*plan.steps, *(copy for copy, _ in plan.copies)):
        if any(name not in entries for name in step.theirs):
            continue
        expected = step.op.export([torch.empty(state[name].shape, device="meta") for name in step.ours], step.d_head)
        for name, tensor in zip(step.theirs, expected, strict=True):
            if not entries[name].dtype.is_floating_point:
                yield f"'{name}' is stored as {entries[name].stored}, whole numbers that mean nothing without a scale"
            if entries[name].shape != tuple(tensor.shape):
                yield f"'{name}' is {list(entries[name].shape)}, and config.json makes it {list(tensor.shape)}"
