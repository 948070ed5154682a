"""Read and write adapters in the directory format of PEFT: adapter_config.json and adapter_model.safetensors.

The weight mappings of the family give the names of the adapted modules. If a checkpoint stores several layers as one
matrix (GPT-2's c_attn), PEFT has one adapter for this matrix. Reading gives each layer the A of the fused matrix and
its rows of B. Writing stacks the A of the layers, unless they are equal, and B becomes block diagonal. Experts, which
are one layer here, have one adapter per expert and matrix.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cutaway.bounded_files import read_json_object
from cutaway.config.head import TaskHead
from cutaway.config.lora import LoRA
from cutaway.errors import ConfigError, InputError, WeightError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.family import Family
from cutaway.families.load_plan import TensorConversion, expand_mappings, rename_legacy_key
from cutaway.families.native_format import NativeFamily
from cutaway.families.peft_config import MERGE_ADVICE, check_peft_config, peft_scaling, to_lora_config, to_peft_config
from cutaway.families.peft_head import CLASSIFIER_MODULES, TASK_TYPES, add_saved_head, export_head, load_head_weights
from cutaway.families.registry import families, find_family
from cutaway.families.safetensors_reader import load_safetensors
from cutaway.families.save import has_class_with_head
from cutaway.families.weight_conversion import (
    Identity,
    MergeModulelist,
    PermuteForRope,
    Split,
    SplitGroupedQKV,
    SplitShardedQVK,
    Transpose,
)
from cutaway.model import Transformer, build
from cutaway.model.adapters.adapter_methods import adaptable_layers, adapted_layers
from cutaway.model.adapters.lora import AdaptedLayer, LoRAEmbedding, LoRAWeights

ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
KEY_PREFIX = "base_model.model."


@dataclass(frozen=True)
class _AdaptedMatrix:
    """A matrix of the checkpoint, the model's layers that it consists of, and the conversion between them."""

    module: str
    """Name of the module in transformers."""
    layers: tuple[str, ...]
    """Names of the model's modules."""
    conversion: TensorConversion
    expert: int | None = None
    """Index of the expert that the matrix belongs to, if the layer has one matrix per expert."""


