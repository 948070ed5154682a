"""`attach_sae`: make the features of a sparse autoencoder sites of a model, inside a with-block.

with attach_sae(model, sae), ct.edit(model, {"blocks.2.resid_post.sae.acts": {"do": "zero", "units": [7]}}):
    model(tokens)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.lens.adapters import ModelLike, sites, unwrap_model
from cutaway.lens.attached_sites import add_sites, remove_sites
from cutaway.lens.edit import edit
from cutaway.lens.sae.autoencoder import SparseAutoencoder
from cutaway.lens.sites import Site, select_sites


class _HookPoints(NamedTuple):
    """Modules whose output is a value of the autoencoder, so that hooks can read and change it."""

    acts: nn.Identity
    recons: nn.Identity
    error: nn.Identity


@contextmanager
def attach_sae(
    model: ModelLike, sae: SparseAutoencoder, *, site: str | None = None, include_error: bool = True
) -> Iterator[str]:
    """Context manager: the model has the sites `SITE.sae.acts` (features), `.sae.recons` and `.sae.error`.

    They can be traced and edited. The value at `site` becomes the reconstruction from the features, plus the error of
    the reconstruction. Without an edit, it is unchanged bit for bit. `include_error=False` leaves the error out, so
    that the model runs on the reconstruction alone. The with-block's value is the name of the feature site.

    `site` is by default the one in the autoencoder's configuration. At `attn.z`, the heads are concatenated.
    """
    module, site = unwrap_model(model), site or sae.cfg.site
    if site is None:
        raise InputError("the autoencoder has no site in its configuration; pass site=, such as 'blocks.2.resid_post'")
    matches = select_sites(sites(module), [site])
    if len(matches) > 1:
        raise InputError(f"'{site}' is {len(matches)} sites; pass the name of one, such as {matches[0].name}")
    (parent,) = matches
    if f"{parent.name}.sae.acts" in sites(module):
        raise InputError(f"an autoencoder is attached at {parent.name}; leave its with-block before attaching another")
    points = _HookPoints(nn.Identity(), nn.Identity(), nn.Identity())
    attached = _build_sites(parent, points, sae, include_error=include_error)

    def splice(value: Tensor) -> Tensor:
        return _splice(sae, points, value, include_error=include_error)

    with edit(module, {parent.name: splice}):
        add_sites(module, attached)
        try:
            yield attached[0].name
        finally:
            remove_sites(module, attached)


def _build_sites(parent: Site, points: _HookPoints, sae: SparseAutoencoder, *, include_error: bool) -> list[Site]:
    batch_axes = parent.axes[:2] or "BT"
    sizes = (("F", sae.cfg.d_sae), ("d", sae.cfg.d_in))
    axes = {"acts": f"{batch_axes}F", "recons": f"{batch_axes}d", "error": f"{batch_axes}d"}
    return [
        Site(f"{parent.name}.sae.{name}", axes[name], module, layer=parent.layer, axis_sizes=sizes)
        for name, module in points._asdict().items()
        if include_error or name != "error"
    ]


def _splice(sae: SparseAutoencoder, points: _HookPoints, value: Tensor, *, include_error: bool) -> Tensor:
    """Return the activation with the edits of the autoencoder's values.

    The result is x + (edited reconstruction − reconstruction) + (edited error − error), which is exactly x if nothing
    is edited. Each value passes its hook point as a view: the gradient of the view is that of the edited term alone.
    """
    x = value.flatten(2) if value.ndim > 3 else value  # heads are concatenated
    acts = sae.encode(x)
    edited = points.recons(sae.decode(points.acts(acts.view_as(acts))))
    if not include_error:
        return edited.to(value.dtype).view_as(value)
    recons = sae.decode(acts)
    error = x.to(recons.dtype) - recons
    changed = (edited - recons) + (points.error(error.view_as(error)) - error)
    return (x.to(recons.dtype) + changed).to(value.dtype).view_as(value)
