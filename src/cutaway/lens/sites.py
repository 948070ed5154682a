"""Sites (hook points): the named activations of a model.

A site is the input or output of a module; scores and patterns are recomputed from an attention kernel's arguments.

    embed · final_norm · logits
    blocks.{i}. resid_pre · attn.{in, q, k, v, scores, pattern, z, out} · resid_mid · ffn.{in, hidden, out} · resid_post

In an encoder-decoder, names have the prefix `encoder.` or `decoder.`. The decoder's blocks also have `cross.*`, with
the same names as `attn.*`, and `cross.resid_pre`, the residual stream before cross-attention. `*.out` is exactly what
is added to the residual stream. A mixture of experts has `ffn.router`, the routing weights of the selected experts.

Axes: B batch, T query tokens, S key tokens, H query heads, G key-value heads, D query and key head width, E value head
width, d residual stream width (d_model), h FFN width, V vocabulary, N tokens of all batch rows, K selected experts, F
features of a sparse autoencoder.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

from torch import nn

from cutaway.errors import InputError
from cutaway.lens.attached_sites import attached_sites
from cutaway.lens.hook_conversions import HookConversion
from cutaway.model.attention import LatentAttention, MultiHead
from cutaway.model.block import Block, Branch, ParallelBlock
from cutaway.model.stack import Stack

_RESID_NAMES = ("embed", "resid_pre", "resid_mid", "resid_post")
"""Last component of the names of the sites on the residual stream."""
SiteKind = Literal["in", "out", "scores", "pattern"]
"""A module's input, a module's output, or a kernel's attention scores or pattern (recomputed from its arguments)."""
AXIS_NAMES = {
    "T": "tokens", "S": "key positions", "H": "heads", "G": "KV heads", "D": "head dim", "E": "value head dim",
    "d": "d_model", "h": "FFN hidden size", "K": "top-k experts", "V": "vocabulary", "P": "rotary pairs",
    "F": "SAE features",
}  # fmt: skip
"""Descriptions of the axes, as `cutaway trace` and the web page show them; P is an axis of RoPE angles."""


@dataclass(frozen=True)
class Site:
    """A named activation: argument `arg_index` or output of `module`, or scores or pattern of an attention kernel."""

    name: str
    axes: str
    """One letter per axis. Empty for sites that are module paths, whose axes are not known."""
    module: nn.Module
    kind: SiteKind = "out"
    arg_index: int = 0
    layer: int | None = None
    stack: Stack | None = None
    axis_sizes: tuple[tuple[str, int], ...] = ()
    """(axis letter, size) pairs, for the axes whose size the model config fixes."""
    conversion: HookConversion | None = None
    """How to extract the value from the input or output of another library's module."""
    host: nn.Module | None = None
    """Another library's attention module, whose SDPA call `module` replaces (`sdpa_attention.py`)."""

    def shape(self, batch_size: int, seq_len: int, source_len: int | None = None) -> tuple[int, ...]:
        """Shape of the value for a batch. `source_len` is the length of the encoder input, by default `seq_len`."""
        source_len = seq_len if source_len is None else source_len
        length = source_len if self.name.startswith("encoder.") else seq_len
        sizes = {"B": batch_size, "T": length, "N": batch_size * length}
        sizes["S"] = source_len if ".cross." in self.name else length
        sizes |= dict(self.axis_sizes)
        return tuple(sizes[axis] for axis in self.axes)

    @property
    def is_recomputed(self) -> bool:
        """Whether the value is attention scores or a pattern. Both are recomputed from a kernel's arguments."""
        return self.kind in ("scores", "pattern")

    @property
    def token_axis(self) -> int | None:
        """Index of the query token axis T, or of the key token axis S if there is no T, or None."""
        return next((self.axes.index(letter) for letter in "TS" if letter in self.axes), None)

    @property
    def head_axis(self) -> int | None:
        return next((self.axes.index(letter) for letter in "HG" if letter in self.axes), None)

    @property
    def num_heads(self) -> int | None:
        """Size of the head axis, which has query heads or key-value heads. None if there is no head axis."""
        return None if self.head_axis is None else dict(self.axis_sizes)[self.axes[self.head_axis]]


