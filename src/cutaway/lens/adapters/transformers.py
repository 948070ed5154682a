"""Sites in models of transformers.

A family's table says which of their weights is which of ours, and so which of their modules does what which of ours
does: our `attn.z` is what the module is given that holds our `attn.f.o`. Values that no module there is given or gives
back (rotated queries, scores) cannot be had, and the reason is kept. Keys and values are those of a call's own tokens,
for the cache stands behind them there; with dropout, `*.out` is seen before it.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cutaway.errors import ConfigError
from cutaway.families import families
from cutaway.families.family import Family
from cutaway.families.load_plan import TensorConversion, expand_mappings
from cutaway.lens.adapters.cutaway import cutaway_sites
from cutaway.lens.adapters.module import module_sites
from cutaway.lens.hook_conversions import (
    FlattenedBatch,
    HookConversion,
    LogitsOutput,
    NthCall,
    PatternOutput,
    ScaledOutput,
    SplitHeads,
)
from cutaway.lens.sites import Site, SiteMap
from cutaway.model import Transformer, build
from cutaway.model.attention import LatentAttention
from cutaway.model.rope import Rope


class MappedModule(NamedTuple):
    """The path of the module that would hold a tensor of ours in a file of theirs, and the row that says so."""

    path: str
    step: TensorConversion


class ModuleMap:
    """Their modules by the paths of ours."""

    def __init__(self, family: Family, cutaway_model: Transformer, hf_model: nn.Module) -> None:
        self.cutaway_model, self.hf_model = cutaway_model, hf_model
        self.hf_modules = dict(hf_model.named_modules(remove_duplicate=False))
        bare = not any(f"{path}.".startswith(family.base_model_prefix) for path in self.hf_modules)
        self.mapped_modules: dict[str, list[MappedModule]] = {}
        for step in expand_mappings(family.weight_mappings, cutaway_model.config, cutaway_model):
            names = [name.removeprefix(family.base_model_prefix if bare else "") for name in step.checkpoint_keys]
            for name in step.model_keys:
                self.mapped_modules.setdefault(name, []).extend(
                    MappedModule(each.rpartition(".")[0], step) for each in names
                )

    def find(self, path: str) -> MappedModule | None:
        """The first place in which theirs does have a module for this one of ours."""
        held = self.mapped_modules.get(f"{path}.weight", []) + self.mapped_modules.get(f"{path}.bias", [])
        return next((each for each in held if each.path in self.hf_modules), None)

    def hf_module(self, path: str) -> nn.Module | None:
        """The module with the weights of this one of ours."""
        held = self.find(path)
        return None if held is None else self.hf_modules[held.path]

    def enclosing_module(self, *cutaway_paths: str) -> nn.Module | None:
        """The innermost module around all that these of ours hold; lists are never called."""
        inside = tuple(f"{each}." for each in cutaway_paths)
        paths = [
            each.path.split(".")
            for name, held in self.mapped_modules.items()
            if name.startswith(inside)
            for each in held
        ]
        common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
        while isinstance(self.hf_modules.get(".".join(common)), nn.ModuleList | nn.ModuleDict):
            common.pop()
        return self.hf_modules.get(".".join(common)) if common else None

    def has_weights(self, path: str) -> bool:
        """Whether theirs has anything of this one of ours."""
        return any(name.startswith(f"{path}.") for name in self.mapped_modules)

    def shared_block_call(self, stack: str, layer: int) -> int | None:
        """How many layers before this one use the same block; None where each has its own."""
        blocks = list(self.cutaway_model.stacks[stack].blocks)
        if len(set(blocks)) == len(blocks):
            return None
        return sum(block is blocks[layer] for block in blocks[:layer])

    def uses_rope(self, stack: str, layer: int) -> bool:
        """Whether queries and keys are turned in this layer."""
        inside = self.cutaway_model.stacks[stack]
        position = inside.layer_position_keys[layer]
        return position in inside.positions and isinstance(inside.positions[position], Rope)

    def output_columns(self, path: str) -> Tensor | None:
        """Where the output of this one of ours stands in that of theirs, if it is not all of it: the row's operation,
        done to numbers that count."""
        held = self.find(path)
        if held is None:
            return None
        step = held.step
        heights = [(self.cutaway_model.get_parameter(name).shape[0],) for name in step.model_keys]
        count = torch.arange(sum(height for (height,) in heights))
        place = [name.rpartition(".")[0] for name in step.model_keys].index(path)
        own = step.op.to_model([count], heights, step.d_head)[place]
        return None if torch.equal(own, count) else own


HookLocation = tuple[nn.Module | None, bool, HookConversion]
"""A module of theirs, whether the value is what it is given, and where it stands there."""


class SiteUnavailableError(Exception):
    """Why a value cannot be had."""


_NO_MODULE = "its family's table leads to no module that is given it or gives it back"


def transformers_sites(model: nn.Module) -> SiteMap:
    """By the names of ours where a family's table knows the model, else by module path."""
    family, theirs = _find_family(model)
    if family is None:
        return module_sites(model, "no family of cutaway's knows this model, so its sites are the paths of its modules")
    try:
        config = family.config_from_hf(theirs, head=_has_lm_head(family, model), pooler=False)[0]
    except ConfigError as error:
        return module_sites(
            model, f"its sites are the paths of its modules, for its config is not one cutaway has: {error}"
        )
    ours = build(config, device="meta")
    known = ModuleMap(family, ours, model)
    found, absent = [], {}
    for site in cutaway_sites(ours).values():
        try:
            module, entering, part = _locate_site(site, known)
            if module is None:
                raise SiteUnavailableError(_NO_MODULE)
        except SiteUnavailableError as why:
            absent[site.name] = str(why)
        else:
            found.append(
                replace(site, module=module, kind="in" if entering else "out", arg_index=0, stack=None, conversion=part)
            )
    if not any(site.layer is not None for site in found):
        return module_sites(
            model, "its modules are not where its family has them, so its sites are the paths of its modules"
        )
    return SiteMap(found, absent)


