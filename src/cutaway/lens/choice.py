"""Which sites are meant: names, ends of names and globs, in chosen layers."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from cutaway.errors import InputError
from cutaway.lens.sites import Site, Sites

Numbers = int | slice | Iterable[int]
"""One, a range, or several; negative ones count from the end."""


def chosen(known: Mapping[str, Site], patterns: Iterable[str], layers: Numbers | None = None) -> list[Site]:
    """The sites that the patterns name, each once, in the model's order."""
    asked: dict[str, None] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InputError(f"a site's name is text, and {pattern!r} is a {type(pattern).__name__}; see sites(model)")
        matching = [name for name in known if matches(name, pattern)]
        if not matching:
            raise InputError(f"this model has no site '{pattern}'{why_not(known, pattern)}; {nearest(known, pattern)}")
        asked |= dict.fromkeys(matching)
    if not asked:
        raise InputError("no site was named; name one, such as 'resid_post', 'attn.pattern' or 'blocks.0.*'")
    found = [site for name, site in known.items() if name in asked]
    if layers is None:
        return found
    depth = 1 + max((site.layer for site in known.values() if site.layer is not None), default=0)
    asked_layers = settled(layers, "layers")
    wanted = set() if asked_layers == [] else set(numbers(asked_layers, depth, "layers", "the model's blocks"))
    found = [site for site in found if site.layer is None or site.layer in wanted]
    if not found:
        raise InputError(f"none of the sites named is in layers {sorted(wanted)}")
    return found


def matches(name: str, pattern: str) -> bool:
    """The whole name, or its end from some dot on."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def why_not(known: Mapping[str, Site], pattern: str) -> str:
    """The reason why a site cannot be had, if there is one."""
    absent = known.absent.items() if isinstance(known, Sites) else ()
    return next((f": {why}" for name, why in absent if matches(name, pattern) or fnmatchcase(pattern, name)), "")


def nearest(known: Mapping[str, Site], pattern: str) -> str:
    """What may have been meant."""
    ends = list(dict.fromkeys(end(name) for name in known))
    close = get_close_matches(end(pattern), ends, 3, 0.5) or ends
    blocks = len({site.layer for site in known.values() if site.layer is not None})
    beyond = f" (it has {blocks} blocks)" if "blocks." in pattern else ""
    more = ", …" if len(close) > 30 else ""  # (any module's paths may be thousands)
    return f"there is {', '.join(close[:30])}{more}{beyond}"


def end(name: str) -> str:
    """A site's name without the block it is in."""
    parts = name.split(".")
    return ".".join(parts[parts.index("blocks") + 2 :]) or name if "blocks" in parts else name


def settled(asked: Any, what: str) -> Any:
    """As it can be read again and again, whatever it was: a generator, an array."""
    if asked is None or isinstance(asked, int | slice | range):
        return asked
    if isinstance(asked, str) or not (hasattr(asked, "tolist") or isinstance(asked, Iterable)):
        raise InputError(f"{what} is {asked!r}; give a number, several, or a slice")
    listed = asked.tolist() if hasattr(asked, "tolist") else list(asked)
    return listed if isinstance(listed, int) else list(map(plain, listed))


def plain(number: Any) -> Any:
    """An array's number as Python's."""
    return number.item() if hasattr(number, "item") and getattr(number, "ndim", 0) == 0 else number


def some_heads(site: Site, heads: Numbers) -> list[int]:
    """Those meant, each once and as the site counts them: of keys and values, the ones that these heads read."""
    sizes = dict(site.widths)
    found = numbers(heads, sizes["H"], "heads", f"the heads of {site.name}")
    return list(dict.fromkeys(found if "H" in site.axes else [head * sizes["G"] // sizes["H"] for head in found]))


def numbers(asked: Numbers, size: int, what: str, of: str) -> list[int]:
    """Those meant, from 0; refuses what is not there."""
    if isinstance(asked, slice):
        found = list(range(size))[asked]
        if not found:
            raise InputError(f"{what} {asked} leaves nothing of {of}, 0 to {size - 1}")
        return found
    listed = [asked] if isinstance(asked, int) else list(asked)
    if not listed:
        raise InputError(f"{what} is empty, which leaves nothing of {of}, 0 to {size - 1}; leave it out to take all")
    for each in listed:
        if isinstance(each, bool) or not isinstance(each, int) or not -size <= each < size:
            raise InputError(f"{what} holds {each!r}; {of} are 0 to {size - 1}, or −1 from the end")
    return [each % size for each in listed]
