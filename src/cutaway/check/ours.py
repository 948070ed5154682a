"""What a model of cutaway offers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cutaway.check import ours_learning, ours_state
from cutaway.check.ours_writing import add_writing
from cutaway.check.target import Target
from cutaway.config import Config
from cutaway.errors import KernelError
from cutaway.lens.models import unwrapped
from cutaway.model import EncoderDecoder, EncoderOnly, Transformer


def target(model: Any, thing: Any, seed: int) -> Target:
    """A target for one of the three forms."""
    inner = unwrapped(model)
    assert isinstance(inner, Transformer)
    config = inner.config
    found = Target(name=f"cutaway {config.form}", kind=config.form, module=inner, vocab=config.vocab_size)
    found.device, found.dtype = inner.device, inner.dtype
    facts(found, config)
    found.counted = True
    found.source_vocab = getattr(config, "source_vocab_size", None)
    if isinstance(inner, EncoderDecoder):
        of_both(found, inner, seed)
    elif isinstance(inner, EncoderOnly):
        call = inner if inner.head is not None else inner.encode
        found.logits = lambda tokens: call(tokens)
        found.padded = lambda tokens, mask: call(tokens, mask)
        found.placed = lambda tokens, positions: call(tokens, positions=positions)
        found.packed = lambda tokens, documents: call(tokens, documents=documents)
    else:
        found.logits = lambda tokens: model(tokens)
        found.padded = lambda tokens, mask: inner(tokens, mask)
        found.placed = lambda tokens, positions: inner(tokens, positions=positions)
        found.packed = lambda tokens, documents: inner(tokens, documents=documents)
        found.cached = stepper(inner, lambda tokens, cache: inner(tokens, cache=cache))
        add_writing(found, inner, lambda tokens, cache: inner(tokens, cache=cache))
    found.kernels = kernels(inner, found.logits)
    ours_state.offer(found, inner, seed)
    ours_learning.offer(found, inner)
    return found


def facts(found: Target, config: Config) -> None:
    """What the configuration says."""
    stack = config.stacks.get("decoder") or config.stacks["encoder"]
    found.layers = len(stack.blocks)
    windows = {getattr(block.attention, "window", None) for block in stack.blocks}
    found.windows = tuple(sorted(window for window in windows if window is not None))
    found.window = windows.pop() if len(windows) == 1 else None
    lengths = [getattr(each.embedding.position, "length", None) for each in config.stacks.values()]
    lengths += [changes_at(block.attention) for block in stack.blocks]
    known = [length for length in lengths if length is not None]
    found.longest = min(known) if known else None
    added = stack.embedding.position.kind != "none"
    inside = {block.attention.position.kind for block in stack.blocks} - {"none"}
    found.ordered = added or bool(inside)
    found.relative = bool(inside) and not added
    tied = getattr(config.head, "tied", None)
    found.tied = tied


def changes_at(attention: Any) -> int | None:
    """The length from which on a scaling turns all tokens by other angles."""
    scaling = getattr(getattr(attention, "position", None), "scaling", None)
    if scaling is not None and scaling.kind in ("dynamic", "longrope"):
        return int(scaling.original_length)
    return None


def of_both(found: Target, model: EncoderDecoder, seed: int) -> None:
    """An encoder-decoder: a fixed source for questions about the target's tokens."""
    size = model.config.source_vocab_size or model.config.vocab_size  # type: ignore[union-attr]
    draw = torch.randint(size, (1, 9), generator=torch.Generator().manual_seed(seed + 1)).to(model.device)
    rows: Callable[[Tensor], Tensor] = lambda tokens: draw.expand(len(tokens), -1)  # noqa: E731
    found.logits = lambda tokens: model(rows(tokens), tokens)
    found.padded = lambda tokens, mask: model(rows(tokens), tokens, None, mask)
    found.crossed = lambda source, mask, tokens: model(source, tokens, mask)
    step: Any = lambda tokens, cache: model(rows(tokens) if cache.memory is None else None, tokens, cache=cache)  # noqa: E731
    found.cached = stepper(model, step)
    add_writing(found, model, step, draw)


def stepper(model: Transformer, call: Callable[..., Tensor]) -> Callable[[Tensor, Any], tuple[Tensor, Any]]:
    """Steps with a cache that is made at the first."""

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        state = model.new_cache(len(tokens), 512) if state is None else state
        return call(tokens, state), state

    return step


def kernels(model: Transformer, logits: Any) -> dict[str, Any]:
    """Each kernel that can compute this model; flex is left out, for it compiles."""

    @contextmanager
    def switched(name: str) -> Iterator[None]:
        before = [(module, module.kernel) for module in model.modules() if hasattr(module, "make_kernel")]
        try:
            model.use_kernel(name)
            yield
        finally:
            for module, kernel in before:
                module.kernel = kernel

    def able(name: str) -> bool:
        try:
            with switched(name):
                return True
        except KernelError:
            return False

    def by(name: str) -> Callable[[Tensor], Tensor]:
        def run(tokens: Tensor) -> Tensor:
            with switched(name):
                return logits(tokens)

        return run

    return {name: by(name) for name in ("explicit", "sdpa") if able(name)}
