"""Load weights into a model: build and check the load plan, then read, convert and assign each tensor."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cutaway.argument_checks import check_positive_int, resolve_device
from cutaway.config import Config, EmbeddingHead, LMHead
from cutaway.errors import ConfigError, InputError, WeightError
from cutaway.families.family import Family, HFConfig, Parsed
from cutaway.families.load_plan import LoadPlan, TensorConversion, build_load_plan, rename_legacy_key
from cutaway.families.load_report import LoadReport
from cutaway.families.safetensors_reader import TensorReader
from cutaway.families.weight_conversion import Identity
from cutaway.model import Transformer, build
from cutaway.model.layers import ConstantBuffers
from cutaway.model.parallel.offload import MaxMemory, Placement, offload_blocks, plan_placement
from cutaway.model.parallel.process_group import get_tensor_parallel, rank_device
from cutaway.quantization.quantized_tensor import (
    QuantizedTensor,
    dequantize_rows,
    has_packed_experts,
    has_packed_products,
)

if TYPE_CHECKING:
    from cutaway.model.parallel.tensor_parallel import TensorSlice

_NUM_READER_THREADS = 4
"""Number of reader threads. Each holds one tensor in memory, in addition to the model."""
_CONVERSION_CHUNK_NUMEL = 1 << 21
"""Number of elements per chunk of a dtype conversion."""
_MAX_FULL_CHECK_BYTES = 1 << 29
"""Checkpoints of up to this many bytes are fully checked for NaN and infinity, larger ones only in small tensors."""


TensorCheck = Callable[[str, Tensor], Tensor]
"""Takes the name and values of a tensor, returns the tensor, or raises WeightError if the check fails."""


@dataclass(frozen=True)
class LoadOptions:
    """Options of `cutaway.load` that apply to every format."""

    device: torch.device | str | None
    dtype: torch.dtype | None
    check_finite: bool | None
    progress: Callable[[int, int], None]
    tensor_parallel_size: int = 1
    device_map: str | None = None
    max_memory: MaxMemory | None = None
    dequantize: bool = True

    @property
    def keeps_packed(self) -> bool:
        """Whether quantized matrices stay packed: only on one device that has kernels for them."""
        if self.dequantize or self.device_map is not None or self.tensor_parallel_size > 1:
            return False
        return has_packed_products(resolve_device(self.device))


def load_model(
    family: Family,
    hf_config: HFConfig,
    reader: TensorReader,
    source: str,
    options: LoadOptions,
    embedding_head: EmbeddingHead | None = None,
) -> tuple[Transformer, Config, LoadReport]:
    """Build a model from config.json and a tensor reader. All keys and shapes are checked before tensors are read.

    `embedding_head` is the head of a sentence-transformers directory.
    """
    device, check_finite = resolve_device(options.device), options.check_finite
    check_positive_int("tensor_parallel_size", options.tensor_parallel_size)
    _check_device_options(options)
    if options.tensor_parallel_size > 1:
        device = rank_device(device)
    if not callable(options.progress):
        raise InputError(f"progress is {options.progress!r}; pass a function of (done, total)")
    config, used, ignored = resolve_config(family, hf_config, reader, embedding_head)
    check_config_fits_weights(config, reader, source)
    dtype = _majority_dtype(reader) if options.dtype is None else options.dtype
    model = build(config, device="meta", dtype=dtype)
    plan, file_keys = build_load_plan(family, config, model, reader.tensor_infos)
    _raise_on_mismatch(plan, source)
    conflicts = [pair for pair in plan.duplicates if _values_differ(*pair, reader, file_keys)]
    other_conflicts = [pair for pair in conflicts if not _is_lm_head(pair[0], family)]
    if len(other_conflicts) < len(conflicts):
        # config.json declares a tied head, but the file stores two different matrices: the file takes precedence.
        assert isinstance(config.head, LMHead)
        config = config.replace(head=config.head.replace(tied=False))
        model = build(config, device="meta", dtype=dtype)
        plan, file_keys = build_load_plan(family, config, model, reader.tensor_infos)
    if other_conflicts:
        first, second = (file_keys[conversion.checkpoint_keys[0]] for conversion in other_conflicts[0])
        names = f"'{first}' and '{second}' are the same tensor in this model"
        raise WeightError(f"{names}, but the file has different values for them; correct the file or config.json")
    state = model.state_dict(keep_vars=True)
    num_computed = sum(state[name].numel() for name in plan.computed_weights)
    if num_computed > max(1 << 26, sum(info.numel for info in reader.tensor_infos.values())):
        computed = f"{num_computed:,} computed values ({plan.computed_weights[0]})"
        raise ConfigError(f"'{source}' requires {computed}, more than the weights in the file; correct config.json")
    total = sum(info.numel * info.dtype.itemsize for info in reader.tensor_infos.values())
    check_all = total <= _MAX_FULL_CHECK_BYTES if check_finite is None else check_finite
    report = LoadReport(
        source=source,
        family=family.name,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        stored_dtypes=dict(Counter(info.storage_type for info in reader.tensor_infos.values()).most_common()),
        loaded_weights={
            name: [file_keys[checkpoint_key] for checkpoint_key in conversion.checkpoint_keys]
            for conversion in plan.conversions
            for name in conversion.model_keys
        },
        tied_weights=_find_tied_weights(model),
        duplicate_weights=[file_keys[name] for duplicate, _ in plan.duplicates for name in duplicate.checkpoint_keys],
        computed_weights=plan.computed_weights,
        ignored_weights=plan.ignored_weights,
        used_config_keys=used,
        ignored_config_keys=ignored,
        finite_check="all tensors" if check_all else "small tensors",
    )
    check = _check_finite if check_all else _check_finite_if_small
    shapes = {name: tensor.shape for name, tensor in state.items()}
    slices: dict[str, TensorSlice] = {}
    if options.tensor_parallel_size > 1:
        from cutaway.model.parallel.tensor_parallel import apply_tensor_parallel

        slices = apply_tensor_parallel(model, get_tensor_parallel(options.tensor_parallel_size, device))
    placement = Placement(device)
    if options.device_map is not None:
        placement = plan_placement(model, options.max_memory)
    _load_weights(model, plan, reader, file_keys, shapes, slices, placement, check, options.progress)
    if slices:
        model.requires_grad_(False)
    streamer = offload_blocks(model, placement)
    if streamer is not None:
        report.device = str(placement.device)
        report.offloaded_modules = list(placement.offloaded)
        report.offloaded_bytes, report.offload_bandwidth = streamer.bytes_per_pass, streamer.bytes_per_second
    return model.eval(), config, report


def _check_device_options(options: LoadOptions) -> None:
    if options.device_map not in (None, "auto"):
        raise InputError(f"device_map is {options.device_map!r:.60}; pass 'auto', or use device='cuda' or 'cpu'")
    if options.device_map is None:
        if options.max_memory is not None:
            raise InputError("max_memory applies to device_map='auto', which is not set; pass both")
        return
    for name, value, default in (
        ("device", options.device, None),
        ("tensor_parallel_size", options.tensor_parallel_size, 1),
    ):
        if value != default:
            raise InputError(f"device_map and {name} are both set; leave one of them out")


_DIMENSION_FIELDS = (
    "vocab_size", "source_vocab_size", "d_model", "heads", "kv_heads", "d_head", "hidden", "experts", "q_rank",
    "kv_rank", "d_nope", "d_rope", "d_value",
)  # fmt: skip
"""Config fields that are dimensions of some tensor."""


def check_config_fits_weights(config: Config, reader: TensorReader, source: str) -> None:
    """Raise if the Config is too large for the tensors. This prevents huge allocations for a wrong config.json."""
    max_numel = max((info.numel for info in reader.tensor_infos.values()), default=0)
    layers = sum(len(set(stack.weight_sets)) for stack in config.stacks.values())
    if layers > len(reader.tensor_infos):
        counts = f"{len(reader.tensor_infos)} tensors, but its config.json has {layers} layers"
        raise WeightError(f"'{source}' has {counts}; weights and config.json do not match, or a file is missing")
    for key, value in _iter_ints(config.model_dump()):
        if key in _DIMENSION_FIELDS and value > max_numel:
            reason = f"config.json has {key} {value:,}, but no tensor has so many elements"
            raise WeightError(f"'{source}': {reason}; weights and config.json do not match")


def _iter_ints(tree: object, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield (key, value) of every integer in nested dicts and lists. An item of a list has the key of the list."""
    if isinstance(tree, int):
        yield key, tree
    elif isinstance(tree, dict | list | tuple):
        for name, inner in tree.items() if isinstance(tree, dict) else ((key, item) for item in tree):
            yield from _iter_ints(inner, name)


