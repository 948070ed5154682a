"""Benchmarks: memory bandwidth and matmul FLOP/s of this machine, and a model's fraction of the roofline bound."""

from cutaway.bench.hardware import NUM_STAGES, measure_hardware

__all__ = ["NUM_STAGES", "measure_hardware"]