def load_adapter(
    checkpoint: Checkpoint, directory: str | Path, name: str = "default", *, trainable: bool = False
) -> Checkpoint:
    """Add the adapter in a PEFT directory to the model of a checkpoint, select it, and return the checkpoint.

    `directory` may be a run that has trained an adapter. `ct.load(base, adapters=…)` calls this function.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise InputError(f"checkpoint is a {type(checkpoint).__name__}; pass the result of ct.load")
    path = Path(directory).expanduser()
    if (path / "run.json").is_file():
        path = path / "model"
    if not (path / ADAPTER_CONFIG_NAME).is_file():
        if (path / "config.json").is_file():
            raise InputError(f"'{directory}' is a whole model, not an adapter; pass it as the model, without a base")
        raise InputError(f"'{directory}' has no {ADAPTER_CONFIG_NAME}; pass a directory that PEFT or cutaway wrote")
    if name in checkpoint.model.adapters:
        raise InputError(
            f"the model has an adapter '{name}' already, so it may be an adapter itself; pass its base model, or"
            f" another name, as in ct.load(base, adapters={{'other': {str(directory)!r}}})"
        )
    peft_config = read_json_object(path / ADAPTER_CONFIG_NAME, ConfigError)
    check_peft_config(peft_config)
    weights = _read_weights(path)
    if checkpoint.model.adapters and any("lora_" not in key for key in weights):
        raise InputError(
            f"the adapter '{name}' has a head of its own, but the model has other adapters, which share one head; load"
            " it alone, with a base model of its own"
        )
    head = checkpoint.config.head
    if checkpoint.model.adapters and isinstance(head, TaskHead) and peft_config.get("task_type") == "CAUSAL_LM":
        raise InputError(
            f"the adapter '{name}' is for a language model, but the model has other adapters and a head for"
            f" {head.kind}, which they share; load it alone, with a base model of its own"
        )
    family, base_model = _family_of(checkpoint), checkpoint.model
    checkpoint = add_saved_head(checkpoint, path, peft_config, weights)
    model = checkpoint.model
    conversions = _conversions(family, model)
    head_weights = {key.removeprefix(KEY_PREFIX): weights.pop(key) for key in list(weights) if "lora_" not in key}
    if set(peft_config.get("modules_to_save") or ()) - set(CLASSIFIER_MODULES) and not head_weights:
        raise ConfigError(
            "adapter_config.json: modules_to_save names modules whose weights are not in the file; save it again"
        )
    if isinstance(model.config.head, TaskHead):
        load_head_weights(model, base_model, conversions, head_weights)
    _check_saved_modules(peft_config, _changed_weights(head_weights, conversions, family, model))
    matrices: dict[str, _AdaptedMatrix] = {}
    for matrix in _list_matrices(family, model):
        matrices.setdefault(matrix.module, matrix)
    prefix = family.base_model_prefix  # a base model without head has no prefix
    grouped = _group_by_module(weights)
    names = {peft_name: rename_legacy_key(family, peft_name) for peft_name in grouped}
    by_module = {name if name in matrices else f"{prefix}{name}": peft_name for peft_name, name in names.items()}
    if unknown := sorted(module.removeprefix(prefix) for module in by_module.keys() - matrices.keys()):
        head_keys = [key for key in _checkpoint_modules(family, model) if key == unknown[0]]
        reason = (
            f"which cutaway has no adapters for; {MERGE_ADVICE}"
            if head_keys
            else f"which is not a layer of this {checkpoint.family or 'model'}; load it with the base model it was"
            " trained on"
        )
        raise WeightError(f"the adapter has weights for '{unknown[0]}', {reason}")
    sites = {id(layer): site for site, layer in adaptable_layers(model).items()}
    per_layer: dict[str, tuple[Tensor, Tensor, Tensor | None, float]] = {}
    experts: dict[str, dict[int, tuple[Tensor, Tensor, float]]] = {}
    for module, peft_name in by_module.items():
        tensors, matrix = grouped[peft_name], matrices[module]
        scaling = peft_scaling(peft_config, peft_name, tensors)
        if matrix.expert is not None:
            expert = tensors["lora_A.weight"], tensors["lora_B.weight"], scaling
            experts.setdefault(matrix.layers[0], {})[matrix.expert] = expert
            continue
        per_layer |= {layer: (*parts, scaling) for layer, parts in _split_adapter(matrix, model, tensors).items()}
    per_layer |= {layer: _stack_experts(layer, parts, model) for layer, parts in experts.items()}
    ranks = {sites[id(model.get_submodule(layer))]: parts[0].shape[-2] for layer, parts in per_layer.items()}
    config = to_lora_config(peft_config, ranks)
    previous = model.active_adapter
    model.insert_adapter(config, name)
    try:
        for layer_name, parts in per_layer.items():
            _copy_adapter(model, layer_name, name, *parts)
    except WeightError:
        model.delete_adapter(name).set_adapter(previous)
        raise
    if not trainable:
        model.requires_grad_(False)
    return checkpoint


def save_adapter(
    checkpoint: Checkpoint | Transformer,
    directory: str | Path,
    name: str | None = None,
    *,
    base: str | Path | None = None,
) -> Path:
    """Write an adapter (default: the active one) as a PEFT directory. The base model is not written.

    `base` is the Hub id or path of the base model, which is stored in adapter_config.json.
    """
    checkpoint = Checkpoint(checkpoint, checkpoint.config) if isinstance(checkpoint, Transformer) else checkpoint
    model = checkpoint.model
    name = name or model.active_adapter
    if name is None or name not in model.adapters:
        raise InputError(
            f"the model has no {'active adapter' if name is None else f'adapter {name!r}'}; use one of:"
            f" {', '.join(model.adapters) or '(it has none: call model.add_adapter)'}"
        )
    config, path = model.adapters[name], Path(directory).expanduser()
    family = _family_of(checkpoint)
    prefix = "" if has_class_with_head(model.config) else family.base_model_prefix
    head_class = family.head_class_for(model.config.head.kind)
    body_prefix = "" if head_class is None else head_class.body_prefix
    weights: dict[str, Tensor] = {}
    modules: list[str] = []
    ranks: dict[str, int] = {}
    scalings: dict[str, float] = {}
    for key, tensors, rank, scaling in export_adapter(model, family, name):
        module = body_prefix + key.removeprefix(prefix)
        weights |= {f"{KEY_PREFIX}{module}.{leaf}": tensor.contiguous() for leaf, tensor in tensors.items()}
        modules.append(module)
        ranks[module], scalings[module] = rank, scaling
    all_modules = [body_prefix + module.removeprefix(prefix) for module in _checkpoint_modules(family, model)]
    peft_config = to_peft_config(config, modules, all_modules, ranks, scalings)
    peft_config["base_model_name_or_path"] = None if base is None else str(base)
    peft_config["task_type"] = {"decoder": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM"}.get(model.config.form)
    peft_config["task_type"] = TASK_TYPES.get(model.config.head.kind, peft_config["task_type"])
    try:
        path.mkdir(parents=True, exist_ok=True)
        saved_modules, head_weights = export_head(model, _conversions(family, model), path)
        weights |= {f"{KEY_PREFIX}{key.removeprefix(prefix)}": tensor for key, tensor in head_weights.items()}
        peft_config |= {"modules_to_save": saved_modules} if saved_modules else {}
        save_file(weights, path / ADAPTER_WEIGHTS_NAME, metadata={"format": "pt"})
        (path / ADAPTER_WEIGHTS_NAME).chmod(0o644)  # safetensors creates files readable only by their owner
        text = json.dumps(peft_config, indent=2) + "\n"
        (path / ADAPTER_CONFIG_NAME).write_text(text, encoding="utf-8")  # last, so that the directory is complete
    except (OSError, SafetensorError) as error:
        raise WeightError(f"'{path}' could not be written: {error}") from None
    return path


def export_adapter(
    model: Transformer, family: Family, name: str
) -> Iterator[tuple[str, dict[str, Tensor], int, float]]:
    """Yield module, PEFT's tensors, rank and scaling of each matrix of the family's checkpoints that has this adapter.

    Raise WeightError if the family's checkpoints have no matrix for a layer with the adapter.
    """
    covered: set[tuple[str, int | None]] = set()
    for matrix in _list_matrices(family, model):
        layers = [model.get_submodule(layer) for layer in matrix.layers]
        adapters = [
            layer.adapters[name] if isinstance(layer, AdaptedLayer) and name in layer.adapters else None
            for layer in layers
        ]
        keys = {(layer, matrix.expert) for layer in matrix.layers}
        if not any(adapters) or covered & keys:
            continue
        covered |= keys
        yield matrix.module, *_join_adapters(matrix, layers, adapters)
    adapted = {key for key, layer in adapted_layers(model).items() if name in layer.adapters}
    if missing := sorted(adapted - {layer for layer, _ in covered}):
        raise WeightError(
            f"the adapter of '{missing[0]}' has no place in the files of a {family.name} model; save the merged model"
            " instead (ct.save, cutaway convert)"
        )


def check_exportable(checkpoint: Checkpoint, config: LoRA) -> None:
    """Raise InputError if PEFT's format has no place for an adapter with this configuration. Called before training."""
    model = checkpoint.model
    layers = dict(model.named_modules(remove_duplicate=False))
    exportable = {id(layers[name]) for each in _list_matrices(_family_of(checkpoint), model) for name in each.layers}
    for site, layer in adaptable_layers(model).items():
        if config.matches(site) and id(layer) not in exportable:
            raise InputError(
                f"the adapter of '{site}' could not be saved, because PEFT's format has no place for it in a"
                f' {checkpoint.family or "cutaway"} model; leave it out of targets, e.g. targets = ["attn.*"]'
            )


