"""Sources of models to check: `module.path:factory`, checkpoints loaded by transformers, shrunken configurations."""

import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from cutaway.config import Config, LatentAttention, Moe, MultiHeadBase
from cutaway.errors import InputError, format_error, format_raised
from cutaway.families.load import resolve_checkpoint_path

FACTORY_SPEC = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


ModelAndOverrides = tuple[Any, dict[str, Any]]
"""A model and its keyword arguments for `check`."""


FACTORY_RETURNS = "a model, a function tokens → logits, (model, dict of CheckedModel fields), or such a dict"


def is_factory_spec(source: str) -> bool:
    """Whether a source has the form `module.path:factory` and is not a file."""
    return ":" in source and "://" not in source and not Path(source).exists()


def import_factory(source: str, folder: Path | None = None) -> Any:
    """Import the object that `module.path:factory` names, from `folder` (default the working directory) or sys.path."""
    match = FACTORY_SPEC.fullmatch(source)
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
                f"there is no module '{error.name}' in {directory} or installed; run from the directory that has it"
            ) from error
        raise InputError(
            f"the module '{module}' cannot be imported: it {format_raised(error)}; fix the module first"
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise InputError(f"'{module}' has no '{name}'; name a function in it that builds the model")
        value = getattr(value, part)
    return value


def build_from_factory(source: str, factory: Any, *, seed: int = 0) -> ModelAndOverrides:
    """Call the factory without arguments, after seeding torch; an object that is already a model is used as it is."""
    import torch
    from torch import nn

    from cutaway.check.checked_model import CheckedModel

    if not isinstance(factory, nn.Module | CheckedModel | dict | tuple) and callable(factory):
        factory = _call_factory(source, factory, lambda: torch.manual_seed(seed))
    if isinstance(factory, dict):
        return _parse_overrides(source, None, factory)
    if isinstance(factory, tuple):
        if len(factory) != 2 or not isinstance(factory[1], dict):
            types = ", ".join(type(item).__name__ for item in factory)
            raise InputError(f"'{source}' returned a tuple of ({types}); it must return {FACTORY_RETURNS}")
        return _parse_overrides(source, *factory)
    if factory is None:
        raise InputError(f"'{source}' returned None; it must return {FACTORY_RETURNS}")
    return factory, {}


def _call_factory(source: str, factory: Callable[[], Any], set_seed: Callable[[], object]) -> Any:
    """Call the factory; an exception in it becomes an InputError."""
    set_seed()
    try:
        return factory()
    except Exception as error:
        raise InputError(
            f"'{source}' was called without arguments and {format_raised(error)}; it must return {FACTORY_RETURNS}"
        ) from error


def _parse_overrides(source: str, model: Any, overrides: dict[Any, Any]) -> ModelAndOverrides:
    """Split the module from a dict of overrides; `build_checked_model` validates the names."""
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


def load_transformers_model(source: str, *, device: Any = None, dtype: Any = None) -> Any:
    """Load a checkpoint with transformers, with the class that its config.json names."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise InputError(
            "--library transformers needs transformers, which is not installed; run pip install transformers"
        ) from None
    path = resolve_checkpoint_path(source)
    if not (path / "config.json").is_file():
        raise InputError(
            f"'{source}' has no config.json, so transformers cannot load it; convert it to hf first: cutaway convert"
        )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):  # hides progress bars
            model_class = _resolve_model_class(transformers, path)
            model = model_class.from_pretrained(
                path, dtype=dtype or "auto", trust_remote_code=False, use_safetensors=True
            )
    except Exception as error:  # any exception: it is raised by transformers
        raise InputError(f"transformers cannot load '{source}': {format_error(error)}") from None
    return model.to(device).eval() if device is not None else model.eval()


def _resolve_model_class(transformers: Any, path: Path) -> Any:
    """The model class that config.json names; AutoModel if transformers does not have it."""
    architectures = json.loads((path / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    return next(
        (getattr(transformers, name) for name in architectures if hasattr(transformers, name)), transformers.AutoModel
    )


MAX_D_MODEL, MAX_HEADS, MAX_KV_HEADS, MAX_VOCAB_SIZE, MAX_EMBEDDING_FACTOR = 256, 4, 2, 4096, 64
"""Maximum sizes of a shrunken model."""


def shrink_config(config: Config) -> Config:
    """Shrink a configuration: fewer layers (every block type once, at least two), smaller d_model, fewer heads, smaller
    vocabulary. Head dimensions, positions, norms, windows and experts stay, because bugs depend on them."""
    d_model = min(config.d_model, MAX_D_MODEL)
    changes: dict[str, Any] = {"d_model": d_model, "vocab_size": min(config.vocab_size, MAX_VOCAB_SIZE)}
    source_vocab_size = getattr(config, "source_vocab_size", None)
    if source_vocab_size is not None:
        changes["source_vocab_size"] = min(source_vocab_size, MAX_VOCAB_SIZE)
    for name, stack in config.stacks.items():
        layers = min(stack.layers, len(stack.leading_blocks) + max(2, len(stack.block)))
        factorization = stack.embedding.factorization
        embedding = stack.embedding
        if factorization is not None:
            embedding = embedding.replace(
                factorization=factorization.replace(width=min(factorization.width, MAX_EMBEDDING_FACTOR))
            )
        changes[name] = stack.replace(
            layers=layers,
            leading_blocks=tuple(_shrink_block(block, config.d_model, d_model) for block in stack.leading_blocks),
            block=tuple(_shrink_block(block, config.d_model, d_model) for block in stack.block),
            embedding=embedding,
            layer_groups=None if stack.layer_groups is None else min(stack.layer_groups, layers),
        )
    return config.replace(**changes)


def _shrink_block(block: Any, old_d_model: int, new_d_model: int) -> Any:
    """Shrink a block to a smaller d_model."""
    changes = {
        "attention": _shrink_attention(block.attention, old_d_model),
        "ffn": _shrink_ffn(block.ffn, old_d_model, new_d_model),
    }
    if hasattr(block, "cross"):
        changes["cross"] = _shrink_attention(block.cross, old_d_model)
    return block.replace(**changes)


def _shrink_attention(attention: Any, old_d_model: int) -> Any:
    """Reduce the number of heads; keep the head dimension and the kind of grouping (MHA, GQA or MQA)."""
    if isinstance(attention, LatentAttention):
        return attention.replace(heads=min(attention.heads, MAX_HEADS))
    assert isinstance(attention, MultiHeadBase)
    heads = min(attention.heads, MAX_HEADS)
    is_mha = attention.num_kv_heads == attention.heads
    kv_heads = heads if is_mha else min(attention.num_kv_heads, MAX_KV_HEADS)
    return attention.replace(
        heads=max(heads, kv_heads),
        kv_heads=None if attention.kv_heads is None else kv_heads,
        d_head=attention.head_dim(old_d_model),
    )


def _shrink_ffn(ffn: Any, old_d_model: int, new_d_model: int) -> Any:
    """Shrink the hidden dimension in proportion to d_model."""
    if isinstance(ffn, Moe):
        shared = None if ffn.shared is None else _shrink_ffn(ffn.shared, old_d_model, new_d_model)
        return ffn.replace(expert=_shrink_ffn(ffn.expert, old_d_model, new_d_model), shared=shared)
    if ffn.hidden is None:
        return ffn
    return ffn.replace(hidden=max(16, ffn.hidden * new_d_model // old_d_model // 8 * 8))