def resolve_config(
    family: Family, hf_config: HFConfig, reader: TensorReader, embedding_head: EmbeddingHead | None = None
) -> Parsed:
    """Convert config.json to a Config. For an encoder, the tensors show whether there are an LM head and a pooler."""
    if family.template["form"] != "encoder":
        return family.config_from_hf(hf_config, head=embedding_head)
    prefix = family.base_model_prefix
    names = {rename_legacy_key(family, name).removeprefix(prefix) for name in reader.tensor_infos}
    names |= {name.rsplit(".", 1)[0] for name in names}
    stored = {m.model_keys[0] for m in family.weight_mappings if m.checkpoint_key.removeprefix(prefix) in names}
    pooler = "pooler.dense" in stored
    head_class = None if embedding_head else family.find_head_class(hf_config)
    if embedding_head is not None or head_class is not None:
        head_keys = {row.checkpoint_key for row in head_class.weight_mappings} if head_class else set()
        pooler_keys = {row.checkpoint_key for row in family.weight_mappings if row.model_keys == ("pooler.dense",)}
        return family.config_from_hf(hf_config, head=embedding_head, pooler=pooler and not head_keys & pooler_keys)
    # A tied head without bias is stored only as its transform, which some classification heads have, too.
    is_declared = hf_config.get("architectures") == [family.architecture]
    head = bool(stored & {"head.matrix", "head.bias"}) or (is_declared and "head.transform.dense" in stored)
    return family.config_from_hf(hf_config, head=head, pooler=pooler)


