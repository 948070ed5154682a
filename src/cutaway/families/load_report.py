"""Load report: how every tensor and every config.json key was used."""

from collections import Counter
from dataclasses import asdict, dataclass, field

UNKNOWN_KEY_REASON = "unknown key of this family"


@dataclass
class LoadReport:
    """Loaded, tied, duplicate, computed and ignored tensors, and used and ignored config keys, with reasons."""

    source: str
    family: str
    num_parameters: int = 0
    dtype: str = ""
    stored_dtypes: dict[str, int] = field(default_factory=dict)
    """dtype in the file → number of tensors."""
    loaded_weights: dict[str, list[str]] = field(default_factory=dict)
    """Model key → checkpoint keys."""
    tied_weights: list[list[str]] = field(default_factory=list)
    """Groups of model keys that are the same tensor."""
    duplicate_weights: list[str] = field(default_factory=list)
    """Checkpoint tensors that are copies of another tensor. Loading has checked that they are equal."""
    finite_check: str = ""
    """Tensors checked for NaN and infinity: 'all tensors', or in large models 'small tensors'."""
    quantization: list[str] = field(default_factory=list)
    """Lines on the quantization of a checkpoint: method, packed and dequantized matrices, and what is not applied."""
    device: str = ""
    """Device that computes, if blocks are offloaded to CPU memory."""
    offloaded_modules: list[str] = field(default_factory=list)
    """Modules whose weights are in CPU memory, and are copied to `device` in each forward pass."""
    offloaded_bytes: int = 0
    offload_bandwidth: float | None = None
    """Measured bytes per second of a copy from CPU memory to `device`."""
    computed_weights: list[str] = field(default_factory=list)
    """Model keys not in the file, computed from the configuration."""
    ignored_weights: dict[str, str] = field(default_factory=dict)
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    used_config_keys: dict[str, object] = field(default_factory=dict)
    ignored_config_keys: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.missing_keys and not self.unexpected_keys

    @property
    def offload_summary(self) -> str:
        """What is offloaded, and the speed that follows from it; empty if all weights are on the device."""
        if not self.offloaded_modules:
            return ""
        first, last = self.offloaded_modules[0], self.offloaded_modules[-1]
        names = f"{first} to {last}" if first != last else first
        text = f"offloaded to CPU memory: {names} ({self.offloaded_bytes / 1e9:,.3g} GB)"
        if self.offload_bandwidth is None:
            return text
        seconds = self.offloaded_bytes / self.offload_bandwidth
        return (
            f"{text}; each step copies them to {self.device} at {self.offload_bandwidth / 1e9:,.3g} GB/s, which takes"
            f" {seconds:,.3g} s: at most {1 / seconds:,.3g} tokens/s per sequence"
        )

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        used = {name for names in self.loaded_weights.values() for name in names}
        stored = ", ".join(f"{count} {dtype}" for dtype, count in self.stored_dtypes.items())
        lines = [
            f"{self.source}: family {self.family}, {self.num_parameters:,} parameters, loaded as {self.dtype}",
            f"tensors: {len(used)} used, {len(self.duplicate_weights)} duplicate, {len(self.ignored_weights)} ignored,"
            f" {len(self.missing_keys)} missing, {len(self.unexpected_keys)} unexpected (stored: {stored})",
        ]
        lines += self.quantization
        lines += [f"checked for NaN and infinity: {self.finite_check}"] if self.finite_check else []
        lines += [f"tied: {' = '.join(names)}" for names in self.tied_weights]
        lines += [self.offload_summary] if self.offload_summary else []
        lines += [f"computed, not stored: {', '.join(self.computed_weights)}"] if self.computed_weights else []
        lines += [f"missing: {name}" for name in self.missing_keys]
        lines += [f"unexpected: {name}" for name in self.unexpected_keys]
        lines += [f"ignored: {count} × {reason}" for reason, count in Counter(self.ignored_weights.values()).items()]
        unknown = [key for key, reason in self.ignored_config_keys.items() if reason == UNKNOWN_KEY_REASON]
        known = len(self.ignored_config_keys) - len(unknown)
        lines += [f"config: {len(self.used_config_keys)} keys used, {known} ignored without effect"]
        lines += [f"config: keys unknown to this family: {', '.join(unknown)}"] if unknown else []
        return "\n".join(lines)
