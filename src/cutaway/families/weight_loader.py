"""From tensors to a model: the plan is made and checked whole, then each tensor is read into its place."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.config import Config, LMHead
from cutaway.errors import ConfigError, InputError, WeightError
from cutaway.families.family import Family
from cutaway.families.load_plan import LoadPlan, TensorConversion, build_load_plan
from cutaway.families.load_report import LoadReport
from cutaway.families.safetensors_reader import TensorReader
from cutaway.families.weight_conversion import Identity
from cutaway.model import Transformer, build, inputs
from cutaway.model.layers import ConstantBuffers

NUM_READER_THREADS = 4
"""Threads that read at once; each holds one tensor beside the model."""
CONVERSION_CHUNK_NUMEL = 1 << 21
"""Numbers converted at once."""
MAX_FULL_CHECK_BYTES = 1 << 29
"""Bytes up to which every number of a checkpoint is looked at while loading; above, only small tensors are."""


def load_model(
    family: Family,
    hf_config: dict[str, Any],
    reader: TensorReader,
    *,
    source: str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    check_finite: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Transformer, Config, LoadReport]:
    """The model that a config.json and some tensors make: planned and checked whole, then read tensor by tensor."""
    target = inputs.resolve_device(device)
    if not callable(progress):
        raise InputError(f"progress is {progress!r}; give a function of (done, total)")
    config, used, passed = _resolve_config(family, hf_config, reader)
    check_config_fits_weights(config, reader, source)
    dtype = _majority_dtype(reader) if dtype is None else dtype
    model = build(config, device="meta", dtype=dtype)
    plan, named = build_load_plan(family, config, model, reader.tensor_infos)
    _raise_on_mismatch(plan, source)
    parted = [(copy, step) for copy, step in plan.duplicates if _values_differ(copy, step, reader, named)]
    if any(_is_lm_head(copy, family) for copy, _ in parted):
        # Tied by its config, and yet stored twice with different values: the file is right.
        assert isinstance(config.head, LMHead)
        config = config.replace(head=config.head.replace(tied=False))
        model = build(config, device="meta", dtype=dtype)
        plan, named = build_load_plan(family, config, model, reader.tensor_infos)
        parted = [(copy, step) for copy, step in parted if not _is_lm_head(copy, family)]
    for copy, step in parted:
        raise WeightError(
            f"'{named[copy.checkpoint_keys[0]]}' and '{named[step.checkpoint_keys[0]]}' are one tensor in this model,"
            " and the file keeps different values for them; it was not saved from such a model"
        )
    state = model.state_dict(keep_vars=True)
    made = sum(state[name].numel() for name in plan.computed_weights)
    if made > max(1 << 26, sum(entry.numel for entry in reader.tensor_infos.values())):
        raise ConfigError(
            f"'{source}' asks for {made:,} computed numbers ({plan.computed_weights[0]}); correct its config.json"
        )
    report = LoadReport(
        source=source,
        family=family.name,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        stored_dtypes=dict(Counter(entry.storage_type for entry in reader.tensor_infos.values()).most_common()),
        loaded_weights={
            name: [named[there] for there in step.checkpoint_keys]
            for step in plan.conversions
            for name in step.model_keys
        },
        tied_weights=_find_tied_weights(model),
        duplicate_weights=[named[name] for copy, _ in plan.duplicates for name in copy.checkpoint_keys],
        computed_weights=plan.computed_weights,
        ignored_weights=plan.ignored_weights,
        used_config_keys=used,
        ignored_config_keys=passed,
    )
    total = sum(entry.numel * entry.dtype.itemsize for entry in reader.tensor_infos.values())
    look = (
        _check_finite
        if check_finite or (check_finite is None and total <= MAX_FULL_CHECK_BYTES)
        else _check_finite_if_small
    )
    report.finite_check = "all tensors" if look is _check_finite else "small tensors"
    _load_weights(model, plan, reader, named, target, look, progress)
    return model.eval(), config, report


DIMENSION_FIELDS = (
    "vocab_size", "source_vocab_size", "d_model", "heads", "kv_heads", "d_head", "hidden", "experts", "q_rank",
    "kv_rank", "d_nope", "d_rope", "d_value",
)  # fmt: skip
"""Numbers of a configuration that some tensor is as wide as."""


def check_config_fits_weights(config: Config, reader: TensorReader, source: str) -> None:
    """Refuse what these tensors cannot be before anything is made from it: a small file may name any number."""
    widest = max((entry.numel for entry in reader.tensor_infos.values()), default=0)
    layers = sum(stack.layer_groups or stack.layers for stack in config.stacks.values())
    if layers > len(reader.tensor_infos):
        raise WeightError(
            f"'{source}' has {len(reader.tensor_infos)} tensors, and its config.json asks for {layers} layers (missing:"
            " all of the others); weights and config.json do not belong together, or a file is incomplete"
        )
    for key, value in _iter_ints(config.model_dump()):
        if key in DIMENSION_FIELDS and value > widest:
            raise WeightError(
                f"'{source}': config.json makes {key} {value:,}, and no tensor has so many numbers; weights and"
                " config.json do not belong together"
            )


def _iter_ints(tree: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number in a tree, with its key."""
    if isinstance(tree, int):
        yield key, tree
    elif isinstance(tree, dict | list | tuple):
        for name, inner in tree.items() if isinstance(tree, dict) else ((key, item) for item in tree):
            yield from _iter_ints(inner, name)