def _majority_dtype(reader: TensorReader) -> torch.dtype:
    """Floating-point dtype (wider than 8 bits) of most elements of the stored tensors; float32 if there is none."""
    counts: Counter[torch.dtype] = Counter()
    for info in reader.tensor_infos.values():
        if info.dtype.is_floating_point and info.dtype.itemsize > 1:
            counts[info.dtype] += info.numel
    return counts.most_common(1)[0][0] if counts else torch.float32


def _is_lm_head(conversion: TensorConversion, family: Family) -> bool:
    head_keys = [m.checkpoint_key for m in family.weight_mappings if m.model_keys == ("head.matrix",)]
    return conversion.checkpoint_keys[0].removesuffix(".weight") in head_keys


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
    def format_keys(names: list[str]) -> str:
        return ", ".join(names[:5]) + (f" … ({len(names)} in all)" if len(names) > 5 else "")

    if plan.mismatched_keys:
        keys = format_keys(plan.mismatched_keys)
        raise WeightError(f"'{source}': tensor {keys}; weights and config.json do not match")
    problems = [f"missing: {format_keys(plan.missing_keys)}"] if plan.missing_keys else []
    problems += [f"unexpected: {format_keys(plan.unexpected_keys)}"] if plan.unexpected_keys else []
    if problems:
        raise WeightError(
            f"'{source}' does not have the tensors that its config.json requires; {'; '.join(problems)};"
            " weights and config.json do not match, or a file is incomplete"
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
    shapes: Mapping[str, torch.Size],
    slices: "Mapping[str, TensorSlice]",
    placement: Placement,
    check_finite: TensorCheck,
    progress: Callable[[int, int], None],
) -> None:
    """Read the tensors of the plan, convert them and assign them to the model.

    `shapes` are those of the full model. A tensor in `slices` is cut to its slice: the pages of the file outside of the
    slice are not read, if the conversion is a view."""
    state = model.state_dict(keep_vars=True)

    def load_conversion(conversion: TensorConversion) -> list[tuple[str, Tensor]]:
        model_keys, keys = conversion.model_keys, [file_keys[name] for name in conversion.checkpoint_keys]
        dtype, device = state[model_keys[0]].dtype, placement.device_of(model_keys[0])
        is_sliced = any(name in slices for name in model_keys)
        info = reader.tensor_infos[keys[0]]
        if isinstance(conversion.op, Identity) and info.dtype != dtype and not info.is_packed and not is_sliced:
            return [(model_keys[0], _load_converted(reader, keys[0], dtype, device, check_finite))]
        keeps_rows = conversion.op.transposes if info.is_transposed else conversion.op.keeps_rows
        is_matrix = all(len(shapes[name]) == 2 for name in model_keys)
        has_products = is_matrix or device.type == "cpu" or has_packed_experts(device)
        may_be_packed = keeps_rows and not is_sliced and has_products
        stored = [reader.read_tensor(key, packed=may_be_packed) for key in keys]
        if not is_sliced:
            stored = [check_finite(key, tensor) for key, tensor in zip(keys, stored, strict=True)]
        shapes_of_parts = [shapes[name] for name in model_keys]
        packed = [tensor for tensor in stored if isinstance(tensor, QuantizedTensor)]
        if len(packed) == len(stored) and len({tensor.format for tensor in packed}) == 1:
            blocks = [tensor.blocks.mT if info.is_transposed else tensor.blocks for tensor in packed]
            parts = conversion.op.to_model(blocks, shapes_of_parts, conversion.d_head)
            orders = _column_orders(packed, conversion, shapes_of_parts)
            matrices = [
                QuantizedTensor(part.contiguous(), packed[0].format, column_order=order)
                for part, order in zip(parts, orders, strict=True)
            ]
            return [(name, matrix.to(device, dtype)) for name, matrix in zip(model_keys, matrices, strict=True)]
        stored = [tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor for tensor in stored]
        converted = conversion.op.to_model(stored, shapes_of_parts, conversion.d_head)
        loaded = []
        for name, source in zip(model_keys, converted, strict=True):
            if is_sliced:
                source = check_finite(keys[0], slices[name].of(source) if name in slices else source)
            tensor = source.to(device, state[name].dtype).contiguous()
            loaded.append((name, _check_float16_overflow(name, tensor, source)))
        loaded_storages = {tensor.untyped_storage().data_ptr() for _, tensor in loaded}
        for key, tensor in zip(keys, stored, strict=True):
            if tensor.untyped_storage().data_ptr() not in loaded_storages:
                reader.release_tensor(key)
        return loaded

    # The largest tensors are loaded first, so that their temporary copies exist before most of the model is in memory.
    order = sorted(plan.conversions, key=lambda conversion: -sum(state[name].numel() for name in conversion.model_keys))
    with ThreadPoolExecutor(_NUM_READER_THREADS) as pool:
        for done, loaded in enumerate(pool.map(load_conversion, order), 1):
            for name, tensor in loaded:
                set_module_tensor(model, name, tensor)
            progress(done, len(plan.conversions))
    for module in model.modules():
        if isinstance(module, ConstantBuffers):
            module.register_constants(placement.device)
    for name in plan.computed_weights:
        zeros = torch.zeros_like(state[name], device=placement.device_of(name))
        set_module_tensor(model, name, slices[name].of(zeros) if name in slices else zeros)
        init_table = getattr(model.get_submodule(name.rpartition(".")[0]), "init_table", None)
        if name.endswith(".table") and init_table is not None:
            init_table()


