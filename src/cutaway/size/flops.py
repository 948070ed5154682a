"""FLOP counts: 2 per multiply-add, matmuls only (norms, softmax, activations and lookups are not counted)."""

from dataclasses import dataclass

from cutaway.size.shape_pass import CostCounter
from cutaway.size.shape_pass.cost_counter import FLOAT8_SUFFIX

_FLOP_COMPONENTS = ("projections", "scores", "values", "ffn", "combine", "head", "embedding", "adapters")
"""`combine` is the weighted sum of the MoE experts, `embedding` is the projection of a factorized embedding."""


@dataclass(frozen=True)
class FlopCounts:
    """FLOPs of a pass by component: with attention over all pairs of tokens (`full`), or visible pairs (`visible`)."""

    full: dict[str, int]
    visible: dict[str, int]
    num_tokens: int
    """Number of tokens that the counts are for."""
    float8: int = 0
    """FLOPs in fp8 among those of visible pairs (float8 training)."""

    @property
    def total(self) -> int:
        """FLOPs with attention over all pairs of tokens, as in a kernel that computes all scores, then masks them."""
        return sum(self.full.values())

    @property
    def total_visible(self) -> int:
        """Minimum FLOPs: attention over visible pairs only, and MLA in the absorbed form if that needs fewer FLOPs."""
        return sum(self.visible.values())

    @property
    def per_token(self) -> float:
        return self.total / self.num_tokens

    @property
    def per_token_visible(self) -> float:
        return self.total_visible / self.num_tokens

    def with_last_logits_only(self) -> "FlopCounts":
        """Return the counts of the same pass if it computes the logits of only one of its tokens."""
        full, visible = (
            {component: flops // (self.num_tokens if component == "head" else 1) for component, flops in counts.items()}
            for counts in (self.full, self.visible)
        )
        return FlopCounts(full, visible, self.num_tokens)

    def rule_of_thumb_error(self, rule_flops: float) -> float:
        """Relative error of a rule of thumb, such as 6·N·D: −0.1 if `rule_flops` is 10 % below `total_visible`."""
        return rule_flops / self.total_visible - 1


def count_flops(counter: CostCounter, num_tokens: int, *, activation_checkpointing: str = "none") -> FlopCounts:
    """FLOPs of a pass by component: of the forward pass and, if recorded, of the backward pass and recomputation."""
    full, visible = dict.fromkeys(_FLOP_COMPONENTS, 0), dict.fromkeys(_FLOP_COMPONENTS, 0)
    matmuls = [
        (component, flops, counter.visible_flops[phase, component])
        for (phase, component), flops in counter.full_flops.items()
        if phase != "recompute"
    ]
    float8 = 0
    for component, full_flops, visible_flops in matmuls + counter.recomputed_matmuls[activation_checkpointing]:
        name = component.removesuffix(FLOAT8_SUFFIX)
        full[name] += full_flops
        visible[name] += visible_flops
        float8 += visible_flops if name != component else 0
    return FlopCounts(_drop_zeros(full), _drop_zeros(visible), num_tokens, float8)


def _drop_zeros(sums: dict[str, int]) -> dict[str, int]:
    return {component: flops for component, flops in sums.items() if flops}
