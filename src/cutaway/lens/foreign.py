"""Sites in models that are not ours.

A family's table says which of their weights is which of ours, and so which of their modules does what which of ours
does: our `attn.z` is what the module is given that holds our `attn.f.o`. Values that no module there is given or gives
back (rotated queries, scores) cannot be had, and the reason is kept. In training, `*.out` and `pattern` are what
dropout is given there, for it stands in other places.

Any other module has the paths of its parts, with `.in` and `.out`: the first tensor of each.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from cutaway.errors import ConfigError
from cutaway.families import families
from cutaway.families.family import Family
from cutaway.lens.counterparts import Counterparts
from cutaway.lens.parts import Heads, Logits, Part, Scaled, Weights
from cutaway.lens.sites import Site, Sites, of_ours
from cutaway.model import build
from cutaway.model.attention import Latent

Spot = tuple[nn.Module | None, bool, Part]
"""A module of theirs, whether the value is what it is given, and where it stands there."""


class UnseenError(Exception):
    """Why a value cannot be had."""


NO_MODULE = "the table of its family knows no module there that is given it or gives it back"


def of_theirs(model: nn.Module) -> Sites:
    """By the names of ours where a family's table knows the model, else by module path."""
    family, theirs = family_of(model)
    if family is None:
        return by_path(model, "no family of cutaway's knows this model, so its sites are the paths of its modules")
    try:
        config = family.read(theirs, head=has_head(family, model), pooler=False)[0]
    except ConfigError as error:
        return by_path(model, f"its sites are the paths of its modules, for its config is not one cutaway has: {error}")
    ours = build(config, device="meta")
    known = Counterparts(family, ours, model)
    found, absent = [], {}
    for site in of_ours(ours).values():
        try:
            module, entering, part = spot(site, known)
            if module is None:
                raise UnseenError(NO_MODULE)
        except UnseenError as why:
            absent[site.name] = str(why)
        else:
            found.append(replace(site, module=module, side="in" if entering else "out", index=0, stack=None, part=part))
    if not any(site.layer is not None for site in found):
        return by_path(
            model, "its modules are not where its family has them, so its sites are the paths of its modules"
        )
    return Sites(found, absent)


def by_path(model: nn.Module, why: str) -> Sites:
    """What each module inside is given and gives back."""
    paths = [(path, module) for path, module in model.named_modules() if path]
    sides: tuple[Any, ...] = ("in", "out")
    return Sites(
        (Site(f"{path}.{side}", "", module, side, part=Part()) for path, module in paths for side in sides), {"*": why}
    )


def family_of(model: nn.Module) -> tuple[Family | None, dict[str, Any]]:
    """The family that a model's own configuration names, and what that configuration says."""
    written = getattr(getattr(model, "config", None), "to_json_string", None)
    if written is None:
        return None, {}
    theirs = json.loads(written(use_diff=False))
    return families().get(theirs.get("model_type")), theirs


def has_head(family: Family, model: nn.Module) -> bool | None:
    """Whether an encoder has the head that predicts tokens; the other forms always do."""
    if family.template["form"] != "encoder":
        return None
    paths = {path for path, _ in model.named_modules()}
    return any(row.targets == ("head.matrix",) and row.theirs in paths for row in family.rows)


def spot(site: Site, known: Counterparts) -> Spot:
    """Where the value of this site of ours is in theirs."""
    model, name = known.ours, site.name
    if name == "logits":
        if known.path_of("head.matrix") is None:
            raise UnseenError("it has no head that predicts tokens")
        return known.theirs, False, Logits()
    stack = name.split(".")[0] if len(model.stacks) > 1 else next(iter(model.stacks))
    end = name.removeprefix(f"{stack}.")
    if site.layer is None:
        return of_ends(end, stack, known)
    at = f"{stack}.blocks.{site.layer}"
    if known.shared(at):
        raise UnseenError("its layers share their modules, and cannot be told apart from outside")
    end = end.removeprefix(f"blocks.{site.layer}.")
    if end in ("resid_pre", "resid_post"):
        return known.caller(at), end == "resid_pre", Part()
    if end == "resid_mid":
        return before(f"{at}.ffn", known), True, Part()
    sublayer, _, value = end.partition(".")
    if value == "resid_pre":
        return before(f"{at}.{sublayer}", known), True, Part()
    branch = model.get_submodule(f"{at}.{sublayer}")
    of_sublayer: Callable[..., Spot] = of_ffn if sublayer == "ffn" else of_attention
    return of_sublayer(value, f"{at}.{sublayer}", branch, known)


