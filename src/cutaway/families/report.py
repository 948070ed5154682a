"""The load report: every tensor and every field of the config accounted for."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

UNKNOWN = "this family has no such field"


@dataclass
class Report:
    """What was read, what it became, and what was passed over, with the reason."""

    source: str
    family: str
    parameters: int = 0
    dtype: str = ""
    stored: dict[str, int] = field(default_factory=dict)
    """How many tensors the file keeps in each dtype."""
    used: dict[str, list[str]] = field(default_factory=dict)
    """Our tensor → theirs."""
    ties: list[list[str]] = field(default_factory=list)
    """Names of ours that are one tensor."""
    copies: list[str] = field(default_factory=list)
    """Their tensors that repeat another, and were found equal to it."""
    looked_at: str = ""
    """What was searched for NaN and infinities: 'every number', or in large models 'small tensors'."""
    computed: list[str] = field(default_factory=list)
    """Ours that the file leaves out, because they follow from the configuration."""
    ignored: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    config_used: dict[str, Any] = field(default_factory=dict)
    config_ignored: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.missing and not self.unexpected

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        theirs = {name for names in self.used.values() for name in names}
        stored = ", ".join(f"{count} {dtype}" for dtype, count in self.stored.items())
        lines = [
            f"{self.source}: family {self.family}, {self.parameters:,} parameters, loaded as {self.dtype}",
            f"tensors: {len(theirs)} used, {len(self.copies)} repeated, {len(self.ignored)} ignored,"
            f" {len(self.missing)} missing, {len(self.unexpected)} unexpected (stored: {stored})",
        ]
        lines += [f"finite: {self.looked_at} looked at"] if self.looked_at else []
        lines += [f"tied: {' = '.join(names)}" for names in self.ties]
        lines += [f"computed, not stored: {', '.join(self.computed)}"] if self.computed else []
        lines += [f"missing: {name}" for name in self.missing] + [f"unexpected: {name}" for name in self.unexpected]
        lines += [f"ignored: {count} × {why}" for why, count in Counter(self.ignored.values()).items()]
        strange = [key for key, why in self.config_ignored.items() if why == UNKNOWN]
        known = len(self.config_ignored) - len(strange)
        lines += [f"config: {len(self.config_used)} fields used, {known} cannot matter"]
        lines += [f"config: not fields of this family: {', '.join(strange)}"] if strange else []
        return "\n".join(lines)