def _column_orders(
    packed: list[QuantizedTensor], conversion: TensorConversion, shapes: list[torch.Size]
) -> list[Tensor | None]:
    """The `column_order` of each packed matrix of the model, which has rows of one or several stored matrices."""
    if all(tensor.column_order is None for tensor in packed):
        return [None] * len(shapes)
    orders = [torch.arange(each.shape[1]) if each.column_order is None else each.column_order for each in packed]
    rows = [torch.full((len(tensor), 1), i) for i, tensor in enumerate(packed)]
    stacked = torch.stack(orders)
    result: list[Tensor | None] = []
    for part in conversion.op.to_model(rows, shapes, conversion.d_head):  # (…, rows, 1): the stored matrix of each row
        source = part[..., :1, 0]
        assert (part[..., 0] == source).all(), "rows of matrices with different column orders are not combined"
        result.append(stacked[source.squeeze(-1)])
    return result


def _load_converted(
    reader: TensorReader, name: str, dtype: torch.dtype, device: torch.device, check_finite: TensorCheck
) -> Tensor:
    """Read a tensor and convert its dtype in chunks. The memory of a source chunk is freed before the next chunk."""
    source = reader.read_tensor(name)
    target = torch.empty(source.shape, dtype=dtype, device=device)
    flat_target, flat_source = target.view(-1), source.view(-1)
    for first in range(0, len(flat_source), _CONVERSION_CHUNK_NUMEL):
        chunk = check_finite(name, flat_source[first : first + _CONVERSION_CHUNK_NUMEL])
        flat_target[first : first + _CONVERSION_CHUNK_NUMEL] = chunk
        reader.release_tensor(name, first * source.itemsize, (first + len(chunk)) * source.itemsize)
    return _check_float16_overflow(name, target, source)


