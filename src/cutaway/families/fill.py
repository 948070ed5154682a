"""From tensors to a model: the plan is made and checked whole, then each tensor is read into its place."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.config import Config, Head
from cutaway.errors import ConfigError, InputError, WeightError
from cutaway.families.family import Family
from cutaway.families.plan import Plan, Step, make_plan
from cutaway.families.report import Report
from cutaway.families.rows import Same
from cutaway.families.store import Store
from cutaway.model import Transformer, build, inputs
from cutaway.model.constants import Constants

READERS = 4
"""Threads that read at once; each holds one tensor beside the model."""
PIECE = 1 << 21
"""Numbers converted at once."""
CHECKED = 1 << 29
"""Bytes up to which every number of a checkpoint is looked at while loading; above, only small tensors are."""


def fill_model(
    family: Family,
    theirs: dict[str, Any],
    store: Store,
    *,
    source: str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    check: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Transformer, Config, Report]:
    """The model that a config.json and some tensors make: planned and checked whole, then read tensor by tensor."""
    target = inputs.check_device(device)
    if not callable(progress):
        raise InputError(f"progress is {progress!r}; give a function of (done, total)")
    config, used, passed = _config(family, theirs, store)
    check_sizes(config, store, source)
    dtype = _main_dtype(store) if dtype is None else dtype
    model = build(config, device="meta", dtype=dtype)
    plan, named = make_plan(family, config, model, store.entries)
    _refuse(plan, source)
    parted = [(copy, step) for copy, step in plan.copies if _differ(copy, step, store, named)]
    if any(_is_head(copy, family) for copy, _ in parted):
        # Tied by its config, and yet stored twice with different values: the file is right.
        assert isinstance(config.head, Head)
        config = config.replace(head=config.head.replace(tied=False))
        model = build(config, device="meta", dtype=dtype)
        plan, named = make_plan(family, config, model, store.entries)
        parted = [(copy, step) for copy, step in parted if not _is_head(copy, family)]
    for copy, step in parted:
        raise WeightError(
            f"'{named[copy.theirs[0]]}' and '{named[step.theirs[0]]}' are one tensor in this model, and the file"
            " keeps different values for them; it was not saved from such a model"
        )
    state = model.state_dict(keep_vars=True)
    made = sum(state[name].numel() for name in plan.computed)
    if made > max(1 << 26, sum(entry.numel for entry in store.entries.values())):
        raise ConfigError(
            f"'{source}' asks for {made:,} computed numbers ({plan.computed[0]}); correct its config.json"
        )
    report = Report(
        source=source,
        family=family.name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        stored=dict(Counter(entry.stored for entry in store.entries.values()).most_common()),
        used={name: [named[there] for there in step.theirs] for step in plan.steps for name in step.ours},
        ties=_ties(model),
        copies=[named[name] for copy, _ in plan.copies for name in copy.theirs],
        computed=plan.computed,
        ignored=plan.ignored,
        config_used=used,
        config_ignored=passed,
    )
    total = sum(entry.numel * entry.dtype.itemsize for entry in store.entries.values())
    look = _finite if check or (check is None and total <= CHECKED) else _finite_if_small
    report.looked_at = "every number" if look is _finite else "small tensors"
    _read_all(model, plan, store, named, target, look, progress)
    return model.eval(), config, report


SIZES = ("vocab_size", "source_vocab_size", "d_model", "heads", "kv_heads", "d_head", "hidden", "experts", "q_rank",
         "kv_rank", "d_nope", "d_rope", "d_value")  # fmt: skip
"""Numbers of a configuration that some tensor is as wide as."""


def check_sizes(config: Config, store: Store, source: str) -> None:
    """Refuse what these tensors cannot be before anything is made from it: a small file may name any number."""
    widest = max((entry.numel for entry in store.entries.values()), default=0)
    layers = sum(stack.groups or stack.layers for stack in config.stacks.values())
    if layers > len(store.entries):
        raise WeightError(
            f"'{source}' has {len(store.entries)} tensors, and its config.json asks for {layers} layers (missing:"
            " all of the others); weights and config.json do not belong together, or a file is incomplete"
        )
    for key, value in _numbers(config.model_dump()):
        if key in SIZES and value > widest:
            raise WeightError(
                f"'{source}': config.json makes {key} {value:,}, and no tensor has so many numbers; weights and"
                " config.json do not belong together"
            )


def _numbers(part: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number in a tree, with its key."""
    if isinstance(part, int):
        yield key, part
    elif isinstance(part, dict | list | tuple):
        for name, inner in part.items() if isinstance(part, dict) else ((key, item) for item in part):
            yield from _numbers(inner, name)


def _config(family: Family, theirs: dict[str, Any], store: Store) -> tuple[Config, dict[str, Any], dict[str, str]]:
    """The configuration, with the head and the pooler that the tensors show."""
    if family.template["form"] != "encoder":
        return family.read(theirs)
    names = {name.removeprefix(family.prefix).rsplit(".", 1)[0] for name in store.entries}
    names |= {name.removeprefix(family.prefix) for name in store.entries}

    def have(*targets: str) -> bool:
        return any(row.targets[0] in targets and row.theirs.removeprefix(family.prefix) in names for row in family.rows)

    # A tied head without a bias leaves only its transform, which some classifiers have too.
    told = theirs.get("architectures") == [family.architecture] and have("head.transform.dense")
    return family.read(theirs, head=told or have("head.matrix", "head.bias"), pooler=have("pooler.dense"))