class SiteMap(dict[str, Site]):
    """Sites by name, with the reasons why other sites are not available."""

    def __init__(self, sites: Iterable[Site], unavailable: Mapping[str, str] | None = None) -> None:
        super().__init__((site.name, site) for site in sites)
        self.unavailable = dict(unavailable or {})
        """Site name or glob → reason why this model does not expose the value."""


def check_sites_in_model(model: nn.Module, sites: Iterable[Site]) -> None:
    """Raise if a site's module was replaced after the site was looked up. `use_kernel` replaces modules."""
    modules = set(model.modules()) | {site.module for site in attached_sites(model)}
    missing = next((site.name for site in sites if (site.host or site.module) not in modules), None)
    if missing is not None:
        raise InputError(f"the module of {missing} was replaced in the model; call use_kernel before trace or edit")


Indices = int | slice | Iterable[int]
"""One index, a slice, or several indices; negative indices count from the end."""


def select_sites(sites: Mapping[str, Site], patterns: Iterable[str], layers: Indices | None = None) -> list[Site]:
    """Return the sites that match any of the patterns, without duplicates, in the order of the forward pass.

    With `layers`, sites in other blocks are left out. Raise InputError if a pattern matches no site.
    """
    names: dict[str, None] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InputError(f"a site name must be a string from sites(model), not {pattern!r}")
        matching = [name for name in sites if _matches_pattern(name, pattern)]
        if not matching:
            problem = f"this model has no site '{pattern}'{_unavailable_reason(sites, pattern)}"
            raise InputError(f"{problem}; {_suggest_names(sites, pattern)}")
        names |= dict.fromkeys(matching)
    if not names:
        raise InputError("no site is selected; pass at least one, such as 'resid_post' or 'blocks.0.*'")
    selected = [site for name, site in sites.items() if name in names]
    if layers is None:
        return selected
    depth = 1 + max((site.layer for site in sites.values() if site.layer is not None), default=0)
    indices = materialize_indices(layers, "layers")
    assert indices is not None
    wanted = set() if indices == [] else set(resolve_indices(indices, depth, "layers", "the model's blocks"))
    selected = [site for site in selected if site.layer is None or site.layer in wanted]
    if not selected:
        raise InputError(f"no selected site is in layers {sorted(wanted)}; pass other layers or sites")
    return selected


def _matches_pattern(name: str, pattern: str) -> bool:
    """Whether the pattern matches the full name, or a suffix of it that begins after a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _unavailable_reason(sites: Mapping[str, Site], pattern: str) -> str:
    """Return why a site is not available, as `": reason"`, or an empty string."""
    for name, reason in sites.unavailable.items() if isinstance(sites, SiteMap) else ():
        if _matches_pattern(name, pattern) or fnmatchcase(pattern, name):
            return f": {reason}"
    return ""


def _suggest_names(sites: Mapping[str, Site], pattern: str) -> str:
    """Suggest similar site names for an error message."""
    ends = list(dict.fromkeys(site_suffix(name) for name in sites))
    close = get_close_matches(site_suffix(pattern), ends, 3, 0.5) or ends
    blocks = len({site.layer for site in sites.values() if site.layer is not None})
    depth = f" (it has {blocks} blocks)" if "blocks." in pattern else ""
    more = ", …" if len(close) > 30 else ""  # a module may have thousands of paths
    return f"use one of {', '.join(close[:30])}{more}{depth}"


def site_suffix(name: str) -> str:
    """Return a site's name without the stack and block prefix."""
    parts = name.split(".")
    return ".".join(parts[parts.index("blocks") + 2 :]) or name if "blocks" in parts else name


