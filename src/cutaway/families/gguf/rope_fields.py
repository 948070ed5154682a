"""RoPE's settings as GGUF keeps them: some among the settings, some as tensors of factors."""

import math
from dataclasses import dataclass
from typing import Any

from cutaway.config import Llama3Scaling
from cutaway.errors import ConfigError
from cutaway.families.config_fields import HFConfigReader
from cutaway.families.config_tree import ConfigTree

ROPE_FREQS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
LLAMA3_SCALINGS = (Llama3Scaling(factor=8.0), Llama3Scaling(factor=32.0))
"""Llama 3.1 and 3.2: the format keeps only the factors that they come to."""


def llama3_rope_factors(scaling: Llama3Scaling, theta: float, rotary_dim: int) -> list[float]:
    """What each frequency is divided by."""
    low, high, length = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_length
    factors = []
    for pair in range(rotary_dim // 2):
        turns = length / (2 * math.pi * theta ** (2 * pair / rotary_dim))
        mix = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - mix) / scaling.factor + mix))
    return factors


@dataclass(frozen=True)
class GGUFRopeField:
    """RoPE's settings; some are kept as tensors, which are handed over as lists."""

    arch: str
    sliding_window_theta: float | None = None
    """Near layers turn by this theta, unscaled (Gemma 3)."""

    @property
    def keys(self) -> tuple[str, ...]:
        names = (
            "freq_base",
            "freq_base_swa",
            "dimension_count",
            "scaling.type",
            "scaling.factor",
            "scaling.attn_factor",
        )
        more = ("scaling.original_context_length", "scaling.yarn_beta_fast", "scaling.yarn_beta_slow", "scale_linear")
        return (
            *(f"{self.arch}.rope.{name}" for name in (*names, *more)),
            ROPE_FREQS,
            ROPE_FACTORS_LONG,
            ROPE_FACTORS_SHORT,
        )

    def from_hf(self, metadata: HFConfigReader, tree: ConfigTree) -> None:
        at = f"{self.arch}.rope."
        theta = float(metadata.get_number(at + "freq_base", 10000.0))
        blocks = tree.blocks("decoder")
        attention = blocks[0]["attention"]
        head = attention.get("d_head") or tree.data["d_model"] // attention["heads"]
        rotary_dim = int(metadata.get_number(at + "dimension_count", head))
        rope = {
            "kind": "rope",
            "theta": theta,
            "rotary_dim": rotary_dim,
            "scaling": self._scaling_from_gguf(metadata, theta, rotary_dim),
        }
        near = rope
        if self.sliding_window_theta is not None:
            local = float(metadata.get_number(at + "freq_base_swa", self.sliding_window_theta))
            near = {"kind": "rope", "theta": local, "rotary_dim": rotary_dim, "scaling": {"kind": "none"}}
        for block in blocks:
            block["attention"]["position"] = near if block["attention"].get("window") else rope

    def _scaling_from_gguf(self, metadata: HFConfigReader, theta: float, rotary_dim: int) -> dict[str, Any]:
        at = f"{self.arch}.rope.scaling."
        kind = metadata.get(at + "type", "none")
        factor = float(metadata.get_number(at + "factor", metadata.get_number(f"{self.arch}.rope.scale_linear", 1.0)))
        context = metadata.get_number(f"{self.arch}.context_length")
        original = metadata.get_number(at + "original_context_length", context)
        long, short, given = metadata.get(ROPE_FACTORS_LONG), metadata.get(ROPE_FACTORS_SHORT), metadata.get(ROPE_FREQS)
        if long and short:
            grown = math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0
            loud = float(metadata.get_number(at + "attn_factor", grown))
            factors = {"short_factors": short, "long_factors": long}
            return {"kind": "longrope", **factors, "original_length": original, "attention_factor": loud}
        if given:
            for scaling in LLAMA3_SCALINGS:
                meant = llama3_rope_factors(scaling, theta, rotary_dim)
                if len(meant) == len(given) and all(abs(a - b) < 1e-4 * b for a, b in zip(meant, given, strict=True)):
                    return scaling.model_dump()
            return {"kind": "longrope", "short_factors": given, "long_factors": given, "original_length": context}
        if kind == "yarn":
            fast, slow = (
                metadata.get_number(at + "yarn_beta_fast", 32.0),
                metadata.get_number(at + "yarn_beta_slow", 1.0),
            )
            betas = {"beta_fast": float(fast), "beta_slow": float(slow)}
            return {"kind": "yarn", "factor": factor, "original_length": original, **betas}
        if kind == "linear" and factor != 1.0:
            return {"kind": "linear", "factor": factor}
        if kind in ("none", "linear", "longrope"):
            return {"kind": "none"}
        raise ConfigError(f"its RoPE is scaled by '{kind}', which cutaway does not know")

    def to_hf(self, tree: ConfigTree, metadata: dict[str, Any]) -> None:
        at = f"{self.arch}.rope."
        blocks = tree.blocks("decoder")
        far = [block["attention"]["position"] for block in blocks if not block["attention"].get("window")]
        rope = (far or [blocks[0]["attention"]["position"]])[0]
        scaling = rope["scaling"]
        metadata |= {at + "freq_base": rope["theta"], at + "dimension_count": rope["rotary_dim"]}
        kind = scaling["kind"]
        if kind in ("linear", "yarn"):
            metadata |= {at + "scaling.type": kind, at + "scaling.factor": scaling["factor"]}
        if kind == "yarn":
            metadata |= {at + f"scaling.yarn_{key}": scaling[key] for key in ("beta_fast", "beta_slow")}
        if kind in ("yarn", "longrope"):
            metadata[at + "scaling.original_context_length"] = scaling["original_length"]
        if kind == "llama3":
            metadata[ROPE_FREQS] = llama3_rope_factors(Llama3Scaling(**scaling), rope["theta"], rope["rotary_dim"])
        if kind == "longrope":
            metadata |= {
                ROPE_FACTORS_LONG: list(scaling["long_factors"]),
                ROPE_FACTORS_SHORT: list(scaling["short_factors"]),
            }
            metadata[at + "scaling.attn_factor"] = scaling["attention_factor"]