def of_ends(end: str, stack: str, known: Counterparts) -> Spot:
    """The stream where the blocks begin and end, and after the last norm."""
    blocks = known.ours.stacks[stack].blocks
    if end == "embed":
        first = f"{stack}.blocks.0"
        return None if known.shared(first) else known.caller(first), True, Part()
    last = f"{stack}.blocks.{len(blocks) - 1}"
    if isinstance(known.ours.stacks[stack].final_norm, nn.Identity):
        return None if known.shared(last) else known.caller(last), False, Part()
    return known.module(f"{stack}.final_norm"), False, Part()


def before(at: str, known: Counterparts) -> nn.Module | None:
    """The first module of a sublayer: what it is given is the stream."""
    found = (known.module(f"{at}.{name}") for name in ("norm_in", *FIRST))
    return next((module for module in found if module is not None), None)


FIRST = ("f.q", "f.q.0", "f.gate", "f.up")
"""What a sublayer's own input goes into."""


def given(at: str, known: Counterparts) -> Spot:
    for name in FIRST:
        module = known.module(f"{at}.{name}")
        if module is not None:
            return module, True, Part()
    return known.module(f"{at}.norm_in"), False, Part()


def added(at: str, branch: Any, last: nn.Module | None, known: Counterparts) -> Spot:
    """What is added to the stream: after the norm and the scale behind the sublayer, if there are."""
    module = last if isinstance(branch.norm_out, nn.Identity) else known.module(f"{at}.norm_out")
    return module, False, Part() if branch.scale == 1.0 else Scaled(branch.scale)


def of_attention(value: str, at: str, branch: Any, known: Counterparts) -> Spot:
    f = branch.f
    if value == "in":
        return given(at, known)
    if value == "out":
        return added(at, branch, known.module(f"{at}.f.o"), known)
    if value == "z":
        return known.module(f"{at}.f.o"), True, Heads(f.heads)
    if value == "pattern":
        if getattr(known.theirs.config, "_attn_implementation", "eager") != "eager":
            raise UnseenError("a fast kernel keeps no pattern; make the model with attn_implementation='eager'")
        return known.caller(f"{at}.f"), False, Weights()
    if value == "scores":
        raise UnseenError("scores never leave its attention; open the model with ct.load, which shows them")
    return projected(value, at, f, known)


def projected(letter: str, at: str, f: Any, known: Counterparts) -> Spot:
    """Queries, keys and values, where nothing is done to them between their matrix and the kernel."""
    if isinstance(f, Latent):
        raise UnseenError("its queries, keys and values are put together from parts inside its attention")
    stack, layer = at.split(".")[0], int(at.split(".")[2])
    turned = at.endswith(".attn") and f"{known.ours.stacks[stack].position_of[layer]}" in known.turning(stack)
    if letter in "qk" and (turned or not isinstance(getattr(f, f"{letter}_norm"), nn.Identity)):
        raise UnseenError(
            "they are normed or turned inside its attention; open the model with ct.load, which shows them"
        )
    if f.clip is not None:
        raise UnseenError("they are clipped inside its attention; open the model with ct.load, which shows them")
    columns = known.columns(f"{at}.f.{letter}")
    return known.module(f"{at}.f.{letter}"), False, Heads(f.heads if letter == "q" else f.kv_heads, columns)


def of_ffn(value: str, at: str, branch: Any, known: Counterparts) -> Spot:
    experts = hasattr(branch.f, "router")
    if value == "in":
        return given(at, known)
    if value == "out":
        return added(at, branch, known.caller(f"{at}.f") if experts else known.module(f"{at}.f.down"), known)
    if value == "router":
        raise UnseenError("which experts are chosen, and by how much, is told in another shape in each of their models")
    dense = f"{at}.f.shared" if value == "shared.hidden" else f"{at}.f"
    return known.module(f"{dense}.down"), True, Part()