def _main_dtype(store: Store) -> torch.dtype:
    """The dtype that most numbers of a file have."""
    counts: Counter[torch.dtype] = Counter()
    for entry in store.entries.values():
        if entry.dtype.is_floating_point and entry.dtype.itemsize > 1:
            counts[entry.dtype] += entry.numel
    return counts.most_common(1)[0][0] if counts else torch.float32


def _is_head(step: Step, family: Family) -> bool:
    heads = {f"{row.theirs}.weight" for row in family.rows if row.targets == ("head.matrix",)}
    return step.theirs[0] in heads


def _differ(copy: Step, step: Step, store: Store, named: dict[str, str]) -> bool:
    for a, b in zip(copy.theirs, step.theirs, strict=True):
        one, other = store.entries[named[a]], store.entries[named[b]]
        if one != other or not torch.equal(store.read(named[a]), store.read(named[b])):
            return True
        store.release(named[a])
    return False


def _refuse(plan: Plan, source: str) -> None:
    def shown(names: list[str]) -> str:
        return ", ".join(names[:5]) + (f" … ({len(names)} in all)" if len(names) > 5 else "")

    if plan.misshapen:
        raise WeightError(f"'{source}': tensor {shown(plan.misshapen)}; weights and config.json do not belong together")
    problems = [f"missing: {shown(plan.missing)}"] if plan.missing else []
    problems += [f"unexpected: {shown(plan.unexpected)}"] if plan.unexpected else []
    if problems:
        raise WeightError(
            f"'{source}' does not hold the tensors its config.json asks for; {'; '.join(problems)};"
            " weights and config.json do not belong together, or a file is incomplete"
        )


def _ties(model: Transformer) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _read_all(
    model: Transformer,
    plan: Plan,
    store: Store,
    named: dict[str, str],
    device: torch.device,
    look: Callable[[str, Tensor], Tensor],
    progress: Callable[[int, int], None],
) -> None:
    """Every tensor into its place. Nothing is kept if one fails: the model is handed out only when it is whole."""
    state = model.state_dict(keep_vars=True)

    def take(step: Step) -> list[tuple[str, Tensor]]:
        if type(step.op) is Same and store.entries[named[step.theirs[0]]].dtype != state[step.ours[0]].dtype:
            name = named[step.theirs[0]]
            return [(step.ours[0], _converted(store, name, state[step.ours[0]].dtype, device, look))]
        theirs = [look(named[name], store.read(named[name])) for name in step.theirs]
        ours = step.op.load(theirs, [state[name].shape for name in step.ours], step.d_head)
        placed = [
            tensor.to(device, state[name].dtype).contiguous() for name, tensor in zip(step.ours, ours, strict=True)
        ]
        for name, tensor, before in zip(step.ours, placed, ours, strict=True):
            _held(name, tensor, before)
        kept = {tensor.untyped_storage().data_ptr() for tensor in placed}
        for name, tensor in zip(step.theirs, theirs, strict=True):
            if tensor.untyped_storage().data_ptr() not in kept:
                store.release(named[name])
        return list(zip(step.ours, placed, strict=True))

    # The largest first: what is held beside them while they are copied comes before most of the model is there.
    order = sorted(plan.steps, key=lambda step: -sum(state[name].numel() for name in step.ours))
    with ThreadPoolExecutor(READERS) as pool:
        for done, placed in enumerate(pool.map(take, order), 1):
            for name, tensor in placed:
                put(model, name, tensor)
            progress(done, len(plan.steps))
    for module in model.modules():
        if isinstance(module, Constants):
            module.fill(device)
    for name in plan.computed:
        path, _, leaf = name.rpartition(".")
        put(model, name, torch.zeros(state[name].shape, dtype=state[name].dtype, device=device))
        fill = getattr(model.get_submodule(path), "fill_table", None)
        if leaf == "table" and fill is not None:
            fill()


def _converted(
    store: Store, name: str, dtype: torch.dtype, device: torch.device, look: Callable[[str, Tensor], Tensor]
) -> Tensor:
    """A tensor in another dtype, some of it at a time: what was read is let go before more is."""
    source = store.read(name)
    target = torch.empty(source.shape, dtype=dtype, device=device)
    flat, given = target.view(-1), source.view(-1)
    for first in range(0, len(given), PIECE):
        part = look(name, given[first : first + PIECE])
        flat[first : first + PIECE] = part
        store.release(name, first * source.itemsize, (first + len(part)) * source.itemsize)
    return _held(name, target, source)


def _held(name: str, tensor: Tensor, before: Tensor) -> Tensor:
    narrowed = tensor.dtype == torch.float16 != before.dtype  # the one dtype that common weights can overflow
    if narrowed and not tensor.is_meta and not torch.isfinite(tensor).all():
        raise WeightError(f"'{name}' holds values that float16 cannot; load it as bfloat16 or float32")
    return tensor


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make a tensor the model's own under this name; modules that are shared stay shared."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    old = module._parameters.get(leaf)
    if old is not None:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=old.requires_grad)
    else:
        module._buffers[leaf] = tensor


def _finite_if_small(name: str, tensor: Tensor) -> Tensor:
    """In a large model, only what is small: to look at each number would read every page before any is used."""
    return _finite(name, tensor) if tensor.numel() <= 1 << 16 else tensor


def _finite(name: str, tensor: Tensor) -> Tensor:
    """A sum shows NaN and infinity in one pass; where it overflowed, each value is looked at."""
    if tensor.itemsize == 1 and tensor.is_floating_point():
        _finite(name, tensor.float())  # (fp8 has no sum of its own)
    elif tensor.is_floating_point() and not torch.isfinite(tensor.sum()):
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            values = "1 value that is" if bad == 1 else f"{bad:,} values that are"
            raise WeightError(f"tensor '{name}' holds {values} NaN or infinite; the file is damaged")
    return tensor
