"""RoPE config fields of GGUF: metadata keys, and factors stored as tensors."""

import math
from dataclasses import dataclass

from cutaway.config import Llama3Scaling
from cutaway.errors import ConfigError
from cutaway.families.config_fields import HFConfigReader
from cutaway.families.config_tree import ConfigTree, Node
from cutaway.families.rope_fields import resolve_head_dim

_ROPE_FREQS = "rope_freqs.weight"
ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (_ROPE_FREQS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT)
_LLAMA3_SCALINGS = (Llama3Scaling(factor=8.0), Llama3Scaling(factor=32.0))
"""Scalings of Llama 3.1 and 3.2. GGUF stores only frequency divisors, which are compared with these scalings."""


def llama3_rope_factors(scaling: Llama3Scaling, theta: float, rotary_dim: int) -> list[float]:
    """Divisor of each RoPE frequency under Llama 3 scaling."""
    low, high, length = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_length
    factors = []
    for pair in range(rotary_dim // 2):
        num_rotations = length / (2 * math.pi * theta ** (2 * pair / rotary_dim))
        smooth = min(1.0, max(0.0, (num_rotations - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return factors


@dataclass(frozen=True)
class GGUFRopeField:
    """Config field of the RoPE settings. The file's tensors of RoPE factors must be in the metadata, as lists."""

    arch: str
    sliding_window_theta: float | None = None
    """RoPE theta of sliding-window layers, which have no scaling (Gemma 3). None: all layers have the same RoPE."""

    @property
    def keys(self) -> tuple[str, ...]:
        names = "freq_base freq_base_swa dimension_count scale_linear scaling.type scaling.factor scaling.attn_factor"
        names += " scaling.original_context_length scaling.yarn_beta_fast scaling.yarn_beta_slow"
        return (*(f"{self.arch}.rope.{name}" for name in names.split()), *ROPE_TENSORS)

    def from_hf(self, metadata: HFConfigReader, tree: ConfigTree) -> None:
        prefix = f"{self.arch}.rope."
        theta = float(metadata.get_number(prefix + "freq_base", 10000.0))
        blocks = tree.blocks("decoder")
        rotary_dim = int(metadata.get_number(prefix + "dimension_count", resolve_head_dim(tree, "decoder")))
        scaling = self._scaling_from_gguf(metadata, theta, rotary_dim)
        sliding_rope = rope = {"kind": "rope", "theta": theta, "rotary_dim": rotary_dim, "scaling": scaling}
        if self.sliding_window_theta is not None:
            local = float(metadata.get_number(prefix + "freq_base_swa", self.sliding_window_theta))
            sliding_rope = rope | {"theta": local, "scaling": {"kind": "none"}}
        for block in blocks:
            block["attention"]["position"] = sliding_rope if block["attention"].get("window") else rope

    def _scaling_from_gguf(self, metadata: HFConfigReader, theta: float, rotary_dim: int) -> Node:
        prefix = f"{self.arch}.rope.scaling."
        kind = metadata.get(prefix + "type", "none")
        default_factor = metadata.get_number(f"{self.arch}.rope.scale_linear", 1.0)
        factor = float(metadata.get_number(prefix + "factor", default_factor))
        context = metadata.get_number(f"{self.arch}.context_length")
        original = metadata.get_number(prefix + "original_context_length", context)
        freqs, long, short = (metadata.get(name) for name in ROPE_TENSORS)
        if long and short:
            ratio = math.log(context / original) / math.log(original) if context > original else 0.0
            attention_factor = float(metadata.get_number(prefix + "attn_factor", math.sqrt(1 + ratio)))
            factors = {"short_factors": short, "long_factors": long}
            return {"kind": "longrope", **factors, "original_length": original, "attention_factor": attention_factor}
        if freqs:
            for scaling in _LLAMA3_SCALINGS:
                expected = llama3_rope_factors(scaling, theta, rotary_dim)
                is_close = [abs(a - b) < 1e-4 * b for a, b in zip(expected, freqs, strict=False)]
                if len(expected) == len(freqs) and all(is_close):
                    return scaling.model_dump()
            return {"kind": "longrope", "short_factors": freqs, "long_factors": freqs, "original_length": context}
        if kind == "yarn":
            fast = float(metadata.get_number(prefix + "yarn_beta_fast", 32.0))
            slow = float(metadata.get_number(prefix + "yarn_beta_slow", 1.0))
            betas = {"beta_fast": fast, "beta_slow": slow}
            return {"kind": "yarn", "factor": factor, "original_length": original, **betas}
        if kind == "linear" and factor != 1.0:
            return {"kind": "linear", "factor": factor}
        if kind in ("none", "linear", "longrope"):
            return {"kind": "none"}
        raise ConfigError(f"the RoPE scaling type is '{kind}'; cutaway supports none, linear, yarn and longrope")

    def to_hf(self, tree: ConfigTree, metadata: dict[str, object]) -> None:
        prefix = f"{self.arch}.rope."
        attentions = [block["attention"] for block in tree.blocks("decoder")]
        full_attentions = [attention for attention in attentions if not attention.get("window")]
        rope = (full_attentions or attentions)[0]["position"]
        scaling = rope["scaling"]
        metadata |= {prefix + "freq_base": rope["theta"], prefix + "dimension_count": rope["rotary_dim"]}
        kind = scaling["kind"]
        if kind in ("linear", "yarn"):
            metadata |= {prefix + "scaling.type": kind, prefix + "scaling.factor": scaling["factor"]}
        if kind == "yarn":
            metadata |= {prefix + f"scaling.yarn_{key}": scaling[key] for key in ("beta_fast", "beta_slow")}
        if kind in ("yarn", "longrope"):
            metadata[prefix + "scaling.original_context_length"] = scaling["original_length"]
        if kind == "llama3":
            metadata[_ROPE_FREQS] = llama3_rope_factors(Llama3Scaling(**scaling), rope["theta"], rope["rotary_dim"])
        if kind == "longrope":
            metadata[ROPE_FACTORS_LONG] = list(scaling["long_factors"])
            metadata[ROPE_FACTORS_SHORT] = list(scaling["short_factors"])
            metadata[prefix + "scaling.attn_factor"] = scaling["attention_factor"]