def _family_of(checkpoint: Checkpoint) -> Family:
    """Family of a checkpoint, which names the modules. A model that no family supports has its own names."""
    name = checkpoint.family
    if name is not None and name in families():
        return families()[name]
    try:
        return find_family(checkpoint.config)[0]
    except ConfigError:
        return NativeFamily(checkpoint.config)


def _conversions(family: Family, model: Transformer) -> list[TensorConversion]:
    """Conversions of the base model's weights, by the names of a model without adapters and quantized layers."""
    return list(
        expand_mappings(family.weight_mappings_for(model.config), model.config, build(model.config, device="meta"))
    )


def _checkpoint_modules(family: Family, model: Transformer) -> list[str]:
    """Names in transformers of all modules with a weight."""
    keys = (key for conversion in _conversions(family, model) for key in conversion.checkpoint_keys)
    return [key.removesuffix(".weight") for key in keys if key.endswith(".weight")]


def _list_matrices(family: Family, model: Transformer) -> Iterator[_AdaptedMatrix]:
    """Yield the checkpoint matrices whose layers can have adapters."""
    adaptable = {id(layer) for layer in adaptable_layers(model).values()}
    modules = dict(model.named_modules(remove_duplicate=False))
    rows_only = (Identity, PermuteForRope, Split, SplitGroupedQKV, SplitShardedQVK, Transpose)
    for conversion in _conversions(family, model):
        layers = tuple(key.removesuffix(".weight") for key in conversion.model_keys)
        if not all(key.endswith(".weight") for key in conversion.model_keys) or conversion.save_only:
            continue
        if layers[0].startswith("head."):  # a tied output matrix is the embedding, whose adapter does not apply to it
            continue
        if not all(id(modules.get(layer)) in adaptable for layer in layers):
            continue
        if isinstance(conversion.op, MergeModulelist):
            for expert, key in enumerate(conversion.checkpoint_keys):
                yield _AdaptedMatrix(key.removesuffix(".weight"), layers, conversion, expert)
            continue
        if len(conversion.checkpoint_keys) > 1:
            continue
        if not isinstance(conversion.op, rows_only) or getattr(conversion.op, "dim", 0) != 0:
            continue
        yield _AdaptedMatrix(conversion.checkpoint_keys[0].removesuffix(".weight"), layers, conversion)


