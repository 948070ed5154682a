"""The vocabulary of places in a model: each named value is what some module is given or gives back.

    embed · final_norm · logits
    blocks.{i}. resid_pre · attn.{in, q, k, v, scores, pattern, z, out} · resid_mid · ffn.{in, hidden, out} · resid_post

Two stacks are told apart by `encoder.` and `decoder.`, and the decoder's blocks have `cross.*` like `attn.*`, with the
stream before it as `cross.resid_pre`. `*.out` is exactly what is added to the stream. Experts have `ffn.router`, the
weights of those chosen.

Axes: B rows, T tokens, S tokens that are looked at, H heads, G heads of keys and values, D and E their widths, d the
stream's width, h the FFN's, V the vocabulary, N tokens of all rows, K experts chosen.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from cutaway.errors import InputError
from cutaway.lens.parts import Part
from cutaway.model import Transformer
from cutaway.model.attention import Latent
from cutaway.model.block import Block
from cutaway.model.stack import Stack

Side = Literal["in", "out", "scores", "pattern"]


@dataclass(frozen=True)
class Site:
    """A value on its way: what `module` is given (its argument `index`) or gives back, or what its attention saw."""

    name: str
    axes: str
    """A letter for each axis."""
    module: nn.Module
    side: Side = "out"
    index: int = 0
    layer: int | None = None
    stack: Stack | None = None
    widths: tuple[tuple[str, int], ...] = ()
    """The axes whose sizes the model decides."""
    part: Part | None = None
    """Where the value stands in what a module of another library's is given or gives back."""

    def shape(self, batch: int, length: int, source: int | None = None) -> tuple[int, ...]:
        """For so many rows and tokens, and tokens of a source, if they are as many or not."""
        other = length if source is None else source
        mine = other if self.name.startswith("encoder.") else length
        sizes = {"B": batch, "T": mine, "S": other if ".cross." in self.name else mine, "N": batch * mine}
        sizes |= dict(self.widths)
        return tuple(sizes[axis] for axis in self.axes)

    @property
    def token_axis(self) -> int | None:
        """Where its tokens are: those that look, or, where there are none, those looked at."""
        return next((self.axes.index(letter) for letter in "TS" if letter in self.axes), None)

    @property
    def head_axis(self) -> int | None:
        return next((self.axes.index(letter) for letter in "HG" if letter in self.axes), None)

    @property
    def heads(self) -> int | None:
        """How many heads the value has an axis for, those of queries if both."""
        sizes = dict(self.widths)
        return sizes["H"] if "H" in self.axes else sizes["G"] if "G" in self.axes else None


class Sites(dict[str, Site]):
    """Sites by name, with the reasons why others are not there."""

    def __init__(self, found: Iterable[Site], absent: Mapping[str, str] | None = None) -> None:
        super().__init__((site.name, site) for site in found)
        self.absent = dict(absent or {})
        """Names, or globs of them → why such a value cannot be had of this model."""


def sites(model: nn.Module) -> Sites:
    """Every site of a model by name, in the order in which values come to them.

    A model of transformers has the sites that its family's table finds in it; any other module has the paths of its
    parts, with `.in` and `.out`.
    """
    if isinstance(model, Transformer):
        return of_ours(model)
    from cutaway.lens.foreign import of_theirs  # (it needs the families' tables, which most traces do not)

    return of_theirs(model)


def of_ours(model: Transformer) -> Sites:
    stacks = model.stacks
    found: list[Site] = []
    for name, stack in stacks.items():
        found += of_stack(stack, f"{name}." if len(stacks) > 1 else "", model.config.d_model)
    head: Any = getattr(model, "head", None)
    if head is not None:
        found.append(Site("logits", "BTV", head, widths=(("V", head.matrix.weight.shape[0]),)))
    return Sites(found)


def of_stack(stack: Stack, prefix: str, d_model: int) -> Iterator[Site]:
    stream: Any = {"axes": "BTd", "widths": (("d", d_model),), "stack": stack}
    yield Site(f"{prefix}embed", module=stack.embed, **stream)
    block: Any
    for layer, block in enumerate(stack.blocks):
        here = f"{prefix}blocks.{layer}"
        at: Any = {**stream, "layer": layer}
        yield Site(f"{here}.resid_pre", module=block, side="in", **at)
        yield from of_attention(f"{here}.attn", block.attn, at)
        if getattr(block, "cross", None) is not None:
            yield Site(f"{here}.cross.resid_pre", module=block.after_attn, **at)
            yield from of_attention(f"{here}.cross", block.cross, at)
        if isinstance(block, Block):  # where the stream itself can be changed, not only what the FFN reads of it
            yield Site(f"{here}.resid_mid", module=block.after_cross or block.after_attn, **at)
        yield from of_ffn(f"{here}.ffn", block.ffn, at)
        yield Site(f"{here}.resid_post", module=block, **at)
    yield Site(f"{prefix}final_norm", module=stack.final_norm, **stream)


def of_attention(name: str, branch: Any, at: dict[str, Any]) -> Iterator[Site]:
    f, kernel = branch.f, branch.f.kernel
    latent = isinstance(f, Latent)
    d_head = f.d_nope + f.d_rope if latent else f.d_head
    groups, value = (f.heads, f.d_value) if latent else (f.kv_heads, f.d_head)
    of_heads: Any = at | {"widths": (("H", f.heads), ("G", groups), ("D", d_head), ("E", value)), "module": kernel}
    yield Site(f"{name}.in", module=f, side="in", **at)
    for index, (letter, axes) in enumerate((("q", "BTHD"), ("k", "BSGD"), ("v", "BSGE"))):
        yield Site(f"{name}.{letter}", side="in", index=index, **of_heads | {"axes": axes})
    yield Site(f"{name}.scores", side="scores", **of_heads | {"axes": "BHTS"})
    yield Site(f"{name}.pattern", side="pattern", **of_heads | {"axes": "BHTS"})
    yield Site(f"{name}.z", **of_heads | {"axes": "BTHE"})
    yield Site(f"{name}.out", module=branch, **at)


def of_ffn(name: str, branch: Any, at: dict[str, Any]) -> Iterator[Site]:
    f = branch.f
    yield Site(f"{name}.in", module=f, side="in", **at)
    router, shared = getattr(f, "router", None), getattr(f, "shared", None)
    if router is not None:
        yield Site(f"{name}.router", module=router, **at | {"axes": "NK", "widths": (("K", router.top_k),)})
    for where, dense in ((f"{name}.shared", shared), (name, None if router is not None else f)):
        if dense is not None:
            width = dense.down.weight.shape[-1]
            hidden: Any = at | {"axes": "BTh", "widths": (("h", width),)}
            yield Site(f"{where}.hidden", module=dense.down, side="in", **hidden)
    yield Site(f"{name}.out", module=branch, **at)


def refuse_if_gone(model: nn.Module, found: Iterable[Site]) -> None:
    """A model whose kernel was changed has other modules than when its sites were looked up."""
    there = set(model.modules())
    gone = next((site.name for site in found if site.module not in there), None)
    if gone is not None:
        raise InputError(
            f"{gone} is no longer a part of the model, as after use_kernel; change the kernel first, and then make the "
            "trace or edit"
        )
