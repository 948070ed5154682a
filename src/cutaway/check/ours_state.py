"""How a model of cutaway is saved, filled from shapes, and made with other settings."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cutaway.check.again import SMALL, Again
from cutaway.check.settings import WIDE, another, fits, healthy, times
from cutaway.check.target import Logits, Target
from cutaway.config import config as read_config
from cutaway.config import to_dict
from cutaway.errors import ConfigError
from cutaway.families.fill import put
from cutaway.families.load import load
from cutaway.families.save import save
from cutaway.model import Transformer, build
from cutaway.model.constants import Constants


def offer(found: Target, model: Transformer, seed: int) -> None:
    """Add to a target what concerns its state."""
    found.reloaded = lambda: reloaded(model)
    found.from_shapes = lambda: from_shapes(model)
    found.variants = lambda: variants(model, seed)


def reloaded(model: Transformer) -> Again:
    """Saved for the first family that can describe it (or as cutaway's own), and loaded."""
    with tempfile.TemporaryDirectory(prefix="cutaway-check-") as directory:
        path = Path(directory) / "model"
        try:
            save(model, path)
        except ConfigError:  # no published family has this model
            save(model, path, family="cutaway")
        back = load(path, device=model.device, dtype=model.dtype)
        for each in back.model.parameters():  # the files they are mapped from go
            each.data = each.data.clone()
    assert back.report is not None
    return Again(back.model, back.report.missing, back.report.unexpected)


def from_shapes(model: Transformer) -> nn.Module:
    """Made on the meta device, given memory, and filled."""
    made = build(model.config, device="meta", dtype=model.dtype)
    made.to_empty(device=model.device)
    made.load_weights({name: tensor.detach() for name, tensor in model.state_dict().items()})
    return made.eval()


def variants(model: Transformer, seed: int) -> Mapping[str, Callable[[], Logits]]:
    """For each setting that is known to act: the model with another value. Small models have weights that keep every
    part alive, whatever their own are."""
    small = sum(each.numel() for each in model.parameters()) <= SMALL
    state = healthy(model, seed) if small else {name: each.detach() for name, each in model.state_dict().items()}
    plain = to_dict(model.config)
    written = model.config.model_dump(mode="json")
    made: dict[str, Callable[[], Logits]] = {"": partial(with_settings, model, plain, state, seed)}
    for path, value in changes(written, (), model.config.d_model):
        data = deepcopy(written)
        inside: Any = data
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value
        made[".".join(map(str, path))] = partial(with_settings, model, data, state, seed)
    return made


def with_settings(model: Transformer, data: dict[str, Any], state: Mapping[str, Tensor], seed: int) -> Logits:
    """The logits of a model with these settings and weights."""
    from cutaway.check import ours

    other = build(read_config(data), device="meta", dtype=model.dtype)
    fits(other, state)
    for name, tensor in state.items():
        put(other, name, tensor)
    for part in other.modules():
        if isinstance(part, Constants):
            part.fill(model.device)
    logits = ours.target(other.eval(), other, seed).logits
    assert logits is not None
    return logits


def changes(part: Any, path: tuple[Any, ...], d_model: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The paths of settings, each with another value."""
    hidden = unseen(part, d_model) if isinstance(part, dict) else ()
    for key, value in enumerate(part) if isinstance(part, list) else part.items():
        if key in hidden:
            continue
        if isinstance(value, dict | list):
            yield from changes(value, (*path, key), d_model)
        elif isinstance(part, dict) and (other := instead(part, str(key), value)) is not None:
            yield (*path, key), other


def unseen(part: dict[str, Any], d_model: int) -> tuple[str, ...]:
    """Keys whose settings need not be seen: scores where a token sees only itself, angles where few dimensions turn."""
    if part.get("window") == 1:
        return "position", "scale", "softcap", "qk_norm"
    if "heads" in part and (part.get("d_rope") or part.get("d_head") or d_model // part["heads"]) <= 4:
        return ("position",)
    return "init", "scaling"


def instead(part: dict[str, Any], key: str, value: Any) -> Any:
    """Another value for a setting that must then be seen; none where it need not be."""
    kind = part.get("kind")
    if kind in ("multi-head", "cross") or "kv_rank" in part:
        width = part.get("d_head") or part.get("d_rope")
        return {
            "scale": 0.7 if value is None else value * 2,
            "softcap": another(value, 0.5, 1.0),
            "clip": another(value, 0.1, 0.2),
            "window": another(value, 2, 3),
        }.get(key) if width != 1 and key in part else None  # fmt: skip
    if kind == "rope":
        narrow = part["width"] is not None and part["width"] <= 4
        wanted = {"theta": times(value, 0.01), "layout": another(value, "half", "interleaved")}
        return None if narrow or part["scaling"]["kind"] != "none" else wanted.get(key)
    if kind == "alibi":
        return times(value, 0.3) if key in ("max_bias", "scale") else None
    if kind == "sinusoidal" and part["table"] is None:
        return {"base": times(value, 0.01), "layout": another(value, "interleaved", "halves")}.get(key)
    if kind == "lm":
        return {"scale": times(value, 2), "softcap": another(value, 0.5, 1.0)}.get(key)
    if "top_k" in part:
        return times(value, 2) if key == "scale" else None
    return {
        "eps": WIDE if value != WIDE else 1.0,
        "activation": another(value, "tanh", "relu"),
        "residual_scale": times(value, 3),
        "stream_scale": times(value, 3),
        "unit_offset": not value,
        "limit": 0.1,
        "alpha": times(value, 3),
    }.get(key)