def _convert_rows(matrix: _AdaptedMatrix, tensors: list[Tensor]) -> Tensor:
    """Convert matrices with the rows of the model's layers to one matrix with the rows of the checkpoint's matrix."""
    op = matrix.conversion.op
    if isinstance(op, Transpose):  # PEFT's A and B are not transposed
        op = Identity()
    if isinstance(op, Split):
        op = replace(op, transposed=False)
    return op.to_checkpoint(tensors, matrix.conversion.d_head)[0]


def _join_adapters(
    matrix: _AdaptedMatrix, layers: list[Any], adapters: list[Any]
) -> tuple[dict[str, Tensor], int, float]:
    """PEFT's tensors of a checkpoint matrix, its rank and its scaling, from the adapters of the model's layers."""
    present = [adapter for adapter in adapters if adapter is not None]
    scaling = present[0].scaling
    if isinstance(layers[0], LoRAEmbedding):
        [adapter] = present
        tensors = {"lora_embedding_A": adapter.lora_a, "lora_embedding_B": adapter.lora_b}
        return {key: tensor.detach().cpu() for key, tensor in tensors.items()}, adapter.rank, scaling
    if matrix.expert is not None:
        [adapter] = present
        tensors = {"lora_A.weight": adapter.lora_a[matrix.expert], "lora_B.weight": adapter.lora_b[matrix.expert]}
        return {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}, adapter.rank, scaling
    first_a = present[0].lora_a
    is_shared = len(present) == len(layers) and all(torch.equal(adapter.lora_a, first_a) for adapter in present)
    if is_shared:
        lora_a, blocks = first_a, [adapter.lora_b for adapter in adapters]
    else:
        lora_a = torch.cat([adapter.lora_a for adapter in present])
        blocks, column = [], 0
        for layer, adapter in zip(layers, adapters, strict=True):
            block = first_a.new_zeros(layer.out_features, len(lora_a))
            if adapter is not None:
                block[:, column : column + adapter.rank] = adapter.lora_b.detach() * (adapter.scaling / scaling)
                column += adapter.rank
            blocks.append(block)
    tensors = {"lora_A.weight": lora_a, "lora_B.weight": _convert_rows(matrix, blocks)}
    if any(adapter.magnitude is not None for adapter in present):
        rows = [
            (layer.weight.norm(dim=-1) if adapter is None else adapter.magnitude).unsqueeze(-1)
            for layer, adapter in zip(layers, adapters, strict=True)
        ]
        tensors["lora_magnitude_vector"] = _convert_rows(matrix, rows).squeeze(-1)
    return {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}, len(lora_a), scaling


