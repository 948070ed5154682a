"""The vocabulary of places in a model: each named value is what some module is given or gives back.

    embed · final_norm · logits
    blocks.{i}. resid_pre · attn.{in, q, k, v, scores, pattern, z, out} · resid_mid · ffn.{in, hidden, out} · resid_post

Two stacks are told apart by `encoder.` and `decoder.`, and the decoder's blocks have `cross.*` like `attn.*`, with the
stream before it as `cross.resid_pre`. `*.out` is exactly what is added to the stream. Experts have `ffn.router`, the
weights of those chosen.

Axes: B rows, T tokens, S tokens that are looked at, H heads, G heads of keys and values, D and E their widths, d the
stream's width, h the FFN's, V the vocabulary, N tokens of all rows, K experts chosen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from cutaway.errors import InputError
from cutaway.lens.hook_conversions import HookConversion
from cutaway.model.block import ParallelBlock
from cutaway.model.stack import Stack

RESID_NAMES = ("embed", "resid_pre", "resid_mid", "resid_post")
"""Ends of the names of sites that are the stream itself."""
SiteKind = Literal["in", "out", "scores", "pattern"]


@dataclass(frozen=True)
class Site:
    """A value on its way: what `module` is given (argument `arg_index`) or gives back, or what its attention saw."""

    name: str
    axes: str
    """A letter for each axis."""
    module: nn.Module
    kind: SiteKind = "out"
    arg_index: int = 0
    layer: int | None = None
    stack: Stack | None = None
    axis_sizes: tuple[tuple[str, int], ...] = ()
    """The axes whose sizes the model decides."""
    conversion: HookConversion | None = None
    """Where the value stands in what a module of another library's is given or gives back."""

    def shape(self, batch_size: int, seq_len: int, source_len: int | None = None) -> tuple[int, ...]:
        """For so many rows and tokens, and tokens of a source, if they are as many or not."""
        other = seq_len if source_len is None else source_len
        mine = other if self.name.startswith("encoder.") else seq_len
        sizes = {"B": batch_size, "T": mine, "S": other if ".cross." in self.name else mine, "N": batch_size * mine}
        sizes |= dict(self.axis_sizes)
        return tuple(sizes[axis] for axis in self.axes)

    @property
    def token_axis(self) -> int | None:
        """Where its tokens are: those that look, or, where there are none, those looked at."""
        return next((self.axes.index(letter) for letter in "TS" if letter in self.axes), None)

    @property
    def head_axis(self) -> int | None:
        return next((self.axes.index(letter) for letter in "HG" if letter in self.axes), None)

    @property
    def num_heads(self) -> int | None:
        """How many heads the value has an axis for, those of queries if both."""
        sizes = dict(self.axis_sizes)
        return sizes["H"] if "H" in self.axes else sizes["G"] if "G" in self.axes else None


class SiteMap(dict[str, Site]):
    """Sites by name, with the reasons why others are not there."""

    def __init__(self, sites: Iterable[Site], unavailable: Mapping[str, str] | None = None) -> None:
        super().__init__((site.name, site) for site in sites)
        self.unavailable = dict(unavailable or {})
        """Names, or globs of them → why such a value cannot be had of this model."""


def check_sites_in_model(model: nn.Module, sites: Iterable[Site]) -> None:
    """A model whose kernel was changed has other modules than when its sites were looked up."""
    there = set(model.modules())
    gone = next((site.name for site in sites if site.module not in there), None)
    if gone is not None:
        raise InputError(
            f"{gone} is no longer a part of the model, as after use_kernel; change the kernel first, and then make the "
            "trace or edit"
        )


Indices = int | slice | Iterable[int]
"""One, a range, or several; negative ones count from the end."""


def select_sites(sites: Mapping[str, Site], patterns: Iterable[str], layers: Indices | None = None) -> list[Site]:
    """The sites that the patterns name, each once, in the model's order."""
    asked: dict[str, None] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InputError(f"a site's name is text, and {pattern!r} is a {type(pattern).__name__}; see sites(model)")
        matching = [name for name in sites if _matches_pattern(name, pattern)]
        if not matching:
            raise InputError(
                f"this model has no site '{pattern}'{_unavailable_reason(sites, pattern)}; "
                f"{_suggest_names(sites, pattern)}"
            )
        asked |= dict.fromkeys(matching)
    if not asked:
        raise InputError("no site was named; name one, such as 'resid_post', 'attn.pattern' or 'blocks.0.*'")
    found = [site for name, site in sites.items() if name in asked]
    if layers is None:
        return found
    depth = 1 + max((site.layer for site in sites.values() if site.layer is not None), default=0)
    asked_layers = materialize_indices(layers, "layers")
    wanted = set() if asked_layers == [] else set(resolve_indices(asked_layers, depth, "layers", "the model's blocks"))
    found = [site for site in found if site.layer is None or site.layer in wanted]
    if not found:
        raise InputError(f"none of the sites named is in layers {sorted(wanted)}")
    return found


