"""Sites in models that are not ours.

A family's table says which of their weights is which of ours, and so which of their modules does what which of ours
does: our `attn.z` is what the module is given that holds our `attn.f.o`. Values that no module there is given or gives
back (rotated queries, scores) cannot be had, and the reason is kept. Keys and values are those of a call's own tokens,
for the cache stands behind them there; with dropout, `*.out` is seen before it.

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
from cutaway.lens.parts import Heads, Logits, Part, Scaled, Turn, Unrolled, Weights
from cutaway.lens.sites import Site, Sites, of_ours
from cutaway.model import build
from cutaway.model.attention import Latent

Spot = tuple[nn.Module | None, bool, Part]
"""A module of theirs, whether the value is what it is given, and where it stands there."""


class UnseenError(Exception):
    """Why a value cannot be had."""


NO_MODULE = "its family's table leads to no module that is given it or gives it back"


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
    theirs.pop("quantization_config", None)  # how weights are packed moves no module
    return families().get(theirs.get("model_type")), theirs


def has_head(family: Family, model: nn.Module) -> bool | None:
    """Whether an encoder has the head that predicts tokens; the other forms always do."""
    if family.template["form"] != "encoder":
        return None
    paths = {path for path, _ in model.named_modules()}
    return any(row.targets == ("head.matrix",) and row.theirs in paths for row in family.rows)


def spot(site: Site, known: Counterparts) -> Spot:
    """Where the value of this site of ours is in theirs."""
    if site.name == "logits":
        if known.module("head.matrix") is None:
            raise UnseenError("it has no head that predicts tokens")
        return known.theirs, False, Logits()
    stacks = known.ours.stacks
    stack = site.name.split(".")[0] if len(stacks) > 1 else next(iter(stacks))
    end, layer = site.name.removeprefix(f"{stack}."), site.layer
    if end == "final_norm" and not isinstance(stacks[stack].final_norm, nn.Identity):
        return known.module(f"{stack}.final_norm"), False, Part()
    if layer is None:  # the stream where the blocks begin and end
        layer, end = (0, "resid_pre") if end == "embed" else (len(stacks[stack].blocks) - 1, "resid_post")
    at = f"{stack}.blocks.{layer}"
    module, entering, part = in_block(end.removeprefix(f"blocks.{layer}."), at, known)
    turn = known.turn(stack, layer)
    return module, entering, part if turn is None else Turn(part, turn, known.caller(stack) or known.theirs)


def in_block(end: str, at: str, known: Counterparts) -> Spot:
    if end in ("resid_pre", "resid_post"):
        return known.caller(at), end == "resid_pre", Part()
    sublayer, _, value = end.partition(".")
    if end == "resid_mid" or value == "resid_pre":
        return between(f"{at}.{sublayer if value else 'ffn'}", known)
    branch = known.ours.get_submodule(f"{at}.{sublayer}")
    of_sublayer: Callable[..., Spot] = of_ffn if sublayer == "ffn" else of_attention
    return of_sublayer(value, f"{at}.{sublayer}", branch, known)


def between(at: str, known: Counterparts) -> Spot:
    """The stream before a sublayer that is not the block's first: from the norm on it, or into what reads it."""
    block = at.rpartition(".")[0]
    for earlier in ("cross", "attn"):
        norm = known.module(f"{block}.after_{earlier}")
        if norm is not None and not at.endswith(earlier):
            return norm, False, unrolled(at, known)
    branch: Any = known.ours.get_submodule(at)
    reader = first(at, known) if isinstance(branch.norm_in, nn.Identity) else known.module(f"{at}.norm_in")
    return reader, True, unrolled(at, known, read_only=True)


def first(at: str, known: Counterparts) -> nn.Module | None:
    """The module around all that reads what a sublayer is given."""
    experts = known.has(f"{at}.f.router")
    return known.caller(*(f"{at}.{name}" for name in (("f",) if experts else READERS)))


READERS = ("f.q", "f.k", "f.v", "f.kv_down", "f.gate", "f.up")


def given(at: str, known: Counterparts) -> Spot:
    """What a sublayer is given, at a place that all of it passes and nothing else."""
    module = first(at, known)
    if module is None:
        return known.module(f"{at}.norm_in"), False, Part()
    block, _, sublayer = at.rpartition(".")
    after = f"{block}.after_{sublayer}"
    if known.has(after) and known.caller(*(f"{at}.{name}" for name in READERS), after) is module:
        raise UnseenError("the stream passes the same module beside it; resid_pre is the same value")
    return module, True, Part()


def unrolled(at: str, known: Counterparts, *, read_only: bool = False) -> Part:
    """An FFN knows no rows, and some are given all tokens in one."""
    block = known.caller(at.rpartition(".")[0])
    if block is None:
        raise UnseenError(NO_MODULE)
    return Unrolled(block, read_only)


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
    turned = at.endswith(".attn") and known.turns(stack, layer)
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
    if value == "router":
        raise UnseenError("which experts are chosen, and by how much, is told in another shape in each of their models")
    if value == "in":
        module, entering, part = given(at, known)
    elif value == "out":
        last = known.caller(f"{at}.f") if experts else known.module(f"{at}.f.down")
        module, entering, part = added(at, branch, last, known)
    else:
        dense = f"{at}.f.shared" if value == "shared.hidden" else f"{at}.f"
        module, entering, part = known.module(f"{dense}.down"), True, Part()
    return module, entering, unrolled(at, known) if type(part) is Part else part
