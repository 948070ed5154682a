"""FLOPs of a pass: 2 a multiply-add, matrix products only (norms, softmax, activations and lookups count nothing)."""

from dataclasses import dataclass

from cutaway.size.shape_pass import CostCounter

FLOP_COMPONENTS = ("projections", "scores", "values", "ffn", "combine", "head", "embedding")
"""`combine` is a mixture's weighted sum of experts; `embedding` the projection of a narrow table."""


@dataclass(frozen=True)
class FlopCounts:
    """By part, with attention over every pair of tokens (`full`) and over those that the mask lets see (`visible`)."""

    full: dict[str, int]
    visible: dict[str, int]
    num_tokens: int
    """How many tokens it is for."""

    @property
    def total(self) -> int:
        """Over every pair: what a kernel does that computes scores first and masks them afterwards."""
        return sum(self.full.values())

    @property
    def total_visible(self) -> int:
        """Over the pairs that see each other, MLA's cached latents met as they are where that is less: the least."""
        return sum(self.visible.values())

    @property
    def per_token(self) -> float:
        return self.total / self.num_tokens

    @property
    def per_token_visible(self) -> float:
        return self.total_visible / self.num_tokens

    def scale(self, factor: int) -> "FlopCounts":
        """For so many sequences alike: products grow with them and with nothing else."""
        full, seen = ({part: factor * each for part, each in sums.items()} for sums in (self.full, self.visible))
        return FlopCounts(full, seen, factor * self.num_tokens)

    def with_last_logits_only(self) -> "FlopCounts":
        """With logits for one token only."""
        full, seen = (
            {part: flops // (self.num_tokens if part == "head" else 1) for part, flops in sums.items()}
            for sums in (self.full, self.visible)
        )
        return FlopCounts(full, seen, self.num_tokens)

    def rule_of_thumb_error(self, rule_flops: float) -> float:
        """How far a rule of thumb is off: −0.1 if it gives a tenth less than there is."""
        return rule_flops / self.total_visible - 1


def count_flops(counter: CostCounter, num_tokens: int, *, activation_checkpointing: str = "none") -> FlopCounts:
    """The FLOPs of a pass, forward and (if it has one) backward, by component; with what checkpointing repeats."""
    full, seen = dict.fromkeys(FLOP_COMPONENTS, 0), dict.fromkeys(FLOP_COMPONENTS, 0)
    for (phase, part), flops in counter.full_flops.items():
        if phase != "recompute":
            full[part] += flops
            seen[part] += counter.visible_flops[phase, part]
    for part, again, again_seen in counter.recomputed_matmuls[activation_checkpointing]:
        full[part] += again
        seen[part] += again_seen
    return FlopCounts(_drop_zeros(full), _drop_zeros(seen), num_tokens)


def _drop_zeros(sums: dict[str, int]) -> dict[str, int]:
    return {part: flops for part, flops in sums.items() if flops}
