"""One token's way through a model: every named stage, its shape and the length of the token's vector there."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cutaway.model import DecoderOnly, EncoderDecoder, EncoderOnly, Transformer
from cutaway.model.attention import CrossAttention, Latent, MultiHead
from cutaway.model.block import Block
from cutaway.model.stack import Stack


@dataclass(frozen=True)
class Stage:
    """A value on the way, by its site name."""

    site: str
    equation: str
    axes: str
    shape: tuple[int, ...]
    norm: float
    """Length of the followed token's vector (of all its heads together)."""


@dataclass(frozen=True)
class Journey:
    """Where the token went, what came out, and the proof that nothing was left out."""

    stages: tuple[Stage, ...]
    top: tuple[tuple[int, float], ...]
    """The five likeliest tokens and their probabilities, over the whole vocabulary."""
    sum_error: float | None
    """Largest difference between embedding + Σ additions and the final stream; None where norms stand on the stream."""
    row_error: float | None
    """Largest difference between a row of attention's pattern and 1; None where a sink takes a share."""


@torch.no_grad()
def follow(model: Transformer, tokens: Tensor, source: Tensor | None = None) -> Journey:
    """Run the model on one text and follow its last token."""
    stack = model.stacks.get("decoder") or model.stacks["encoder"]
    watch = Watch()
    kernels = {module: module.kernel for module in stack.modules() if isinstance(module, MultiHead | Latent)}
    try:
        for module in kernels:
            module.kernel = module.make_kernel("explicit")
        watch.stack(stack)
        logits = run(model, tokens, source)
    finally:
        watch.stop()
        for module, kernel in kernels.items():
            module.kernel = kernel
    if isinstance(model, EncoderOnly) and model.head is None:
        return Journey(tuple(watch.stages), (), watch.sum_error(), watch.row_error)
    watch.stages.append(Stage("logits", "E·x", "T V", tuple(logits.shape[1:]), float(logits[0, -1].norm())))
    likely = logits[0, -1].float().softmax(-1).topk(min(5, logits.shape[-1]))
    top = tuple(zip(likely.indices.tolist(), likely.values.tolist(), strict=True))
    return Journey(tuple(watch.stages), top, watch.sum_error(), watch.row_error)


def run(model: Transformer, tokens: Tensor, source: Tensor | None) -> Tensor:
    if isinstance(model, EncoderDecoder):
        return model(tokens if source is None else source, tokens)
    if isinstance(model, EncoderOnly) and model.head is None:
        return model.encode(tokens)
    assert isinstance(model, DecoderOnly | EncoderOnly)
    return model(tokens)


class Watch:
    """Hooks on a stack that note each named value as it passes."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.handles: list[RemovableHandle] = []
        self.added: Tensor | None = None
        self.final: Tensor | None = None
        self.row_error: float | None = 0.0
        self.plain = True

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()

    def sum_error(self) -> float | None:
        if self.added is None or self.final is None or not self.plain:
            return None
        return float((self.added - self.final).abs().max())

    def note(self, site: str, equation: str, axes: str, value: Tensor) -> None:
        value = value[0]
        last = value[:, -1] if axes.startswith("H") else value[-1]
        self.stages.append(Stage(site, equation, axes, tuple(value.shape), float(last.float().norm())))

    def addition(self, site: str, equation: str, value: Tensor) -> None:
        self.note(site, equation, "T d", value)
        self.added = value if self.added is None else self.added + value

    def after(self, module: nn.Module, act: Any) -> None:
        self.handles.append(module.register_forward_hook(lambda m, given, out: void(act(given, out))))

    def before(self, module: nn.Module, act: Any) -> None:
        self.handles.append(module.register_forward_pre_hook(lambda m, given: void(act(given))))

    def stack(self, stack: Stack) -> None:
        plus = "" if stack.embed.position is None else " + position"
        self.after(stack.embed, lambda given, out: self.addition("embed", f"E[token]{plus}", out))
        for site, block in named_blocks(stack):
            self.plain = self.plain and not (isinstance(block, Block) and not isinstance(block.after_ffn, nn.Identity))
            self.attention(f"{site}.attn", block.attn)
            if getattr(block, "cross", None) is not None:
                self.attention(f"{site}.cross", block.cross)
            if isinstance(block, Block):
                self.before(block.ffn, lambda given, site=site: self.note(f"{site}.resid_mid", "x", "T d", given[0]))
            self.ffn(f"{site}.ffn", block.ffn)
            self.after(block, lambda given, out, site=site: self.note(f"{site}.resid_post", "x", "T d", out))
        self.before(stack.final_norm, lambda given: setattr(self, "final", given[0]))
        self.after(stack.final_norm, lambda given, out: self.note("final_norm", "norm(x)", "T d", out))

    def attention(self, site: str, branch: Any) -> None:
        heads = branch.f
        if isinstance(heads, CrossAttention) or heads.sink is None:
            self.after(heads.kernel.softmax, lambda given, out: self.rows(out))
        else:
            self.row_error = None
        self.before(heads, lambda given: self.note(f"{site}.in", "norm(x)", "T d", given[0]))
        self.before(heads.kernel, lambda given: self.queries(site, given))
        self.before(
            heads.kernel.softmax,
            lambda given: self.note(f"{site}.scores", "q·kᵀ·scale + mask", "H T S", given[0].nan_to_num(neginf=0.0)),
        )
        self.after(
            heads.kernel.softmax, lambda given, out: self.note(f"{site}.pattern", "softmax(scores)", "H T S", out)
        )
        self.after(heads.kernel, lambda given, out: self.note(f"{site}.z", "pattern·v", "T H D", out))
        self.after(branch, lambda given, out: self.addition(f"{site}.out", "Wo·z, added to x", out))

    def queries(self, site: str, given: tuple[Tensor, ...]) -> None:
        for name, value in zip("qkv", given[:3], strict=True):
            self.note(f"{site}.{name}", f"W{name}·in", "T H D" if name == "q" else "S G D", value)

    def rows(self, pattern: Tensor) -> None:
        if self.row_error is not None:
            self.row_error = max(self.row_error, float((pattern.sum(-1) - 1).abs().max()))

    def ffn(self, site: str, branch: Any) -> None:
        self.before(branch.f, lambda given: self.note(f"{site}.in", "norm(x)", "T d", given[0]))
        if hasattr(branch.f, "down"):
            self.before(branch.f.down, lambda given: self.note(f"{site}.hidden", "act(W1·in)", "T h", given[0]))
        self.after(branch, lambda given, out: self.addition(f"{site}.out", "W2·hidden, added to x", out))


def void(_: Any) -> None:
    """A hook that returns something would replace the value it watches."""


def named_blocks(stack: Stack) -> Iterator[tuple[str, Any]]:
    """Each distinct block by the name of the first layer that uses it."""
    seen: set[int] = set()
    for layer, block in enumerate(stack.blocks):
        if id(block) not in seen:
            seen.add(id(block))
            yield f"blocks.{layer}", block
