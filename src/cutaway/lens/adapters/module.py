"""Sites of an arbitrary nn.Module.

The site `path.in` is the first tensor in the input of the submodule at `path`, and `path.out` is the first
tensor in its output.
"""

from torch import nn

from cutaway.lens.hook_conversions import HookConversion
from cutaway.lens.sites import Site, SiteKind, SiteMap


def module_sites(model: nn.Module, reason: str) -> SiteMap:
    """Return a site for the input and the output of each submodule. `reason` says why there are no other sites."""
    sites: list[Site] = []
    kinds: tuple[SiteKind, ...] = ("in", "out")
    for path, module in model.named_modules():
        if path:
            sites += [Site(f"{path}.{kind}", "", module, kind, conversion=HookConversion()) for kind in kinds]
    return SiteMap(sites, {"*": reason})
