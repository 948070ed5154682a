"""Sites of transformers models.

A family's weight mapping gives the transformers module for each cutaway module. For example, `attn.z` is the input of
the transformers module that holds the weights of `attn.f.o`. Queries, keys, values, scores and patterns are those of
the call of `scaled_dot_product_attention` (the default attention implementation). With another implementation, values
that are not the input or output of any module (rotated queries, scores) are not available, and `SiteMap.unavailable`
says why; `attn.v` then contains only the tokens of the current call, because the cache is updated after the projection.
One difference from cutaway models remains: `*.out` is the value before dropout.
"""

import json
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cutaway.errors import ConfigError
from cutaway.families import families
from cutaway.families.family import Family
from cutaway.families.load_plan import TensorConversion, expand_mappings
from cutaway.lens.adapters.cutaway import cutaway_sites
from cutaway.lens.adapters.module import module_sites
from cutaway.lens.adapters.structure import share_weights
from cutaway.lens.equations import uses_rope
from cutaway.lens.hook_conversions import (
    FlattenedBatch,
    HookConversion,
    LogitsOutput,
    NthCall,
    PatternOutput,
    ScaledOutput,
    SplitHeads,
)
from cutaway.lens.sdpa_attention import INTERCEPTED, intercepted_kernel
from cutaway.lens.sites import Site, SiteKind, SiteMap, attention_module
from cutaway.model import Transformer, build
from cutaway.model.attention import LatentAttention
from cutaway.model.block import Branch
from cutaway.model.moe import MixtureOfExperts


class _MappedModule(NamedTuple):
    """Path of the transformers module that holds a cutaway parameter, and the conversion of that parameter."""

    path: str
    step: TensorConversion


class _ModuleMap:
    """Maps cutaway module paths to transformers modules, by the family's weight mapping."""

    def __init__(self, family: Family, cutaway_model: Transformer, hf_model: nn.Module) -> None:
        self.cutaway_model, self.hf_model = cutaway_model, hf_model
        self.hf_modules = dict(hf_model.named_modules(remove_duplicate=False))
        has_no_prefix = not any(f"{path}.".startswith(family.base_model_prefix) for path in self.hf_modules)
        prefix = family.base_model_prefix if has_no_prefix else ""
        self.steps: list[TensorConversion] = []
        """Conversions of the weight mapping, with the keys of this model."""
        self.mapped_modules: dict[str, list[_MappedModule]] = {}
        for step in expand_mappings(family.weight_mappings, cutaway_model.config, cutaway_model):
            step = replace(step, checkpoint_keys=tuple(key.removeprefix(prefix) for key in step.checkpoint_keys))
            self.steps.append(step)
            mapped = [_MappedModule(key.rpartition(".")[0], step) for key in step.checkpoint_keys]
            for name in step.model_keys:
                self.mapped_modules.setdefault(name, []).extend(mapped)

    def find(self, path: str) -> _MappedModule | None:
        """Return the first `_MappedModule` of a cutaway module that exists in the transformers model, or None."""
        mapped = self.mapped_modules.get(f"{path}.weight", []) + self.mapped_modules.get(f"{path}.bias", [])
        return next((candidate for candidate in mapped if candidate.path in self.hf_modules), None)

    def hf_module(self, path: str) -> nn.Module | None:
        """Return the transformers module that holds the weights of a cutaway module, or None."""
        mapped = self.find(path)
        return None if mapped is None else self.hf_modules[mapped.path]

    def enclosing_module(self, *cutaway_paths: str) -> nn.Module | None:
        """Return the innermost transformers module that contains all weights of these cutaway modules.

        ModuleList and ModuleDict are skipped: they are never called, so hooks on them do not run.
        """
        prefixes = tuple(f"{path}." for path in cutaway_paths)
        names = [name for name in self.mapped_modules if name.startswith(prefixes)]
        paths = [mapped.path.split(".") for name in names for mapped in self.mapped_modules[name]]
        common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
        while isinstance(self.hf_modules.get(".".join(common)), nn.ModuleList | nn.ModuleDict):
            common.pop()
        return self.hf_modules.get(".".join(common)) if common else None

    def branch(self, path: str) -> Branch:
        branch = self.cutaway_model.get_submodule(path)
        assert isinstance(branch, Branch)
        return branch

    def has_weights(self, path: str) -> bool:
        """Whether the weight mapping includes any parameter of this cutaway module."""
        return any(name.startswith(f"{path}.") for name in self.mapped_modules)

    def shared_block_call(self, stack: str, layer: int) -> int | None:
        """Return the number of earlier layers that use the same block as `layer`, or None if no block is shared."""
        blocks = list(self.cutaway_model.stacks[stack].blocks)
        if len(set(blocks)) == len(blocks):
            return None
        return sum(block is blocks[layer] for block in blocks[:layer])

    def output_columns(self, path: str) -> Tensor | None:
        """Return which output columns of the transformers module are this cutaway module's output; None means all.

        This matters for fused projections (QKV in one matrix). The columns are found by applying the mapping's tensor
        operation to arange instead of to weights.
        """
        mapped = self.find(path)
        if mapped is None:
            return None
        step = mapped.step
        shapes = [(self.cutaway_model.get_parameter(name).shape[0],) for name in step.model_keys]
        all_columns = torch.arange(sum(rows for (rows,) in shapes))
        index = [name.rpartition(".")[0] for name in step.model_keys].index(path)
        columns = step.op.to_model([all_columns], shapes, step.d_head)[index]
        return None if torch.equal(columns, all_columns) else columns


