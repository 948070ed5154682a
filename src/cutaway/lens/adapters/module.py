"""Sites of an arbitrary nn.Module: submodule paths with `.in` and `.out`, the first tensor of each."""

from torch import nn

from cutaway.lens.hook_conversions import HookConversion
from cutaway.lens.sites import Site, SiteKind, SiteMap


def module_sites(model: nn.Module, reason: str) -> SiteMap:
    """Return the input and output of each submodule; `reason` is why named sites are not available."""
    sites: list[Site] = []
    kinds: tuple[SiteKind, ...] = ("in", "out")
    for path, module in model.named_modules():
        if path:
            sites += [Site(f"{path}.{kind}", "", module, kind, conversion=HookConversion()) for kind in kinds]
    return SiteMap(sites, {"*": reason})
