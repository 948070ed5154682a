"""LoRA: configuration of a low-rank adapter, which is added to linear layers of a model."""

import math
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field, model_validator

from cutaway.config.node import ConfigNode, PositiveFloat, PositiveInt, Probability
from cutaway.errors import InputError

ALL_LINEAR = "all-linear"
"""Target that stands for all linear layers of attention and FFN, those of experts included."""
ALL_LINEAR_PATTERNS = ("attn.*", "cross.*", "ffn.*")
NOT_IN_ALL_LINEAR = "shared_gate"
"""The gate of a shared expert has one output, like a row of the router, which has no adapter either."""

NAMES_IN_TRANSFORMERS = {
    "q_proj": "attn.q",
    "k_proj": "attn.k",
    "v_proj": "attn.v",
    "o_proj": "attn.o",
    "out_proj": "attn.o",
    "query": "attn.q",
    "key": "attn.k",
    "value": "attn.v",
    "qkv_proj": "attn.q, attn.k and attn.v",
    "c_attn": "attn.q, attn.k and attn.v",
    "query_key_value": "attn.q, attn.k and attn.v",
    "gate_proj": "ffn.gate",
    "up_proj": "ffn.up",
    "down_proj": "ffn.down",
    "c_fc": "ffn.up",
    "fc1": "ffn.up",
    "fc2": "ffn.down",
    "embed_tokens": "embed",
    "wte": "embed",
}
"""Names of modules of transformers, with which targets are written for PEFT, and the sites here."""
WITHOUT_ADAPTERS = {
    "the output matrix, which has no adapters: leave it out, or train all weights, as in `cutaway train sft`": (
        "lm_head",
        "head",
        "embed_out",
        "unembed",
    ),
    "the head of a task, which is trained fully beside the adapter: leave it out": ("score", "classifier"),
    "the router, which has no adapters and is not trained: leave it out, or adapt the experts with 'experts.*'": (
        "router",
    ),
}
"""What a target means that matches no layer, because layers of this kind have no adapters → names of such targets."""


class LoRA(ConfigNode):
    """y = W·x + (alpha / rank)·B·A·x with trained A and B and frozen W. https://arxiv.org/abs/2106.09685"""

    rank: PositiveInt = 16
    alpha: PositiveFloat | None = None
    """The update is multiplied by alpha / rank, or by alpha / √rank with use_rslora. Default: 2·rank."""
    dropout: Probability = 0.0
    """Dropout on the input of A."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = (ALL_LINEAR,)
    """Adapted layers: 'all-linear', or patterns of site names: 'attn.q', 'ffn.*', 'blocks.0.attn.v', 'experts.*',
    'embed'."""
    use_dora: bool = False
    """DoRA: train the norm of each row of the weight, separately from its direction. https://arxiv.org/abs/2402.09353"""
    use_rslora: bool = False
    """rsLoRA: scale by alpha / √rank. https://arxiv.org/abs/2312.03732"""
    rank_pattern: dict[str, PositiveInt] = {}
    """Rank of the layers that match a pattern, instead of `rank`."""
    alpha_pattern: dict[str, PositiveFloat] = {}
    """Alpha of the layers that match a pattern, instead of `alpha`."""

    @model_validator(mode="after")
    def _check_targets(self) -> "LoRA":
        if any(not target.strip() for target in self.targets):
            raise ValueError("targets has an empty pattern; use 'all-linear', or site names such as 'attn.q'")
        return self

    def matches(self, site: str) -> bool:
        """Whether the layer with this site name is adapted."""
        return any(_matches_target(target, site) for target in self.targets)

    def check_targets(self, sites: Collection[str]) -> None:
        """Raise InputError if a target matches none of the layers of a model, which have these site names."""
        for target in self.targets:
            if any(_matches_target(target, site) for site in sites):
                continue
            leaf = target.rpartition(".")[2]
            name = NAMES_IN_TRANSFORMERS.get(leaf)
            hint = "" if name is None else f" ({target} in transformers is {name} here)"
            hint = next((f" (it is {reason})" for reason, names in WITHOUT_ADAPTERS.items() if leaf in names), hint)
            examples = dict.fromkeys(site.partition("blocks.")[2].partition(".")[2] or site for site in sites)
            raise InputError(
                f"adapter target '{target}' matches no layer of this model{hint}; use '{ALL_LINEAR}', or some of:"
                f" {', '.join(list(examples)[:12])}"
            )

    def rank_of(self, site: str) -> int:
        """Rank of the layer with this site name."""
        return next((rank for pattern, rank in self.rank_pattern.items() if matches_site(pattern, site)), self.rank)

    def scaling_of(self, site: str) -> float:
        """Factor on B·A of the layer with this site name."""
        rank = self.rank_of(site)
        default = 2.0 * rank if self.alpha is None else self.alpha
        alpha = next((a for pattern, a in self.alpha_pattern.items() if matches_site(pattern, site)), default)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _matches_target(target: str, site: str) -> bool:
    if target != ALL_LINEAR:
        return matches_site(target, site)
    return not site.endswith(NOT_IN_ALL_LINEAR) and any(matches_site(each, site) for each in ALL_LINEAR_PATTERNS)


def matches_site(pattern: str, site: str) -> bool:
    """Whether a pattern matches a site name, or the end of it: 'attn.q' matches 'blocks.3.attn.q'."""
    return fnmatchcase(site, pattern) or fnmatchcase(site, f"*.{pattern}")
