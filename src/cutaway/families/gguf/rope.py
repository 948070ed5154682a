"""RoPE's settings as GGUF keeps them: some among the settings, some as tensors of factors."""

import math
from dataclasses import dataclass
from typing import Any

from cutaway.config import Llama3Scaling
from cutaway.errors import ConfigError
from cutaway.families.fields import Theirs
from cutaway.families.tree import Tree

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
PUBLISHED = (Llama3Scaling(factor=8.0), Llama3Scaling(factor=32.0))
"""Llama 3.1 and 3.2: the format keeps only the factors that they come to."""


def llama3_factors(scaling: Llama3Scaling, theta: float, width: int) -> list[float]:
    """What each frequency is divided by."""
    low, high, length = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_length
    factors = []
    for pair in range(width // 2):
        turns = length / (2 * math.pi * theta ** (2 * pair / width))
        mix = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - mix) / scaling.factor + mix))
    return factors


@dataclass(frozen=True)
class GgufRope:
    """RoPE's settings; some are kept as tensors, which are handed over as lists."""

    arch: str
    local_theta: float | None = None
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
        return (*(f"{self.arch}.rope.{name}" for name in (*names, *more)), FREQUENCIES, LONG, SHORT)

    def read(self, theirs: Theirs, ours: Tree) -> None:
        at = f"{self.arch}.rope."
        theta = float(theirs.number(at + "freq_base", 10000.0))
        blocks = ours.blocks("decoder")
        attention = blocks[0]["attention"]
        head = attention.get("d_head") or ours.data["d_model"] // attention["heads"]
        width = int(theirs.number(at + "dimension_count", head))
        rope = {"kind": "rope", "theta": theta, "width": width, "scaling": self._scaling(theirs, theta, width)}
        near = rope
        if self.local_theta is not None:
            local = float(theirs.number(at + "freq_base_swa", self.local_theta))
            near = {"kind": "rope", "theta": local, "width": width, "scaling": {"kind": "none"}}
        for block in blocks:
            block["attention"]["position"] = near if block["attention"].get("window") else rope

    def _scaling(self, theirs: Theirs, theta: float, width: int) -> dict[str, Any]:
        at = f"{self.arch}.rope.scaling."
        kind = theirs.get(at + "type", "none")
        factor = float(theirs.number(at + "factor", theirs.number(f"{self.arch}.rope.scale_linear", 1.0)))
        context = theirs.number(f"{self.arch}.context_length")
        original = theirs.number(at + "original_context_length", context)
        long, short, given = theirs.get(LONG), theirs.get(SHORT), theirs.get(FREQUENCIES)
        if long and short:
            grown = math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0
            loud = float(theirs.number(at + "attn_factor", grown))
            factors = {"short_factors": short, "long_factors": long}
            return {"kind": "longrope", **factors, "original_length": original, "attention_factor": loud}
        if given:
            for scaling in PUBLISHED:
                meant = llama3_factors(scaling, theta, width)
                if len(meant) == len(given) and all(abs(a - b) < 1e-4 * b for a, b in zip(meant, given, strict=True)):
                    return scaling.model_dump()
            return {"kind": "longrope", "short_factors": given, "long_factors": given, "original_length": context}
        if kind == "yarn":
            fast, slow = theirs.number(at + "yarn_beta_fast", 32.0), theirs.number(at + "yarn_beta_slow", 1.0)
            betas = {"beta_fast": float(fast), "beta_slow": float(slow)}
            return {"kind": "yarn", "factor": factor, "original_length": original, **betas}
        if kind == "linear" and factor != 1.0:
            return {"kind": "linear", "factor": factor}
        if kind in ("none", "linear", "longrope"):
            return {"kind": "none"}
        raise ConfigError(f"its RoPE is scaled by '{kind}', which cutaway does not know")

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        at = f"{self.arch}.rope."
        blocks = ours.blocks("decoder")
        far = [block["attention"]["position"] for block in blocks if not block["attention"].get("window")]
        rope = (far or [blocks[0]["attention"]["position"]])[0]
        scaling = rope["scaling"]
        theirs |= {at + "freq_base": rope["theta"], at + "dimension_count": rope["width"]}
        kind = scaling["kind"]
        if kind in ("linear", "yarn"):
            theirs |= {at + "scaling.type": kind, at + "scaling.factor": scaling["factor"]}
        if kind == "yarn":
            theirs |= {at + f"scaling.yarn_{key}": scaling[key] for key in ("beta_fast", "beta_slow")}
        if kind in ("yarn", "longrope"):
            theirs[at + "scaling.original_context_length"] = scaling["original_length"]
        if kind == "llama3":
            theirs[FREQUENCIES] = llama3_factors(Llama3Scaling(**scaling), rope["theta"], rope["width"])
        if kind == "longrope":
            theirs |= {LONG: list(scaling["long_factors"]), SHORT: list(scaling["short_factors"])}
            theirs[at + "scaling.attn_factor"] = scaling["attention_factor"]
