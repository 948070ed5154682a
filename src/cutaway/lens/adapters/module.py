"""Sites of an arbitrary nn.Module: submodule paths with `.in` and `.out`, the first tensor of each."""

from torch import nn

from cutaway.lens.hook_conversions import HookConversion
from cutaway.lens.sites import Site, SiteKind, SiteMap


def module_sites(model: nn.Module, reason: str) -> SiteMap:
    """Return the input and output of each submodule; `reason` is why named sites are not available."""
    paths = [(path, module) for path, module in model.named_modules() if path]
    kinds: tuple[SiteKind, ...] = ("in", "out")
    return SiteMap(
        (
            Site(f"{path}.{kind}", "", module, kind, conversion=HookConversion())
            for path, module in paths
            for kind in kinds
        ),
        {"*": reason},
    )
