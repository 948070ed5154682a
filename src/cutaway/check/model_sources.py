"""Where the model to check comes from: `module.path:factory`, a checkpoint opened by transformers, a shrunk config."""

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
"""A model, and keyword arguments of `check` for it."""


FACTORY_RETURNS = "a model, a function tokens → logits, (model, dict of what it offers), or that dict alone"


def is_factory_spec(source: str) -> bool:
    """Whether a source is of this form, and no file."""
    return ":" in source and "://" not in source and not Path(source).exists()


def import_factory(source: str, folder: Path | None = None) -> Any:
    """What `module.path:factory` names. Its module is imported, as Python does from the directory one stands in."""
    named = FACTORY_SPEC.fullmatch(source)
    if named is None or named[1].endswith(".py"):
        raise InputError(
            f"'{source}' is no module.path:factory; write the module as Python imports it, as in models.gpt:make"
        )
    module, name = named.groups()
    here = str(folder or Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        value: Any = import_module(module)
    except Exception as error:  # whatever it is, it is the module's own
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise InputError(
                f"there is no module '{error.name}' in {here} or installed; stand where it can be imported from"
            ) from error
        raise InputError(
            f"the module '{module}' cannot be imported: it {format_raised(error)}; mend it first"
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise InputError(f"'{module}' has no '{name}'; name a function of it that makes the model")
        value = getattr(value, part)
    return value


def build_from_factory(source: str, factory: Any, *, seed: int = 0) -> ModelAndOverrides:
    """What the named function gives, called without arguments and seeded; or the named thing itself, where it is a
    model already."""
    import torch
    from torch import nn

    from cutaway.check.checked_model import CheckedModel

    if not isinstance(factory, nn.Module | CheckedModel | dict | tuple) and callable(factory):
        factory = _call_factory(source, factory, lambda: torch.manual_seed(seed))
    if isinstance(factory, dict):
        return _parse_overrides(source, None, factory)
    if isinstance(factory, tuple):
        if len(factory) != 2 or not isinstance(factory[1], dict):
            kinds = ", ".join(type(each).__name__ for each in factory)
            raise InputError(f"'{source}' gave a tuple of ({kinds}); it should give {FACTORY_RETURNS}")
        return _parse_overrides(source, *factory)
    if factory is None:
        raise InputError(f"'{source}' gave nothing back; it should return {FACTORY_RETURNS}")
    return factory, {}


def _call_factory(source: str, factory: Callable[[], Any], set_seed: Callable[[], object]) -> Any:
    """What a function gives; its own mistakes in one sentence."""
    set_seed()
    try:
        return factory()
    except Exception as error:
        raise InputError(
            f"'{source}' was called without arguments and {format_raised(error)}; it should return {FACTORY_RETURNS}"
        ) from error


def _parse_overrides(source: str, model: Any, overrides: dict[Any, Any]) -> ModelAndOverrides:
    """A dict of overrides, whose names are checked later."""
    strange = [name for name in overrides if not isinstance(name, str)]
    if strange:
        raise InputError(f"'{source}' offers {strange[0]!r}, which is no name; use those of cutaway.check.CheckedModel")
    overrides = dict(overrides)
    model = overrides.pop("module", None) if model is None else model
    if model is None and not {"logits", "attention"} & overrides.keys():
        raise InputError(f"'{source}' gave a dict without a model to ask; it needs logits, attention or module")
    return model, overrides


def load_transformers_model(source: str, *, device: Any = None, dtype: Any = None) -> Any:
    """The model as transformers has it, by the class that its config.json names."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise InputError("--library transformers needs transformers, which is not here; pip install it") from None
    path = resolve_checkpoint_path(source)
    if not (path / "config.json").is_file():
        raise InputError(
            f"'{source}' has no config.json, so transformers does not open it; convert it to hf first: cutaway convert"
        )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):  # its progress bars
            opens = _resolve_model_class(transformers, path)
            model = opens.from_pretrained(path, dtype=dtype or "auto", trust_remote_code=False, use_safetensors=True)
    except Exception as error:  # whatever it is, it is the other library's
        raise InputError(f"transformers does not open '{source}': {format_error(error)}") from None
    return model.to(device).eval() if device is not None else model.eval()


def _resolve_model_class(transformers: Any, path: Path) -> Any:
    """The class that wrote the checkpoint; where it is not known, whatever opens it."""
    named = json.loads((path / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    return next((getattr(transformers, name) for name in named if hasattr(transformers, name)), transformers.AutoModel)


MAX_D_MODEL, MAX_HEADS, MAX_KV_HEADS, MAX_VOCAB_SIZE, MAX_EMBEDDING_FACTOR = 256, 4, 2, 4096, 64
"""Of the smaller model, at most."""


def shrink_config(config: Config) -> Config:
    """Fewer layers (each kind that there is, and two at least), a narrower stream, fewer heads and words. Widths of
    heads, positions, norms, windows and experts stay, for they are what goes wrong."""
    width = min(config.d_model, MAX_D_MODEL)
    changes: dict[str, Any] = {"d_model": width, "vocab_size": min(config.vocab_size, MAX_VOCAB_SIZE)}
    sources = getattr(config, "source_vocab_size", None)
    if sources is not None:
        changes["source_vocab_size"] = min(sources, MAX_VOCAB_SIZE)
    for name, stack in config.stacks.items():
        layers = min(stack.layers, len(stack.leading_blocks) + max(2, len(stack.block)))
        factor = stack.embedding.factorization
        embedding = stack.embedding
        if factor is not None:
            embedding = embedding.replace(factorization=factor.replace(width=min(factor.width, MAX_EMBEDDING_FACTOR)))
        changes[name] = stack.replace(
            layers=layers,
            leading_blocks=tuple(_shrink_block(block, config.d_model, width) for block in stack.leading_blocks),
            block=tuple(_shrink_block(block, config.d_model, width) for block in stack.block),
            embedding=embedding,
            layer_groups=None if stack.layer_groups is None else min(stack.layer_groups, layers),
        )
    return config.replace(**changes)


def _shrink_block(block: Any, old_d_model: int, new_d_model: int) -> Any:
    """A block for a narrower stream."""
    changes = {
        "attention": _shrink_attention(block.attention, old_d_model),
        "ffn": _shrink_ffn(block.ffn, old_d_model, new_d_model),
    }
    if hasattr(block, "cross"):
        changes["cross"] = _shrink_attention(block.cross, old_d_model)
    return block.replace(**changes)


def _shrink_attention(attention: Any, old_d_model: int) -> Any:
    """Fewer heads, each as wide as before, in groups as before: one for all, one for some, or one for each."""
    if isinstance(attention, LatentAttention):
        return attention.replace(heads=min(attention.heads, MAX_HEADS))
    assert isinstance(attention, MultiHeadBase)
    kv = attention.num_kv_heads
    heads = min(attention.heads, MAX_HEADS)
    groups = heads if kv == attention.heads else min(kv, MAX_KV_HEADS)
    return attention.replace(
        heads=max(heads, groups),
        kv_heads=None if attention.kv_heads is None else groups,
        d_head=attention.head_dim(old_d_model),
    )


def _shrink_ffn(ffn: Any, old_d_model: int, new_d_model: int) -> Any:
    """Hidden widths in proportion."""
    if isinstance(ffn, Moe):
        shared = None if ffn.shared is None else _shrink_ffn(ffn.shared, old_d_model, new_d_model)
        return ffn.replace(expert=_shrink_ffn(ffn.expert, old_d_model, new_d_model), shared=shared)
    if ffn.hidden is None:
        return ffn
    return ffn.replace(hidden=max(16, ffn.hidden * new_d_model // old_d_model // 8 * 8))
