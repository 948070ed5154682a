"""The load report: every tensor and every field of the config accounted for."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

UNKNOWN_KEY_REASON = "this family has no such field"


@dataclass
class LoadReport:
    """What was read, what it became, and what was passed over, with the reason."""

    source: str
    family: str
    num_parameters: int = 0
    dtype: str = ""
    stored_dtypes: dict[str, int] = field(default_factory=dict)
    """How many tensors the file keeps in each dtype."""
    loaded_weights: dict[str, list[str]] = field(default_factory=dict)
    """Our tensor → theirs."""
    tied_weights: list[list[str]] = field(default_factory=list)
    """Names of ours that are one tensor."""
    duplicate_weights: list[str] = field(default_factory=list)
    """Their tensors that repeat another, and were found equal to it."""
    finite_check: str = ""
    """What was searched for NaN and infinities: 'all tensors', or in large models 'small tensors'."""
    computed_weights: list[str] = field(default_factory=list)
    """Ours that the file leaves out, because they follow from the configuration."""
    ignored_weights: dict[str, str] = field(default_factory=dict)
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    used_config_keys: dict[str, Any] = field(default_factory=dict)
    ignored_config_keys: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.missing_keys and not self.unexpected_keys

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        used = {name for names in self.loaded_weights.values() for name in names}
        stored = ", ".join(f"{count} {dtype}" for dtype, count in self.stored_dtypes.items())
        lines = [
            f"{self.source}: family {self.family}, {self.num_parameters:,} parameters, loaded as {self.dtype}",
            f"tensors: {len(used)} used, {len(self.duplicate_weights)} repeated, {len(self.ignored_weights)} ignored,"
            f" {len(self.missing_keys)} missing, {len(self.unexpected_keys)} unexpected (stored: {stored})",
        ]
        lines += [f"finite: {self.finite_check} looked at"] if self.finite_check else []
        lines += [f"tied: {' = '.join(names)}" for names in self.tied_weights]
        lines += [f"computed, not stored: {', '.join(self.computed_weights)}"] if self.computed_weights else []
        lines += [f"missing: {name}" for name in self.missing_keys] + [
            f"unexpected: {name}" for name in self.unexpected_keys
        ]
        lines += [f"ignored: {count} × {why}" for why, count in Counter(self.ignored_weights.values()).items()]
        strange = [key for key, why in self.ignored_config_keys.items() if why == UNKNOWN_KEY_REASON]
        known = len(self.ignored_config_keys) - len(strange)
        lines += [f"config: {len(self.used_config_keys)} fields used, {known} cannot matter"]
        lines += [f"config: not fields of this family: {', '.join(strange)}"] if strange else []
        return "\n".join(lines)
