"""Sites of modules that are temporarily attached to a model, such as sparse autoencoders (`attach_sae`)."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

if TYPE_CHECKING:
    from cutaway.lens.sites import Site, SiteMap

_SITES: "WeakKeyDictionary[nn.Module, list[Site]]" = WeakKeyDictionary()


def attached_sites(model: nn.Module) -> "list[Site]":
    """Return the sites that are attached to a model."""
    return _SITES.get(model, [])


def add_sites(model: nn.Module, sites: "list[Site]") -> None:
    _SITES[model] = [*attached_sites(model), *sites]


def remove_sites(model: nn.Module, sites: "list[Site]") -> None:
    _SITES[model] = [site for site in attached_sites(model) if all(site is not other for other in sites)]


def with_attached_sites(model: nn.Module, site_map: "SiteMap") -> "SiteMap":
    """Return the sites of a model with the attached ones, each after the site whose name is the prefix of its name."""
    attached = attached_sites(model)
    if not attached:
        return site_map
    merged: list[Site] = []
    for site in site_map.values():
        merged += [site, *(other for other in attached if other.name.startswith(f"{site.name}."))]
    return type(site_map)(merged, site_map.unavailable)
