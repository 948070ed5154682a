"""Sites and structure of an nn.Module whose user states at which module paths its sites are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

import torch
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.config import config as read_config
from cutaway.errors import InputError
from cutaway.lens.adapters.structure import merge_adapters, set_tensor
from cutaway.lens.hook_conversions import FlattenedBatch, HookConversion, LogitsOutput, SplitHeads
from cutaway.lens.sdpa_attention import INTERCEPTED, intercepted_kernel
from cutaway.lens.sites import Site, SiteKind, SiteMap, attention_module, get_blocks
from cutaway.model import Transformer, build
from cutaway.model.norms import LayerNorm, build_norm

_HOST = "blocks.{i}.attn"
"""Stated name of the module that calls SDPA, which is not a site itself."""
_KERNEL_VALUES: dict[str, tuple[SiteKind, int]] = {
    "q": ("in", 0), "k": ("in", 1), "v": ("in", 2), "scores": ("scores", 0), "pattern": ("pattern", 0), "z": ("out", 0),
}  # fmt: skip
"""Value of an attention call → kind of its site and index among the arguments of the kernel."""
_BLOCK_AXES = {
    "resid_pre": "BTd", "attn.in": "BTd", "attn.q": "BTHD", "attn.k": "BSGD", "attn.v": "BSGE", "attn.scores": "BHTS",
    "attn.pattern": "BHTS", "attn.z": "BTHE", "attn.out": "BTd", "resid_mid": "BTd", "ffn.in": "BTd",
    "ffn.hidden": "BTh", "ffn.out": "BTd", "resid_post": "BTd",
}  # fmt: skip
"""Sites of a block in the order of the forward pass, and their axes."""


@dataclass(frozen=True, eq=False)
class StatedSites:
    """The arguments of `describe_model`. Raises InputError if a path is not a module of the model."""

    model: nn.Module
    paths: Mapping[str, str]
    final_norm: str | None
    unembed: str | None
    num_heads: int | None
    num_kv_heads: int | None
    form: str
    placement: str

    def __post_init__(self) -> None:
        known = {"embed", "final_norm", "logits", _HOST} | {f"blocks.{{i}}.{suffix}" for suffix in _BLOCK_AXES}
        for name in self.paths:
            if name not in known:
                close = get_close_matches(str(name), known, 3) or sorted(known)
                raise InputError(f"sites has '{name}', which is not a site; use one of {', '.join(close)}")
        if "blocks.{i}.resid_post" not in self.paths:
            raise InputError("sites has no 'blocks.{i}.resid_post'; state the path of the blocks, such as 'layers.{i}'")
        if self.unembed is None:
            raise InputError("unembed is missing; pass the path of the linear layer that computes the logits")
        if self.num_heads is None and any(".attn" in name and _axes(name) != "BTd" for name in self.paths):
            raise InputError("num_heads is missing, but sites has heads; pass the number of query heads")

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        return dict(self.model.named_modules(remove_duplicate=False))

    @cached_property
    def num_layers(self) -> int:
        path = self.paths["blocks.{i}.resid_post"]
        if "{i}" not in path:
            raise InputError(f"sites['blocks.{{i}}.resid_post'] is '{path}'; write {{i}} for the index of the layer")
        self._find("blocks.{i}.resid_post", 0)  # raises if there is no first block
        layers = 1
        while self._split_path(path, layers)[0] in self.modules:
            layers += 1
        return layers

    @property
    def kv_heads(self) -> int | None:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def _split_path(self, path: str, layer: int) -> tuple[str, SiteKind]:
        """Return the module path in this layer, and whether the value is the module's input or output."""
        path = path.replace("{i}", str(layer))
        kinds: tuple[SiteKind, ...] = ("in", "out")
        for kind in kinds:
            if path not in self.modules and path.endswith(f".{kind}"):
                return path.removesuffix(f".{kind}"), kind
        return path, "out"

    def _find(self, name: str, layer: int = 0) -> tuple[nn.Module, SiteKind]:
        """Return the module of a stated site, and whether the value is its input or output."""
        path, kind = self._split_path(self.paths[name], layer)
        return self._module(f"sites['{name}']", path), kind

    def _module(self, argument: str, path: str) -> nn.Module:
        if path not in self.modules:
            close = get_close_matches(path, self.modules, 3, 0.4)
            hint = f"; similar paths: {', '.join(close)}" if close else "; see model.named_modules()"
            raise InputError(f"{argument} is '{path}', but the model has no such module{hint}")
        return self.modules[path]

    def site_map(self) -> SiteMap:
        return SiteMap(self._sites(), {"*": "it was not stated in describe_model(sites=…)"})

    def _sites(self) -> Iterator[Site]:
        sizes = self._axis_sizes()
        embed, kind = self._find("embed") if "embed" in self.paths else self._block_input(0)
        yield Site("embed", "BTd", embed, kind, axis_sizes=sizes, conversion=HookConversion())
        for layer in range(self.num_layers):
            for suffix, axes in _BLOCK_AXES.items():
                site = self._block_site(f"blocks.{layer}.{suffix}", suffix, axes, layer, sizes)
                if site is not None:
                    yield site
        if self.final_norm is not None:
            module = self._module("final_norm", self.final_norm)
            yield Site("final_norm", "BTd", module, axis_sizes=sizes, conversion=HookConversion())
        yield Site("logits", "BTV", self.model, axis_sizes=sizes, conversion=LogitsOutput())

    def _block_site(
        self, name: str, suffix: str, axes: str, layer: int, sizes: tuple[tuple[str, int], ...]
    ) -> Site | None:
        stated, value = f"blocks.{{i}}.{suffix}", suffix.rpartition(".")[2]
        if stated in self.paths:
            module, kind = self._find(stated, layer)
        elif suffix == "resid_pre":
            module, kind = self._block_input(layer)
        elif _HOST in self.paths and value in (*INTERCEPTED, "z") and suffix.startswith("attn."):
            host, _ = self._find(_HOST, layer)
            assert self.kv_heads is not None
            kernel, (site_kind, arg_index) = intercepted_kernel(host, self.kv_heads), _KERNEL_VALUES[value]
            return Site(name, axes, kernel, site_kind, arg_index, layer, axis_sizes=sizes, host=host)
        else:
            return None
        conversion, block = HookConversion(), self._find("blocks.{i}.resid_post", layer)[0]
        if suffix.startswith("resid_") and kind == "in" and module is not block:
            conversion = FlattenedBatch(block, in_place=True)  # the residual connection uses the same tensor
        if self.num_heads is not None and self.kv_heads is not None and ("H" in axes or "G" in axes):
            conversion = SplitHeads(self.num_heads if "H" in axes else self.kv_heads)
        return Site(name, axes, module, kind, layer=layer, axis_sizes=sizes, conversion=conversion)

    def _block_input(self, layer: int) -> tuple[nn.Module, SiteKind]:
        name = "blocks.{i}.resid_pre" if "blocks.{i}.resid_pre" in self.paths else "blocks.{i}.resid_post"
        return self._find(name, layer)[0], "in"

    def _axis_sizes(self) -> tuple[tuple[str, int], ...]:
        vocab_size, d_model = self._unembedding().shape
        sizes = {"d": d_model, "V": vocab_size}
        if self.num_heads is not None and self.kv_heads is not None:
            width = self._head_width(d_model)
            sizes |= {"H": self.num_heads, "G": self.kv_heads, "D": width, "E": width}
        hidden = self._weight("blocks.{i}.ffn.hidden", 0)
        return (*sizes.items(), *([] if hidden is None else [("h", hidden.shape[1])]))

    def _head_width(self, d_model: int) -> int:
        assert self.num_heads is not None
        weight = self._weight("blocks.{i}.attn.z", 0)
        return (d_model if weight is None else weight.shape[1]) // self.num_heads

    def _unembedding(self) -> Tensor:
        assert self.unembed is not None
        weight = getattr(merge_adapters(self._module("unembed", self.unembed)), "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise InputError(
                f"unembed is '{self.unembed}', which has no weight matrix; pass the path of a linear layer"
            )
        return weight

    def _weight(self, name: str, layer: int) -> Tensor | None:
        """Return the weight (out, in) of the linear layer whose input is the stated site, or None if there is none."""
        if name not in self.paths:
            return None
        module, kind = self._find(name, layer)
        linear = merge_adapters(module)
        weight = getattr(linear, "weight", None)
        if kind != "in" or not isinstance(weight, Tensor) or weight.ndim != 2:
            return None
        return weight.T if type(linear).__name__ == "Conv1D" else weight  # transformers' Conv1D is (in, out)

    def structure(self) -> Transformer:
        """Return a cutaway model on the meta device with the stated norm, unembedding and output projections."""
        (vocab_size, d_model), heads = self._unembedding().shape, self.num_heads or 1
        attention = {"heads": heads, "kv_heads": self.kv_heads or 1, "d_head": d_model // heads}
        if self.num_heads is not None:
            attention["d_head"] = self._head_width(d_model)
        placement = {"kind": self.placement, "final_norm": True}
        stack = {
            "layers": self.num_layers,
            "placement": placement,
            "block": {"attention": attention | {"bias": ["o"]}, "ffn": {"kind": "mlp", "bias": True}},
        }
        settings = {"form": self.form, "vocab_size": vocab_size, "d_model": d_model, self.form: stack}
        structure = build(read_config(settings | {"head": {"tied": False, "bias": "learned"}}), device="meta")
        owner = structure.stacks[self.form]
        norm = None if self.final_norm is None else self._module("final_norm", self.final_norm)
        owner.final_norm = nn.Identity() if norm is None else _as_cutaway_norm(merge_adapters(norm), d_model)
        assert self.unembed is not None
        unembed = merge_adapters(self._module("unembed", self.unembed))
        set_tensor(structure, "head.matrix.weight", self._unembedding())
        _set_bias(structure.get_submodule("head"), unembed)
        for layer, block in enumerate(get_blocks(owner)):
            for name, linear in (("attn.z", attention_module(block.attn).o), ("ffn.hidden", block.ffn.f.down)):
                weight = self._weight(f"blocks.{{i}}.{name}", layer)
                assert isinstance(linear, nn.Module)
                if weight is not None:
                    set_tensor(linear, "weight", weight)
                    _set_bias(linear, merge_adapters(self._find(f"blocks.{{i}}.{name}", layer)[0]))
        return structure


def _axes(name: str) -> str:
    return _BLOCK_AXES.get(name.removeprefix("blocks.{i}."), "BTHD" if name == _HOST else "BTd")


def _set_bias(target: nn.Module, source: nn.Module) -> None:
    bias = getattr(source, "bias", None)
    target._parameters["bias"] = nn.Parameter(bias.detach(), requires_grad=False) if isinstance(bias, Tensor) else None


def _as_cutaway_norm(norm: nn.Module, width: int) -> nn.Module:
    """Return a cutaway norm that computes the same as `norm`, as tested on random input, or `norm` itself."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape != (width,) or not weight.is_floating_point():
        return norm
    eps = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None) or torch.finfo(weight.dtype).eps
    probe = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    for config in (cfg.LayerNorm(eps=eps), cfg.RMSNorm(eps=eps), cfg.RMSNorm(eps=eps, unit_offset=True)):
        candidate = build_norm(config, width)
        set_tensor(candidate, "weight", weight)
        if isinstance(candidate, LayerNorm):
            _set_bias(candidate, norm)
        with torch.no_grad():
            if torch.allclose(candidate(probe), norm(probe), rtol=1e-3, atol=1e-3):
                return candidate
    return norm