_HookLocation = tuple[nn.Module | None, bool, HookConversion]
"""Transformers module, whether the value is the module's input (True) or output (False), and the conversion."""


class _SiteUnavailableError(Exception):
    """A transformers model does not expose the value of a site. The message says why."""


_USE_SDPA = "load the model with attn_implementation='sdpa' or ct.load, where this site is available"
_NO_MODULE = "its value is not the input or output of any module that the family's weight mapping locates"


def transformers_sites(model: nn.Module) -> SiteMap:
    """Return the sites of a module, with cutaway's site names if a family supports it, else with submodule paths."""
    return _locate_sites(model)[0]


def describe_transformers(model: nn.Module) -> tuple[SiteMap, Transformer | None]:
    """Return the sites and the structure of a transformers model; the structure is None if no family supports it."""
    sites, module_map = _locate_sites(model)
    if module_map is None:
        return sites, None
    share_weights(module_map.cutaway_model, module_map.hf_modules, module_map.steps)
    return sites, module_map.cutaway_model


def _locate_sites(model: nn.Module) -> tuple[SiteMap, _ModuleMap | None]:
    """Return the sites of a module, and how its modules correspond to cutaway's if a family supports it."""
    family, hf_config = _find_family(model)
    if family is None:
        return module_sites(model, "no cutaway family supports this model, so its sites are module paths"), None
    try:
        config = family.config_from_hf(hf_config, head=_has_lm_head(family, model), pooler=False)[0]
    except ConfigError as error:
        reason = f"cutaway does not support its config, so its sites are module paths: {error}"
        return module_sites(model, reason), None
    cutaway_model = build(config, device="meta")
    module_map = _ModuleMap(family, cutaway_model, model)
    located, unavailable = [], {}
    for site in cutaway_sites(cutaway_model).values():
        if (intercepted := _intercept_attention(site, module_map)) is not None:
            located.append(intercepted)
            continue
        try:
            module, is_input, conversion = _locate_site(site, module_map)
            if module is None:
                raise _SiteUnavailableError(_NO_MODULE)
        except _SiteUnavailableError as reason:
            unavailable[site.name] = str(reason)
        else:
            kind: SiteKind = "in" if is_input else "out"
            located.append(replace(site, module=module, kind=kind, arg_index=0, stack=None, conversion=conversion))
    if not any(site.layer is not None for site in located):
        return module_sites(model, "its modules are not at its family's paths, so its sites are module paths"), None
    return SiteMap(located, unavailable), module_map


def _find_family(model: nn.Module) -> tuple[Family | None, dict[str, object]]:
    """Return the family for the model_type of a model's config (None if unknown), and the config as a dict."""
    to_json_string = getattr(getattr(model, "config", None), "to_json_string", None)
    if to_json_string is None:
        return None, {}
    hf_config: dict[str, object] = json.loads(to_json_string(use_diff=False))
    hf_config.pop("quantization_config", None)  # quantization does not change module paths
    hf_config.pop("architectures", None)  # the modules show which head the model has
    return families().get(str(hf_config.get("model_type"))), hf_config


def _has_lm_head(family: Family, model: nn.Module) -> bool | None:
    """Whether an encoder has a language modeling head. None for decoders and encoder-decoders."""
    if family.template["form"] != "encoder":
        return None
    paths = {path for path, _ in model.named_modules()}
    return any(row.model_keys == ("head.matrix",) and row.checkpoint_key in paths for row in family.weight_mappings)