def _resolve_config(
    family: Family, hf_config: dict[str, Any], reader: TensorReader
) -> tuple[Config, dict[str, Any], dict[str, str]]:
    """The configuration, with the head and the pooler that the tensors show."""
    if family.template["form"] != "encoder":
        return family.config_from_hf(hf_config)
    names = {name.removeprefix(family.base_model_prefix).rsplit(".", 1)[0] for name in reader.tensor_infos}
    names |= {name.removeprefix(family.base_model_prefix) for name in reader.tensor_infos}

    def have(*targets: str) -> bool:
        return any(
            row.model_keys[0] in targets and row.checkpoint_key.removeprefix(family.base_model_prefix) in names
            for row in family.weight_mappings
        )

    # A tied head without a bias leaves only its transform, which some classifiers have too.
    declared = hf_config.get("architectures") == [family.architecture] and have("head.transform.dense")
    return family.config_from_hf(
        hf_config, head=declared or have("head.matrix", "head.bias"), pooler=have("pooler.dense")
    )


def _majority_dtype(reader: TensorReader) -> torch.dtype:
    """The dtype that most numbers of a file have."""
    counts: Counter[torch.dtype] = Counter()
    for entry in reader.tensor_infos.values():
        if entry.dtype.is_floating_point and entry.dtype.itemsize > 1:
            counts[entry.dtype] += entry.numel
    return counts.most_common(1)[0][0] if counts else torch.float32


def _is_lm_head(conversion: TensorConversion, family: Family) -> bool:
    heads = {f"{row.checkpoint_key}.weight" for row in family.weight_mappings if row.model_keys == ("head.matrix",)}
    return conversion.checkpoint_keys[0] in heads


def _values_differ(
    duplicate: TensorConversion, conversion: TensorConversion, reader: TensorReader, file_keys: dict[str, str]
) -> bool:
    for a, b in zip(duplicate.checkpoint_keys, conversion.checkpoint_keys, strict=True):
        one, other = reader.tensor_infos[file_keys[a]], reader.tensor_infos[file_keys[b]]
        if one != other or not torch.equal(reader.read_tensor(file_keys[a]), reader.read_tensor(file_keys[b])):
            return True
        reader.release_tensor(file_keys[a])
    return False


def _raise_on_mismatch(plan: LoadPlan, source: str) -> None:
    def shown(names: list[str]) -> str:
        return ", ".join(names[:5]) + (f" … ({len(names)} in all)" if len(names) > 5 else "")

    if plan.mismatched_keys:
        raise WeightError(
            f"'{source}': tensor {shown(plan.mismatched_keys)}; weights and config.json do not belong together"
        )
    problems = [f"missing: {shown(plan.missing_keys)}"] if plan.missing_keys else []
    problems += [f"unexpected: {shown(plan.unexpected_keys)}"] if plan.unexpected_keys else []
    if problems:
        raise WeightError(
            f"'{source}' does not hold the tensors its config.json asks for; {'; '.join(problems)};"
            " weights and config.json do not belong together, or a file is incomplete"
        )