def _matches_pattern(name: str, pattern: str) -> bool:
    """The whole name, or its end from some dot on."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _unavailable_reason(sites: Mapping[str, Site], pattern: str) -> str:
    """The reason why a site cannot be had, if there is one."""
    absent = sites.unavailable.items() if isinstance(sites, SiteMap) else ()
    return next(
        (f": {why}" for name, why in absent if _matches_pattern(name, pattern) or fnmatchcase(pattern, name)), ""
    )


def _suggest_names(sites: Mapping[str, Site], pattern: str) -> str:
    """What may have been meant."""
    ends = list(dict.fromkeys(site_suffix(name) for name in sites))
    close = get_close_matches(site_suffix(pattern), ends, 3, 0.5) or ends
    blocks = len({site.layer for site in sites.values() if site.layer is not None})
    beyond = f" (it has {blocks} blocks)" if "blocks." in pattern else ""
    more = ", …" if len(close) > 30 else ""  # (any module's paths may be thousands)
    return f"there is {', '.join(close[:30])}{more}{beyond}"


def site_suffix(name: str) -> str:
    """A site's name without the block it is in."""
    parts = name.split(".")
    return ".".join(parts[parts.index("blocks") + 2 :]) or name if "blocks" in parts else name


def materialize_indices(indices: Any, arg_name: str) -> Any:
    """As it can be read again and again, whatever it was: a generator, an array."""
    if indices is None or isinstance(indices, int | slice | range):
        return indices
    if isinstance(indices, str) or not (hasattr(indices, "tolist") or isinstance(indices, Iterable)):
        raise InputError(f"{arg_name} is {indices!r}; give a number, several, or a slice")
    listed = indices.tolist() if hasattr(indices, "tolist") else list(indices)
    return listed if isinstance(listed, int) else list(map(_to_python_int, listed))


def _to_python_int(number: Any) -> Any:
    """An array's number as Python's."""
    return number.item() if hasattr(number, "item") and getattr(number, "ndim", 0) == 0 else number


def resolve_heads(site: Site, heads: Indices) -> list[int]:
    """Those meant, each once and as the site counts them: of keys and values, the ones that these heads read."""
    sizes = dict(site.axis_sizes)
    found = resolve_indices(heads, sizes["H"], "heads", f"the heads of {site.name}")
    return list(dict.fromkeys(found if "H" in site.axes else [head * sizes["G"] // sizes["H"] for head in found]))


def resolve_indices(indices: Indices, size: int, arg_name: str, axis_name: str) -> list[int]:
    """Those meant, from 0; refuses what is not there."""
    if isinstance(indices, slice):
        found = list(range(size))[indices]
        if not found:
            raise InputError(f"{arg_name} {indices} leaves nothing of {axis_name}, 0 to {size - 1}")
        return found
    listed = [indices] if isinstance(indices, int) else list(indices)
    if not listed:
        raise InputError(
            f"{arg_name} is empty, which leaves nothing of {axis_name}, 0 to {size - 1}; leave it out to take all"
        )
    for each in listed:
        if isinstance(each, bool) or not isinstance(each, int) or not -size <= each < size:
            raise InputError(f"{arg_name} holds {each!r}; {axis_name} are 0 to {size - 1}, or −1 from the end")
    return [each % size for each in listed]


def is_resid_site(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in RESID_NAMES


def is_repeated_resid(name: str) -> bool:
    """What a block is given is what the one before it gave."""
    return name.endswith(".resid_pre") and not name.endswith(".cross.resid_pre")


def is_sublayer_output(name: str) -> bool:
    return name.endswith(".out")


def resid_before_sublayer(site: Site) -> str:
    """The stream that a sublayer reads, and that its result is added to."""
    assert site.stack is not None
    assert site.layer is not None
    here, part, _ = site.name.rsplit(".", 2)
    if part == "cross":
        return f"{here}.cross.resid_pre"
    in_turn = not isinstance(site.stack.blocks[site.layer], ParallelBlock)
    return f"{here}.resid_mid" if part == "ffn" and in_turn else f"{here}.resid_pre"


def has_additive_residual(block: Any) -> bool:
    """Whether a block does nothing to the stream but add to it."""
    after = [getattr(block, name, None) for name in ("norm_after_attn", "norm_after_cross", "norm_after_ffn")]
    return getattr(block, "skip_scale", 1.0) == 1.0 and all(isinstance(norm, nn.Identity | None) for norm in after)