def _check_float16_overflow(name: str, tensor: Tensor, source: Tensor) -> Tensor:
    narrowed = tensor.dtype == torch.float16 != source.dtype  # the only dtype that common weights overflow
    if narrowed and not tensor.is_meta and not torch.isfinite(tensor).all():
        raise WeightError(f"'{name}' has values outside of the range of float16; load it as bfloat16 or float32")
    return tensor


def set_module_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Assign a tensor to a parameter or buffer by state dict key; shared modules stay shared."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    old = module._parameters.get(leaf)
    if old is not None and isinstance(tensor, QuantizedTensor):
        module._parameters[leaf] = tensor.as_parameter()  # type: ignore[assignment]
    elif old is not None:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=old.requires_grad)
    else:
        module._buffers[leaf] = tensor


def _check_finite_if_small(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor; raise WeightError if it is small and contains NaN or infinity.

    Checking large tensors would read every memory-mapped page of a large model.
    """
    return _check_finite(name, tensor) if tensor.numel() <= 1 << 16 else tensor


def _check_finite(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor; raise WeightError if it contains NaN or infinity.

    For speed, only the sum of the elements is checked first. The sum of finite elements can overflow, so a sum that is
    not finite is followed by a check of each element.
    """
    if isinstance(tensor, QuantizedTensor):
        for rows in torch.split(tensor.blocks.flatten(0, -2), max(1, _CONVERSION_CHUNK_NUMEL // tensor.shape[-1])):
            _check_finite(name, dequantize_rows(rows, tensor.format))
    elif tensor.itemsize == 1 and tensor.is_floating_point():
        _check_finite(name, tensor.float())  # torch has no sum for fp8
    elif tensor.is_floating_point() and not torch.isfinite(tensor.sum()):
        num_bad = int((~torch.isfinite(tensor)).sum())
        if num_bad:
            values = "1 NaN or infinite value" if num_bad == 1 else f"{num_bad:,} NaN or infinite values"
            raise WeightError(f"tensor '{name}' has {values}; the file is damaged")
    return tensor
