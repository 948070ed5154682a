"""Sources of models to check: `module.path:factory`, checkpoints loaded by transformers, shrunken configurations."""

import json
import re
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cutaway.check.adapters.transformers import silence_transformers
from cutaway.check.checked_model import CheckedModel
from cutaway.config import Config, DenseFFN, LatentAttention, MultiHeadBase
from cutaway.errors import InputError, format_error, format_raised
from cutaway.families.load import resolve_checkpoint_path

_FACTORY_SPEC = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


ModelAndOverrides = tuple[object, dict[str, Any]]
"""A model, and the keyword arguments to pass to `check` with it."""


_FACTORY_RETURNS = "a model, a function tokens → logits, a dict of CheckedModel fields, or a pair (model, dict)"


def is_factory_spec(source: str) -> bool:
    """Whether the model source has the form `module.path:factory` and is neither an existing path nor a URL."""
    return ":" in source and "://" not in source and not Path(source).exists()


def import_factory(source: str, folder: Path | None = None) -> Any:
    """Import the object that `module.path:factory` names, from `folder` (default the working directory) or sys.path."""
    match = _FACTORY_SPEC.fullmatch(source)
    if match is None or match[1].endswith(".py"):
        raise InputError(
            f"'{source}' is not module.path:factory; write the module as in an import, such as models.gpt:make"
        )
    module, name = match.groups()
    directory = str(folder or Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        value: Any = import_module(module)
    except Exception as error:  # any exception: it is raised by the user's module
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise InputError(
                f"there is no module '{error.name}' in {directory} or among the installed packages; run from the "
                "directory that contains the module"
            ) from error
        raise InputError(
            f"the module '{module}' cannot be imported: it {format_raised(error)}; fix the module first"
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise InputError(f"'{module}' has no '{name}'; name a function in it that builds the model")
        value = getattr(value, part)
    return value


def build_from_factory(source: str, factory: object, *, seed: int = 0) -> ModelAndOverrides:
    """Return the model that a factory builds, and the overrides that it returns with the model.

    A function is called without arguments, after torch is seeded. A model, dict or tuple is used as it is.
    """
    if not isinstance(factory, nn.Module | CheckedModel | dict | tuple) and callable(factory):
        torch.manual_seed(seed)
        try:
            factory = factory()
        except Exception as error:  # any exception: it is raised by the user's code
            message = f"'{source}' was called without arguments and {format_raised(error)}"
            raise InputError(f"{message}; it must return {_FACTORY_RETURNS}") from error
    if isinstance(factory, dict):
        return _parse_overrides(source, None, factory)
    if isinstance(factory, tuple):
        if len(factory) == 2 and isinstance(factory[1], dict):
            return _parse_overrides(source, *factory)
        types = ", ".join(type(item).__name__ for item in factory)
        raise InputError(f"'{source}' returned a tuple of ({types}); it must return {_FACTORY_RETURNS}")
    if factory is None:
        raise InputError(f"'{source}' returned None; it must return {_FACTORY_RETURNS}")
    return factory, {}


def _parse_overrides(source: str, model: object, overrides: dict[Any, object]) -> ModelAndOverrides:
    """Return the model and the overrides. If `model` is None, the override `module` is removed and used as the model.

    `build_checked_model` validates the names of the overrides later.
    """
    invalid = [name for name in overrides if not isinstance(name, str)]
    if invalid:
        raise InputError(
            f"'{source}' returned a dict with the key {invalid[0]!r}; use the field names of cutaway.check.CheckedModel"
        )
    overrides = dict(overrides)
    model = overrides.pop("module", None) if model is None else model
    if model is None and not {"logits", "attention"} & overrides.keys():
        raise InputError(f"'{source}' returned a dict without a model; add logits, attention or module")
    return model, overrides


def load_transformers_model(source: str, *, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
    """Load a checkpoint with transformers, with the class that its config.json names."""
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise InputError(
            "--library transformers needs transformers, which is not installed; run pip install transformers"
        ) from None
    path = resolve_checkpoint_path(source)
    if not (path / "config.json").is_file():
        raise InputError(
            f"'{source}' has no config.json, so transformers cannot load it; convert it to the hf format first, with "
            "cutaway convert"
        )
    try:
        with silence_transformers():
            architectures = json.loads((path / "config.json").read_text(encoding="utf-8")).get("architectures") or []
            names = [name for name in architectures if hasattr(transformers, name)]
            model_class = getattr(transformers, names[0] if names else "AutoModel")
            kwargs = {"dtype": dtype or "auto", "trust_remote_code": False, "use_safetensors": True}
            model: nn.Module = model_class.from_pretrained(path, **kwargs)
    except Exception as error:  # any exception: it is raised by transformers
        raise InputError(f"transformers cannot load '{source}': {format_error(error)}") from None
    return (model if device is None else model.to(device)).eval()


_MAX_D_MODEL, _MAX_HEADS, _MAX_KV_HEADS, _MAX_VOCAB_SIZE, _MAX_EMBEDDING_FACTOR = 256, 4, 2, 4096, 64
"""Maximum sizes of a shrunken model."""


def shrink_config(config: Config) -> Config:
    """Return a smaller configuration: fewer layers and heads, smaller d_model, FFNs and vocabulary.

    Each stack keeps its leading blocks and one repetition of its block pattern (at least two layers, if it has them).
    Head dimensions, positions, norms, windows and experts stay, because bugs depend on them.
    """
    d_model = min(config.d_model, _MAX_D_MODEL)
    shrink_attention = partial(_shrink_attention, old_d_model=config.d_model)
    shrink_ffn = partial(_shrink_ffn, old_d_model=config.d_model, new_d_model=d_model)
    changes: dict[str, object] = {"d_model": d_model, "vocab_size": min(config.vocab_size, _MAX_VOCAB_SIZE)}
    source_vocab_size = getattr(config, "source_vocab_size", None)
    if source_vocab_size is not None:
        changes["source_vocab_size"] = min(source_vocab_size, _MAX_VOCAB_SIZE)
    for name, stack in config.stacks.items():
        layers = min(stack.layers, len(stack.leading_blocks) + max(2, len(stack.block)))
        embedding = stack.embedding
        if (factorization := embedding.factorization) is not None:
            width = min(factorization.width, _MAX_EMBEDDING_FACTOR)
            embedding = embedding.replace(factorization=factorization.replace(width=width))
        layer_groups = None
        if stack.layer_groups is not None:
            repeats = -(-layers // stack.layers_per_group)
            layers, layer_groups = repeats * stack.layers_per_group, min(stack.layer_groups, repeats)
        stack = stack.edit_layers(shrink_attention, shrink_ffn)
        changes[name] = stack.replace(layers=layers, embedding=embedding, layer_groups=layer_groups)
    return config.replace(**changes)


def _shrink_attention(attention: MultiHeadBase | LatentAttention, old_d_model: int) -> MultiHeadBase | LatentAttention:
    """Reduce the heads of an attention configuration; keep the head dimension and the grouping (MHA, GQA or MQA)."""
    if isinstance(attention, LatentAttention):
        return attention.replace(heads=min(attention.heads, _MAX_HEADS))
    heads = min(attention.heads, _MAX_HEADS)
    is_mha = attention.num_kv_heads == attention.heads
    kv_heads = heads if is_mha else min(attention.num_kv_heads, _MAX_KV_HEADS)
    return attention.replace(
        heads=max(heads, kv_heads),
        kv_heads=None if attention.kv_heads is None else kv_heads,
        d_head=attention.head_dim(old_d_model),
    )


def _shrink_ffn(ffn: DenseFFN, old_d_model: int, new_d_model: int) -> DenseFFN:
    """Shrink the hidden dimension of an FFN configuration in proportion to d_model."""
    if ffn.hidden is None:
        return ffn
    return ffn.replace(hidden=max(16, ffn.hidden * new_d_model // old_d_model // 8 * 8))
