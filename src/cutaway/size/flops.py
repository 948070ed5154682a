"""FLOPs of a pass: 2 a multiply-add, matrix products only (norms, softmax, activations and lookups count nothing)."""

from dataclasses import dataclass

from cutaway.size.walk import Tally

PARTS = ("projections", "scores", "values", "ffn", "combine", "head", "embedding")
"""`combine` is a mixture's weighted sum of experts; `embedding` the projection of a narrow table."""


@dataclass(frozen=True)
class Flops:
    """By part, with attention over every pair of tokens (`full`) and over those that the mask lets see (`seen`)."""

    full: dict[str, int]
    seen: dict[str, int]
    tokens: int
    """How many tokens it is for."""

    @property
    def total(self) -> int:
        """Over every pair: what a kernel does that computes scores first and masks them afterwards."""
        return sum(self.full.values())

    @property
    def total_seen(self) -> int:
        """Over the pairs that see each other, MLA's cached latents met as they are where that is less: the least."""
        return sum(self.seen.values())

    @property
    def per_token(self) -> float:
        return self.total / self.tokens

    @property
    def per_token_seen(self) -> float:
        return self.total_seen / self.tokens

    def times(self, batch: int) -> "Flops":
        """For so many sequences alike: products grow with them and with nothing else."""
        full, seen = ({part: batch * each for part, each in sums.items()} for sums in (self.full, self.seen))
        return Flops(full, seen, batch * self.tokens)

    def head_once(self) -> "Flops":
        """With logits for one token only."""
        full, seen = (
            {part: flops // (self.tokens if part == "head" else 1) for part, flops in sums.items()}
            for sums in (self.full, self.seen)
        )
        return Flops(full, seen, self.tokens)

    def against(self, rule: float) -> float:
        """How far a rule of thumb is off: −0.1 if it gives a tenth less than there is."""
        return rule / self.total_seen - 1


def flops_of(tally: Tally, tokens: int, *, recompute: str = "none") -> Flops:
    """The FLOPs of a pass there and, if it has one, back, part by part; with those that a recompute mode does again."""
    full, seen = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    for (phase, part), flops in tally.full.items():
        if phase != "recompute":
            full[part] += flops
            seen[part] += tally.seen[phase, part]
    for part, again, again_seen in tally.again[recompute]:
        full[part] += again
        seen[part] += again_seen
    return Flops(nonzero(full), nonzero(seen), tokens)


def nonzero(sums: dict[str, int]) -> dict[str, int]:
    return {part: flops for part, flops in sums.items() if flops}
