"""What this machine reaches: its bare limits, and what a real model makes of them."""

from cutaway.bench.machine import STAGES, measure

__all__ = ["STAGES", "measure"]
