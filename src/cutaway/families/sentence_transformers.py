"""Directories of sentence-transformers: modules.json, 1_Pooling, 2_Dense, 2_Normalize and sentence_bert_config.json."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cutaway.bounded_files import read_json_object, read_text_file
from cutaway.config import EmbeddingHead, EmbeddingProjection
from cutaway.errors import ConfigError
from cutaway.families.family import EMBEDDING_PROJECTION
from cutaway.families.safetensors_reader import SafetensorsReader, open_safetensors

MODULES_NAME = "modules.json"
SETTINGS_NAME = "config_sentence_transformers.json"
_SEQUENCE_SETTINGS_NAME = "sentence_bert_config.json"
_POOLINGS = {"cls": "first", "lasttoken": "last", "mean": "mean", "max": "max"}
"""Pooling mode of sentence-transformers → pooling of an EmbeddingHead."""
_POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
"""Class of torch.nn → activation."""


def read_modules(directory: Path) -> tuple[EmbeddingHead, Path, Path | None] | None:
    """Read modules.json: (head, directory of the transformer, directory of the module Dense). None without the file."""
    if not (directory / MODULES_NAME).is_file():
        return None
    paths = _read_module_paths(directory)
    if list(paths)[:2] != ["Transformer", "Pooling"] or not paths.keys() <= {
        "Transformer",
        "Pooling",
        "Dense",
        "Normalize",
    }:
        raise ConfigError(
            f"'{MODULES_NAME}' has the modules {', '.join(paths)}; cutaway supports Transformer, Pooling, optionally"
            f" Dense, and optionally Normalize. To load the transformer alone, remove '{MODULES_NAME}'"
        )
    dense = paths.get("Dense")
    settings = paths["Transformer"] / _SEQUENCE_SETTINGS_NAME
    head = EmbeddingHead(
        pooling=_read_pooling(paths["Pooling"]),
        projection=None if dense is None else _read_projection(dense),
        normalize="Normalize" in paths,
        max_length=read_json_object(settings, ConfigError).get("max_seq_length") if settings.is_file() else None,
    )
    return head, paths["Transformer"], dense


def _read_module_paths(directory: Path) -> dict[str, Path]:
    """{class of the module: its directory}, in order."""
    try:
        modules = json.loads(read_text_file(directory / MODULES_NAME, ConfigError))
        return {str(module["type"]).rpartition(".")[2]: directory / module["path"] for module in modules}
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"'{MODULES_NAME}' is not a list of modules with 'type' and 'path'; correct it") from None


def _read_pooling(directory: Path) -> str:
    data = read_json_object(directory / "config.json", ConfigError)
    modes = [mode for mode, key in _POOLING_KEYS.items() if data.get(key)]
    modes = [data["pooling_mode"]] if isinstance(data.get("pooling_mode"), str) else modes
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ConfigError(
            f"'{directory.name}' has the pooling modes {', '.join(map(str, modes)) or '(none)'}; cutaway supports one"
            f" of {', '.join(_POOLINGS)}"
        )
    return _POOLINGS[modes[0]]


def _read_projection(directory: Path) -> EmbeddingProjection:
    data = read_json_object(directory / "config.json", ConfigError)
    activation = str(data.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"'{directory.name}' has the activation {activation}; cutaway supports {', '.join(_ACTIVATIONS)}"
        )
    return EmbeddingProjection.model_validate(
        {"dim": data.get("out_features"), "activation": _ACTIVATIONS[activation], "bias": data.get("bias", True)}
    )


def add_projection(reader: SafetensorsReader, directory: Path) -> None:
    """Add the tensors of the module Dense to those of the transformer."""
    dense = open_safetensors(directory)
    for name in dense.tensor_infos:
        key = f"{EMBEDDING_PROJECTION.checkpoint_key.removesuffix('linear')}{name}"
        reader.tensor_infos[key], reader.locations[key] = dense.tensor_infos[name], dense.locations[name]


def write_modules(
    directory: Path, head: EmbeddingHead, d_model: int, projection: dict[str, torch.Tensor], settings: dict[str, object]
) -> None:
    """Write the files of a sentence-transformers directory beside the transformer's.

    `projection` are the tensors of the head's projection, `settings` the contents of config_sentence_transformers.json.
    """
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    mode = next(mode for mode, pooling in _POOLINGS.items() if pooling == head.pooling)
    files: dict[str, Any] = {
        "1_Pooling/config.json": {"word_embedding_dimension": d_model}
        | {key: name == mode for name, key in _POOLING_KEYS.items()},
        _SEQUENCE_SETTINGS_NAME: {"max_seq_length": head.max_length, "do_lower_case": False},
        SETTINGS_NAME: settings or {"prompts": {}, "default_prompt_name": None},
    }
    if head.projection is not None:
        modules.append(("2_Dense", "Dense"))
        names = {name: cls for cls, name in _ACTIVATIONS.items()}
        if head.projection.activation not in names:
            raise ConfigError(
                f"head.projection.activation is '{head.projection.activation}', which sentence-transformers does not"
                f" have; use {', '.join(names)}, or save it with family='cutaway'"
            )
        activation = names[head.projection.activation]
        module = "linear" if activation == "Identity" else "activation"
        files["2_Dense/config.json"] = {
            "in_features": d_model,
            "out_features": head.projection.dim,
            "bias": head.projection.bias,
            "activation_function": f"torch.nn.modules.{module}.{activation}",
        }
    if head.normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    files[MODULES_NAME] = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{cls}"}
        for i, (path, cls) in enumerate(modules)
    ]
    for path, _ in modules:
        (directory / path).mkdir(exist_ok=True)
    for name, data in files.items():
        (directory / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if head.projection is not None:
        tensors = {f"linear.{name}": tensor.detach().contiguous().cpu() for name, tensor in projection.items()}
        save_file(tensors, directory / "2_Dense" / "model.safetensors", metadata={"format": "pt"})
