"""What a model of transformers offers about its attention: kernels, windows, and whether only distances count."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from typing import Any

from torch import Tensor

from cutaway.check.described import config_in, own_layers
from cutaway.check.plain import logits_of
from cutaway.check.target import Logits, Target

KERNELS = ("eager", "sdpa")
SMALL = 10**8
"""Weights of a model that is made anew."""


def offer(found: Target, model: Any) -> None:
    """Add what its configuration says, where the family is known, and the kernels that it takes."""
    config = config_in(model)
    if config is not None:
        stack = config.stacks.get("decoder") or config.stacks["encoder"]
        layers = own_layers(config)
        inside = {layer.position.kind for layer in layers} - {"none"}
        added = stack.embedding.position.kind != "none"
        found.ordered = added or bool(inside)
        found.relative = bool(inside) and not added
        windows = {layer.window for layer in layers}
        found.windows = tuple(sorted(window for window in windows if window is not None))
        found.window = windows.pop() if len(windows) == 1 else None
    if found.logits is not None:
        found.kernels = kernels(model, found.logits)


def kernels(model: Any, logits: Logits) -> dict[str, Logits]:
    """The logits by each kernel that the model takes; there is nothing to compare where it takes one only."""

    @contextmanager
    def switched(name: str) -> Iterator[None]:
        before = model.config._attn_implementation
        try:
            model.set_attn_implementation(name)
            yield
        finally:
            model.set_attn_implementation(before)

    def able(name: str) -> bool:
        try:
            with switched(name):
                return bool(model.config._attn_implementation == name)
        except Exception:  # however it refuses, that is no kernel of its
            return False

    def by(name: str) -> Callable[[Tensor], Tensor]:
        def run(tokens: Tensor) -> Tensor:
            with switched(name):
                return logits(tokens)

        return run

    if getattr(model.config, "_attn_implementation", None) not in KERNELS:
        return {}
    if not model._can_set_attn_implementation():
        return remade(model)
    found: dict[str, Logits] = {name: by(name) for name in KERNELS if able(name)}
    return found if len(found) > 1 else {}


def remade(model: Any) -> dict[str, Logits]:
    """The same for a small model that chooses its kernel when it is made: it is made anew around the same weights."""
    small = sum(each.numel() for each in model.parameters()) <= SMALL
    if not small or not getattr(model, "_supports_sdpa", False) or model.config.is_encoder_decoder:
        return {}

    def by(name: str) -> Logits:
        def run(tokens: Tensor) -> Tensor:
            with import_module("transformers.initialization").no_init_weights(), model.device:
                other = type(model)._from_config(deepcopy(model.config), attn_implementation=name)
            other.load_state_dict(model.state_dict(), assign=True)
            for path, part in other.named_modules():
                part._buffers = model.get_submodule(path)._buffers
            return logits_of(other.eval()(input_ids=tokens, use_cache=False))

        return run

    return {name: by(name) for name in KERNELS}