def _find_family(model: nn.Module) -> tuple[Family | None, dict[str, Any]]:
    """The family that a model's own configuration names, and what that configuration says."""
    written = getattr(getattr(model, "config", None), "to_json_string", None)
    if written is None:
        return None, {}
    theirs = json.loads(written(use_diff=False))
    theirs.pop("quantization_config", None)  # how weights are packed moves no module
    return families().get(theirs.get("model_type")), theirs


def _has_lm_head(family: Family, model: nn.Module) -> bool | None:
    """Whether an encoder has the head that predicts tokens; the other forms always do."""
    if family.template["form"] != "encoder":
        return None
    paths = {path for path, _ in model.named_modules()}
    return any(row.model_keys == ("head.matrix",) and row.checkpoint_key in paths for row in family.weight_mappings)


def _locate_site(site: Site, module_map: ModuleMap) -> HookLocation:
    """Where the value of this site of ours is in theirs."""
    if site.name == "logits":
        if module_map.hf_module("head.matrix") is None:
            raise SiteUnavailableError("it has no head that predicts tokens")
        return module_map.hf_model, False, LogitsOutput()
    stacks = module_map.cutaway_model.stacks
    stack = site.name.split(".")[0] if len(stacks) > 1 else next(iter(stacks))
    end, layer = site.name.removeprefix(f"{stack}."), site.layer
    if end == "final_norm" and not isinstance(stacks[stack].final_norm, nn.Identity):
        return module_map.hf_module(f"{stack}.final_norm"), False, HookConversion()
    if layer is None:  # the stream where the blocks begin and end
        layer, end = (0, "resid_pre") if end == "embed" else (len(stacks[stack].blocks) - 1, "resid_post")
    at = f"{stack}.blocks.{layer}"
    module, entering, part = _locate_in_block(end.removeprefix(f"blocks.{layer}."), at, module_map)
    turn = module_map.shared_block_call(stack, layer)
    return (
        module,
        entering,
        part if turn is None else NthCall(part, turn, module_map.enclosing_module(stack) or module_map.hf_model),
    )


def _locate_in_block(suffix: str, block_path: str, module_map: ModuleMap) -> HookLocation:
    if suffix in ("resid_pre", "resid_post"):
        return module_map.enclosing_module(block_path), suffix == "resid_pre", HookConversion()
    sublayer, _, value = suffix.partition(".")
    if suffix == "resid_mid" or value == "resid_pre":
        return _locate_mid_resid(f"{block_path}.{sublayer if value else 'ffn'}", module_map)
    branch = module_map.cutaway_model.get_submodule(f"{block_path}.{sublayer}")
    of_sublayer: Callable[..., HookLocation] = _locate_in_ffn if sublayer == "ffn" else _locate_in_attention
    return of_sublayer(value, f"{block_path}.{sublayer}", branch, module_map)


def _locate_mid_resid(path: str, module_map: ModuleMap) -> HookLocation:
    """The stream before a sublayer that is not the block's first: from the norm on it, or into what reads it."""
    block = path.rpartition(".")[0]
    for earlier in ("cross", "attn"):
        norm = module_map.hf_module(f"{block}.norm_after_{earlier}")
        if norm is not None and not path.endswith(earlier):
            return norm, False, _flattened_batch_conversion(path, module_map)
    branch: Any = module_map.cutaway_model.get_submodule(path)
    reader = (
        _sublayer_input_module(path, module_map)
        if isinstance(branch.norm_in, nn.Identity)
        else module_map.hf_module(f"{path}.norm_in")
    )
    return reader, True, _flattened_batch_conversion(path, module_map, read_only=True)