def _find_tied_weights(model: Transformer) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _load_weights(
    model: Transformer,
    plan: LoadPlan,
    reader: TensorReader,
    file_keys: dict[str, str],
    device: torch.device,
    check_finite: Callable[[str, Tensor], Tensor],
    progress: Callable[[int, int], None],
) -> None:
    """Every tensor into its place. Nothing is kept if one fails: the model is handed out only when it is whole."""
    state = model.state_dict(keep_vars=True)

    def take(step: TensorConversion) -> list[tuple[str, Tensor]]:
        if (
            isinstance(step.op, Identity)
            and reader.tensor_infos[file_keys[step.checkpoint_keys[0]]].dtype != state[step.model_keys[0]].dtype
        ):
            name = file_keys[step.checkpoint_keys[0]]
            return [
                (
                    step.model_keys[0],
                    _load_converted(reader, name, state[step.model_keys[0]].dtype, device, check_finite),
                )
            ]
        stored = [check_finite(file_keys[name], reader.read_tensor(file_keys[name])) for name in step.checkpoint_keys]
        converted = step.op.to_model(stored, [state[name].shape for name in step.model_keys], step.d_head)
        placed = [
            tensor.to(device, state[name].dtype).contiguous()
            for name, tensor in zip(step.model_keys, converted, strict=True)
        ]
        for name, tensor, before in zip(step.model_keys, placed, converted, strict=True):
            _check_float16_overflow(name, tensor, before)
        kept = {tensor.untyped_storage().data_ptr() for tensor in placed}
        for name, tensor in zip(step.checkpoint_keys, stored, strict=True):
            if tensor.untyped_storage().data_ptr() not in kept:
                reader.release_tensor(file_keys[name])
        return list(zip(step.model_keys, placed, strict=True))

    # The largest first: what is held beside them while they are copied comes before most of the model is there.
    order = sorted(plan.conversions, key=lambda step: -sum(state[name].numel() for name in step.model_keys))
    with ThreadPoolExecutor(NUM_READER_THREADS) as pool:
        for done, placed in enumerate(pool.map(take, order), 1):
            for name, tensor in placed:
                set_module_tensor(model, name, tensor)
            progress(done, len(plan.conversions))
    for module in model.modules():
        if isinstance(module, ConstantBuffers):
            module.register_constants(device)
    for name in plan.computed_weights:
        path, _, leaf = name.rpartition(".")
        set_module_tensor(model, name, torch.zeros(state[name].shape, dtype=state[name].dtype, device=device))
        init_table = getattr(model.get_submodule(path), "init_table", None)
        if leaf == "table" and init_table is not None:
            init_table()


def _load_converted(
    reader: TensorReader,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    check_finite: Callable[[str, Tensor], Tensor],
) -> Tensor:
    """A tensor in another dtype, some of it at a time: what was read is let go before more is."""
    source = reader.read_tensor(name)
    target = torch.empty(source.shape, dtype=dtype, device=device)
    flat, given = target.view(-1), source.view(-1)
    for first in range(0, len(given), CONVERSION_CHUNK_NUMEL):
        part = check_finite(name, given[first : first + CONVERSION_CHUNK_NUMEL])
        flat[first : first + CONVERSION_CHUNK_NUMEL] = part
        reader.release_tensor(name, first * source.itemsize, (first + len(part)) * source.itemsize)
    return _check_float16_overflow(name, target, source)


def _check_float16_overflow(name: str, tensor: Tensor, source: Tensor) -> Tensor:
    narrowed = tensor.dtype == torch.float16 != source.dtype  # the one dtype that common weights can overflow
    if narrowed and not tensor.is_meta and not torch.isfinite(tensor).all():
        raise WeightError(f"'{name}' holds values that float16 cannot; load it as bfloat16 or float32")
    return tensor


def set_module_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make a tensor the model's own under this name; modules that are shared stay shared."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    old = module._parameters.get(leaf)
    if old is not None:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=old.requires_grad)
    else:
        module._buffers[leaf] = tensor


def _check_finite_if_small(name: str, tensor: Tensor) -> Tensor:
    """In a large model, only what is small: to look at each number would read every page before any is used."""
    return _check_finite(name, tensor) if tensor.numel() <= 1 << 16 else tensor


def _check_finite(name: str, tensor: Tensor) -> Tensor:
    """A sum shows NaN and infinity in one pass; where it overflowed, each value is looked at."""
    if tensor.itemsize == 1 and tensor.is_floating_point():
        _check_finite(name, tensor.float())  # (fp8 has no sum of its own)
    elif tensor.is_floating_point() and not torch.isfinite(tensor.sum()):
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            values = "1 value that is" if bad == 1 else f"{bad:,} values that are"
            raise WeightError(f"tensor '{name}' holds {values} NaN or infinite; the file is damaged")
    return tensor
