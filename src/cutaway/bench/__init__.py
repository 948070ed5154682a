"""What this machine reaches: its bare limits, and what a real model makes of them."""

from cutaway.bench.hardware import NUM_STAGES, measure_hardware

__all__ = ["NUM_STAGES", "measure_hardware"]