def _split_adapter(
    matrix: _AdaptedMatrix, model: Transformer, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """A, B and magnitude of each of the model's layers, from PEFT's tensors of a checkpoint matrix."""
    if "lora_embedding_A" in tensors:
        return {matrix.layers[0]: (tensors["lora_embedding_A"], tensors["lora_embedding_B"], None)}
    lora_a, lora_b, magnitude = tensors["lora_A.weight"], tensors["lora_B.weight"], tensors.get("lora_magnitude_vector")
    op = matrix.conversion.op
    op = Identity() if isinstance(op, Transpose) else replace(op, transposed=False) if isinstance(op, Split) else op
    rows = [len(model.get_submodule(layer).weight) for layer in matrix.layers]  # type: ignore[arg-type]

    def split(tensor: Tensor) -> list[Tensor]:
        if tensor.ndim != 2 or len(tensor) != sum(rows):
            raise WeightError(
                f"lora_B of '{matrix.module}' has shape {list(tensor.shape)}, but the layer has {sum(rows)} outputs;"
                " load the adapter with the base model it was trained on"
            )
        shapes = [(count, tensor.shape[1]) for count in rows]
        return op.to_model([tensor], shapes, matrix.conversion.d_head)

    magnitudes = [None] * len(rows) if magnitude is None else [m.squeeze(-1) for m in split(magnitude.view(-1, 1))]
    return {layer: (lora_a, b, m) for layer, b, m in zip(matrix.layers, split(lora_b), magnitudes, strict=True)}


def _stack_experts(
    layer: str, experts: Mapping[int, tuple[Tensor, Tensor, float]], model: Transformer
) -> tuple[Tensor, Tensor, None, float]:
    """A, B and scaling of the experts of a layer. B is zero for experts without an adapter."""
    lora_a, lora_b, scaling = next(iter(experts.values()))
    if any(a.shape != lora_a.shape or b.shape != lora_b.shape or s != scaling for a, b, s in experts.values()):
        raise WeightError(f"the experts of '{layer}' have adapters of different ranks or scalings; {MERGE_ADVICE}")
    empty = torch.zeros_like(lora_a), torch.zeros_like(lora_b), scaling
    count = len(model.get_submodule(layer).weight)  # type: ignore[arg-type]
    parts = [experts.get(expert, empty) for expert in range(count)]
    return torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts]), None, scaling


def _copy_adapter(
    model: Transformer,
    layer_name: str,
    name: str,
    lora_a: Tensor,
    lora_b: Tensor,
    magnitude: Tensor | None,
    scaling: float,
) -> None:
    """Copy A, B, the magnitude and the scaling to an adapter of a layer."""
    layer = model.get_submodule(layer_name)
    assert isinstance(layer, AdaptedLayer)
    adapter = layer.adapters[name]
    assert isinstance(adapter, LoRAWeights)
    adapter.scaling = scaling
    with torch.no_grad():
        _copy_tensor(f"{layer_name}: lora_A", adapter.lora_a, lora_a)
        _copy_tensor(f"{layer_name}: lora_B", adapter.lora_b, lora_b)
        if adapter.magnitude is not None and magnitude is not None:
            _copy_tensor(f"{layer_name}: lora_magnitude_vector", adapter.magnitude, magnitude)