def materialize_indices(indices: Indices | None, arg_name: str) -> Indices | None:
    """Convert a generator, array or tensor of indices to a list, so that it can be iterated more than once."""
    if indices is None or isinstance(indices, int | slice | range):
        return indices
    if hasattr(indices, "tolist"):  # array or tensor
        return indices.tolist()
    if isinstance(indices, str) or not isinstance(indices, Iterable):
        raise InputError(f"{arg_name} is {indices!r}; pass an index, a list of indices or a slice")
    items: Iterable[Any] = indices  # numbers, or elements of an array
    return [item.item() if getattr(item, "ndim", None) == 0 else item for item in items]


def resolve_heads(site: Site, heads: Indices) -> list[int]:
    """Convert query head indices to distinct indices of the site's head axis. For k and v these are key-value heads."""
    sizes = dict(site.axis_sizes)
    indices = resolve_indices(heads, sizes["H"], "heads", f"the heads of {site.name}")
    return list(dict.fromkeys(indices if "H" in site.axes else [head * sizes["G"] // sizes["H"] for head in indices]))


def resolve_positions(positions: Indices, num_tokens: int) -> list[int]:
    return resolve_indices(positions, num_tokens, "positions", "the tokens of this call")


def resolve_index(index: int, size: int, arg_name: str, axis_name: str) -> int:
    """Return `index`, or `index + size` if it is negative. Raise if it is out of range."""
    return resolve_indices([index], size, arg_name, axis_name)[0]


def resolve_indices(indices: Indices, size: int, arg_name: str, axis_name: str) -> list[int]:
    """Return the selected indices as non-negative integers. Raise if one is out of range or none is selected."""
    if isinstance(indices, slice):
        selected = list(range(size))[indices]
        if not selected:
            raise InputError(f"{arg_name} {indices} selects none of {axis_name}; pass a slice in 0 to {size - 1}")
        return selected
    listed = [indices] if isinstance(indices, int) else list(indices)
    if not listed:
        raise InputError(f"{arg_name} is empty, which selects none of {axis_name}; leave it out to select all")
    for index in listed:
        if isinstance(index, bool) or not isinstance(index, int) or not -size <= index < size:
            raise InputError(
                f"{arg_name} contains {index!r}; {axis_name} are 0 to {size - 1}, or −1, −2, … from the end"
            )
    return [index % size for index in listed]


def is_resid_site(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in _RESID_NAMES


def is_repeated_resid(name: str) -> bool:
    """Whether the site is a block input, which equals the previous block's resid_post (or embed)."""
    return name.endswith(".resid_pre") and not name.endswith(".cross.resid_pre")


def is_sublayer_output(name: str) -> bool:
    return name.endswith(".out")


def resid_before_sublayer(site: Site, stack: Stack | None = None) -> str:
    """Name of the residual stream site that the sublayer of `site` reads and adds its output to.

    `stack` has the structure of the site's blocks; the default is the site's own stack, which other libraries' sites
    do not have.
    """
    stack = site.stack if stack is None else stack
    assert stack is not None
    assert site.layer is not None
    block, sublayer, _ = site.name.rsplit(".", 2)
    if sublayer == "cross":
        return f"{block}.cross.resid_pre"
    is_parallel = isinstance(stack.blocks[site.layer], ParallelBlock)
    return f"{block}.resid_mid" if sublayer == "ffn" and not is_parallel else f"{block}.resid_pre"


def get_blocks(stack: Stack) -> list[Block | ParallelBlock]:
    """Return the blocks of a stack with their types, which nn.ModuleList does not keep."""
    return cast("list[Block | ParallelBlock]", list(stack.blocks))


def attention_module(branch: Branch) -> MultiHead | LatentAttention:
    """Return the attention of a branch with its type, which the branch does not keep."""
    return cast(MultiHead | LatentAttention, branch.f)


def has_additive_residual(stack: Stack) -> bool:
    """Whether blocks only add to the residual stream, and do not normalize or scale it or the sum (post-norm)."""
    for block in get_blocks(stack):
        if isinstance(block, Block):
            norms = (block.norm_after_attn, block.norm_after_cross, block.norm_after_ffn)
            has_norms = not all(isinstance(norm, nn.Identity | None) for norm in norms)
            if block.skip_scale != 1.0 or block.norm_skip or has_norms:
                return False
    return True
