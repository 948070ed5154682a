"""What a model of transformers offers about its attention: kernels, windows, and whether only distances count."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from typing import Any

from torch import Tensor

from cutaway.check.again import standing_in
from cutaway.check.described import config_in, own_layers
from cutaway.check.target import Logits, Target

KERNELS = ("eager", "sdpa")
FEW = 50_000_000
"""Parameters up to which a model that cannot change its kernel is made a second time."""


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
    found: dict[str, Logits] = {name: by(name) for name in KERNELS if able(name)}
    if len(found) == 1:
        (other,) = set(KERNELS) - found.keys()
        found |= made_for(model, other, logits)
    return found if len(found) > 1 else {}


def made_for(model: Any, name: str, logits: Logits) -> dict[str, Logits]:
    """A second model of the same weights whose layers were made for another kernel (Falcon has a class for each)."""

    def twin() -> Any:
        config = deepcopy(model.config)
        config._attn_implementation = name
        with import_module("transformers.initialization").no_init_weights(), model.device:
            other = type(model)(config).eval()
        other.load_state_dict(model.state_dict(), assign=True)
        for part, mine in zip(other.modules(), model.modules(), strict=True):
            part._buffers.update(mine._buffers)
        return other

    def run(tokens: Tensor) -> Tensor:
        with standing_in(model, twin()):
            return logits(tokens)

    if not (name == "eager" or getattr(model, "_supports_sdpa", False)):
        return {}
    if sum(each.numel() for each in model.parameters()) > FEW:
        return {}
    try:
        able = twin().config._attn_implementation == name
    except Exception:  # however it refuses, that is no kernel of its
        return {}
    return {name: run} if able else {}