def _copy_tensor(name: str, target: Tensor, source: Tensor) -> None:
    if target.shape != source.shape:
        raise WeightError(
            f"{name} has shape {list(source.shape)}, but the base model needs {list(target.shape)}; load the adapter"
            " with the base model it was trained on"
        )
    if not source.isfinite().all():
        raise WeightError(f"{name} has NaN or infinite values; use another copy of the adapter")
    target.copy_(source)


def _read_weights(directory: Path) -> dict[str, Tensor]:
    path = directory / ADAPTER_WEIGHTS_NAME
    if not path.is_file():
        pickled = (directory / "adapter_model.bin").is_file()
        reason = "; it has adapter_model.bin, a pickle, which can run code and is not opened" if pickled else ""
        raise WeightError(f"'{directory}' has no {ADAPTER_WEIGHTS_NAME}{reason}; save the adapter as safetensors")
    return load_safetensors(path)


def _group_by_module(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """PEFT's tensors by the name of their module in transformers."""
    grouped: dict[str, dict[str, Tensor]] = {}
    leaves = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B")
    for key, tensor in weights.items():
        leaf = next((leaf for leaf in leaves if key.endswith(f".{leaf}")), None)
        if not key.startswith(KEY_PREFIX) or leaf is None:
            raise WeightError(f"'{key}' is not a weight of a LoRA adapter; other kinds of adapters are not supported")
        grouped.setdefault(key.removeprefix(KEY_PREFIX).removesuffix(f".{leaf}"), {})[leaf] = tensor
    for module, tensors in grouped.items():
        pairs = ({"lora_A.weight", "lora_B.weight"}, {"lora_embedding_A", "lora_embedding_B"})
        if not any(pair <= tensors.keys() for pair in pairs):
            raise WeightError(f"the adapter of '{module}' has {', '.join(sorted(tensors))} only; A and B are needed")
    return grouped


def _changed_weights(
    weights: Mapping[str, Tensor], conversions: list[TensorConversion], family: Family, model: Transformer
) -> dict[str, Tensor]:
    """The weights without those that are equal to the base model's.

    PEFT saves the embedding and the output matrix with an adapter of the embedding or after added tokens.
    """
    by_key = {key: each for each in conversions for key in each.checkpoint_keys if len(each.checkpoint_keys) == 1}
    state, changed = model.state_dict(), {}
    for name, tensor in weights.items():
        key = rename_legacy_key(family, name.replace(".base_layer.", "."))
        conversion = by_key.get(key) or by_key.get(f"{family.base_model_prefix}{key}")
        if conversion is not None and all(each in state for each in conversion.model_keys):
            [base] = conversion.op.to_checkpoint([state[each] for each in conversion.model_keys], conversion.d_head)
            if base.shape == tensor.shape and torch.equal(base.cpu(), tensor.to(base.dtype)):
                continue
        changed[name] = tensor
    return changed


def _check_saved_modules(peft_config: Mapping[str, Any], unused: Mapping[str, Tensor]) -> None:
    """Raise if an adapter directory has weights of modules other than the head of a task."""
    if not unused:
        return
    name, tensor = next(iter(unused.items()))
    if peft_config.get("modules_to_save"):
        raise ConfigError(
            f"adapter_config.json: modules_to_save is not supported for '{name}', because it replaces a module of the"
            f" base model that is not the head of a task; {MERGE_ADVICE}"
        )
    if name.removesuffix(".weight").removesuffix(".base_layer").endswith(("embed_tokens", "lm_head")):
        raise WeightError(
            f"the adapter has its own '{name}' of shape {list(tensor.shape)}, which differs from the base model's, as"
            " after tokens were added to the vocabulary; merge it with PEFT, and load the merged model"
        )
    raise WeightError(f"'{name}' is not a weight of a LoRA adapter; other kinds of adapters are not supported")