def _intercept_attention(site: Site, module_map: _ModuleMap) -> Site | None:
    """Return the site of q, k, v, scores or pattern in a module that calls SDPA, or None for other sites and models."""
    path, _, value = site.name.rpartition(".")
    if value not in INTERCEPTED or getattr(module_map.hf_model.config, "_attn_implementation", "eager") != "sdpa":
        return None
    stacks = module_map.cutaway_model.stacks
    path = path if len(stacks) > 1 else f"{next(iter(stacks))}.{path}"
    attention, host = attention_module(module_map.branch(path)), module_map.enclosing_module(f"{path}.f")
    assert site.layer is not None
    if host is None or isinstance(attention, LatentAttention) or site.stack is None:
        return None
    if module_map.shared_block_call(path.split(".")[0], site.layer) is not None:
        return None
    kernel = intercepted_kernel(host, attention.kv_heads)
    return replace(site, module=kernel, stack=None, host=host)


def _locate_site(site: Site, module_map: _ModuleMap) -> _HookLocation:
    """Return where the transformers model exposes the value of a cutaway site."""
    if site.name == "logits":
        if module_map.hf_module("head.matrix") is None:
            raise _SiteUnavailableError("it has no language modeling head")
        return module_map.hf_model, False, LogitsOutput()
    stacks = module_map.cutaway_model.stacks
    stack = site.name.split(".")[0] if len(stacks) > 1 else next(iter(stacks))
    suffix, layer = site.name.removeprefix(f"{stack}."), site.layer
    if suffix == "final_norm" and not isinstance(stacks[stack].final_norm, nn.Identity):
        return module_map.hf_module(f"{stack}.final_norm"), False, HookConversion()
    if layer is None:  # embed is the first block's input; an absent final norm is the last block's output
        layer, suffix = (0, "resid_pre") if suffix == "embed" else (len(stacks[stack].blocks) - 1, "resid_post")
    block_path = f"{stack}.blocks.{layer}"
    module, is_input, conversion = _locate_in_block(suffix.removeprefix(f"blocks.{layer}."), block_path, module_map)
    call_index = module_map.shared_block_call(stack, layer)
    if call_index is not None:
        outer_module = module_map.enclosing_module(stack) or module_map.hf_model
        conversion = NthCall(conversion, call_index, outer_module)
    return module, is_input, conversion


def _locate_in_block(suffix: str, block_path: str, module_map: _ModuleMap) -> _HookLocation:
    if suffix in ("resid_pre", "resid_post"):
        return module_map.enclosing_module(block_path), suffix == "resid_pre", HookConversion()
    sublayer, _, value = suffix.partition(".")
    if suffix == "resid_mid" or value == "resid_pre":
        return _locate_mid_resid(f"{block_path}.{sublayer if value else 'ffn'}", module_map)
    locate = _locate_in_ffn if sublayer == "ffn" else _locate_in_attention
    return locate(value, f"{block_path}.{sublayer}", module_map)


def _locate_mid_resid(path: str, module_map: _ModuleMap) -> _HookLocation:
    """Locate the residual stream before a sublayer that is not the block's first.

    With post-norm it is the output of the norm after the previous sublayer, else the input of the module that reads it.
    """
    block = path.rpartition(".")[0]
    for previous in ("cross", "attn"):
        norm = module_map.hf_module(f"{block}.norm_after_{previous}")
        if norm is not None and not path.endswith(previous):
            return norm, False, _flattened_batch_conversion(path, module_map)
    reader = module_map.hf_module(f"{path}.norm_in")
    if isinstance(module_map.branch(path).norm_in, nn.Identity):
        reader = _sublayer_input_module(path, module_map)
    return reader, True, _flattened_batch_conversion(path, module_map, in_place=True)


def _sublayer_input_module(path: str, module_map: _ModuleMap) -> nn.Module | None:
    """Return the innermost module that contains all projections that read a sublayer's input."""
    is_moe = module_map.has_weights(f"{path}.f.router")
    readers = ("f.router", "f.experts") if is_moe else _INPUT_PROJECTIONS
    return module_map.enclosing_module(*(f"{path}.{name}" for name in readers))


_INPUT_PROJECTIONS = ("f.q", "f.k", "f.v", "f.kv_down", "f.gate", "f.up")


def _locate_sublayer_input(path: str, module_map: _ModuleMap) -> _HookLocation:
    """Locate a sublayer's input: the input of a module that reads only this value, else the output of the norm."""
    module = _sublayer_input_module(path, module_map)
    if module is None:
        return module_map.hf_module(f"{path}.norm_in"), False, HookConversion()
    block, _, sublayer = path.rpartition(".")
    after = f"{block}.norm_after_{sublayer}"
    around_norm = module_map.enclosing_module(*(f"{path}.{name}" for name in _INPUT_PROJECTIONS), after)
    if module_map.has_weights(after) and around_norm is module:
        raise _SiteUnavailableError("its module also receives the residual stream; use resid_pre, which is equal")
    return module, True, HookConversion()