def _sublayer_input_module(path: str, module_map: ModuleMap) -> nn.Module | None:
    """The module around all that reads what a sublayer is given."""
    experts = module_map.has_weights(f"{path}.f.router")
    return module_map.enclosing_module(*(f"{path}.{name}" for name in (("f",) if experts else _INPUT_PROJECTIONS)))


_INPUT_PROJECTIONS = ("f.q", "f.k", "f.v", "f.kv_down", "f.gate", "f.up")


def _locate_sublayer_input(path: str, module_map: ModuleMap) -> HookLocation:
    """What a sublayer is given, at a place that all of it passes and nothing else."""
    module = _sublayer_input_module(path, module_map)
    if module is None:
        return module_map.hf_module(f"{path}.norm_in"), False, HookConversion()
    block, _, sublayer = path.rpartition(".")
    after = f"{block}.norm_after_{sublayer}"
    if (
        module_map.has_weights(after)
        and module_map.enclosing_module(*(f"{path}.{name}" for name in _INPUT_PROJECTIONS), after) is module
    ):
        raise SiteUnavailableError("the stream passes the same module beside it; resid_pre is the same value")
    return module, True, HookConversion()


def _flattened_batch_conversion(path: str, module_map: ModuleMap, *, read_only: bool = False) -> HookConversion:
    """An FFN knows no rows, and some are given all tokens in one."""
    block = module_map.enclosing_module(path.rpartition(".")[0])
    if block is None:
        raise SiteUnavailableError(_NO_MODULE)
    return FlattenedBatch(block, read_only)


def _locate_sublayer_output(
    path: str, branch: Any, output_module: nn.Module | None, module_map: ModuleMap
) -> HookLocation:
    """What is added to the stream: after the norm and the scale behind the sublayer, if there are."""
    module = output_module if isinstance(branch.norm_out, nn.Identity) else module_map.hf_module(f"{path}.norm_out")
    return module, False, HookConversion() if branch.scale == 1.0 else ScaledOutput(branch.scale)


def _locate_in_attention(value: str, path: str, branch: Any, module_map: ModuleMap) -> HookLocation:
    f = branch.f
    if value == "in":
        return _locate_sublayer_input(path, module_map)
    if value == "out":
        return _locate_sublayer_output(path, branch, module_map.hf_module(f"{path}.f.o"), module_map)
    if value == "z":
        return module_map.hf_module(f"{path}.f.o"), True, SplitHeads(f.heads)
    if value == "pattern":
        if getattr(module_map.hf_model.config, "_attn_implementation", "eager") != "eager":
            raise SiteUnavailableError(
                "a fast kernel keeps no pattern; make the model with attn_implementation='eager'"
            )
        return module_map.enclosing_module(f"{path}.f"), False, PatternOutput()
    if value == "scores":
        raise SiteUnavailableError("scores never leave its attention; open the model with ct.load, which shows them")
    return _locate_projection(value, path, f, module_map)


def _locate_projection(projection: str, path: str, f: Any, module_map: ModuleMap) -> HookLocation:
    """Queries, keys and values, where nothing is done to them between their matrix and the kernel."""
    if isinstance(f, LatentAttention):
        raise SiteUnavailableError("its queries, keys and values are put together from parts inside its attention")
    stack, layer = path.split(".")[0], int(path.split(".")[2])
    turned = path.endswith(".attn") and module_map.uses_rope(stack, layer)
    if projection in "qk" and (turned or not isinstance(getattr(f, f"{projection}_norm"), nn.Identity)):
        raise SiteUnavailableError(
            "they are normed or turned inside its attention; open the model with ct.load, which shows them"
        )
    if f.clip_qkv is not None:
        raise SiteUnavailableError(
            "they are clipped inside its attention; open the model with ct.load, which shows them"
        )
    columns = module_map.output_columns(f"{path}.f.{projection}")
    return (
        module_map.hf_module(f"{path}.f.{projection}"),
        False,
        SplitHeads(f.heads if projection == "q" else f.kv_heads, columns),
    )


def _locate_in_ffn(value: str, path: str, branch: Any, module_map: ModuleMap) -> HookLocation:
    experts = hasattr(branch.f, "router")
    if value == "router":
        raise SiteUnavailableError(
            "which experts are chosen, and by how much, is told in another shape in each of their models"
        )
    if value == "in":
        module, entering, part = _locate_sublayer_input(path, module_map)
    elif value == "out":
        last = module_map.enclosing_module(f"{path}.f") if experts else module_map.hf_module(f"{path}.f.down")
        module, entering, part = _locate_sublayer_output(path, branch, last, module_map)
    else:
        dense = f"{path}.f.shared" if value == "shared.hidden" else f"{path}.f"
        module, entering, part = module_map.hf_module(f"{dense}.down"), True, HookConversion()
    return module, entering, _flattened_batch_conversion(path, module_map) if type(part) is HookConversion else part