def _flattened_batch_conversion(path: str, module_map: _ModuleMap, *, in_place: bool = False) -> HookConversion:
    """Return a conversion for values that some models flatten to (B·T, d) before the FFN."""
    block = module_map.enclosing_module(path.rpartition(".")[0])
    if block is None:
        raise _SiteUnavailableError(_NO_MODULE)
    return FlattenedBatch(block, in_place)


def _locate_sublayer_output(path: str, output_module: nn.Module | None, module_map: _ModuleMap) -> _HookLocation:
    """Locate what a sublayer adds to the residual stream, after the output norm and the scale if the model has them."""
    branch = module_map.branch(path)
    module = output_module if isinstance(branch.norm_out, nn.Identity) else module_map.hf_module(f"{path}.norm_out")
    return module, False, HookConversion() if branch.scale == 1.0 else ScaledOutput(branch.scale)


def _locate_in_attention(value: str, path: str, module_map: _ModuleMap) -> _HookLocation:
    if value == "in":
        return _locate_sublayer_input(path, module_map)
    if value == "out":
        return _locate_sublayer_output(path, module_map.hf_module(f"{path}.f.o"), module_map)
    if value == "z":
        return module_map.hf_module(f"{path}.f.o"), True, SplitHeads(attention_module(module_map.branch(path)).heads)
    if value == "pattern":
        implementation = getattr(module_map.hf_model.config, "_attn_implementation", "eager")
        if implementation == "sdpa":
            raise _SiteUnavailableError("its layers share a block or have latent attention; load it with ct.load")
        if implementation != "eager":
            raise _SiteUnavailableError(f"its attention returns no pattern; {_USE_SDPA}")
        return module_map.enclosing_module(f"{path}.f"), False, PatternOutput()
    if value == "scores":
        raise _SiteUnavailableError(f"scores are local to its attention module; {_USE_SDPA}")
    return _locate_projection(value, path, module_map)


def _locate_projection(projection: str, path: str, module_map: _ModuleMap) -> _HookLocation:
    """Locate q, k or v. Raise if the attention module changes it between the projection and the kernel."""
    f = attention_module(module_map.branch(path))
    if isinstance(f, LatentAttention):
        raise _SiteUnavailableError("latent attention assembles queries, keys and values inside its attention module")
    stack, layer = path.split(".")[0], int(path.split(".")[2])
    has_rope = path.endswith(".attn") and uses_rope(module_map.cutaway_model.stacks[stack], layer)
    if projection in "qk" and (has_rope or not isinstance(getattr(f, f"{projection}_norm"), nn.Identity)):
        raise _SiteUnavailableError(f"QK-norm or RoPE is applied inside its attention module; {_USE_SDPA}")
    if f.clip_qkv is not None:
        raise _SiteUnavailableError(f"q, k and v are clipped inside its attention module; {_USE_SDPA}")
    host, path = module_map.enclosing_module(f"{path}.f"), f"{path}.f.{projection}"
    conversion: HookConversion
    conversion = SplitHeads(f.heads if projection == "q" else f.kv_heads, module_map.output_columns(path))
    if f.kernel.position_scores and host is not None:  # the second call projects relative positions (share_att_key)
        conversion = NthCall(conversion, 0, host)
    return module_map.hf_module(path), False, conversion


def _locate_in_ffn(value: str, path: str, module_map: _ModuleMap) -> _HookLocation:
    is_moe = isinstance(module_map.branch(path).f, MixtureOfExperts)
    if value == "router":
        raise _SiteUnavailableError("each transformers model returns the routing weights in a different format")
    if value == "in":
        module, is_input, conversion = _locate_sublayer_input(path, module_map)
    elif value == "out":
        last = module_map.enclosing_module(f"{path}.f") if is_moe else module_map.hf_module(f"{path}.f.down")
        if is_moe and last is module_map.enclosing_module(path.rpartition(".")[0]):
            raise _SiteUnavailableError("its layer adds the shared expert outside of any module")
        module, is_input, conversion = _locate_sublayer_output(path, last, module_map)
    else:
        dense = f"{path}.f.shared" if value == "shared.hidden" else f"{path}.f"
        module, is_input, conversion = module_map.hf_module(f"{dense}.down"), True, HookConversion()
    if type(conversion) is HookConversion:
        conversion = _flattened_batch_conversion(path, module_map)
    return module, is_input, conversion
