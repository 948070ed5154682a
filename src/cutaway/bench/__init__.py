"""Benchmarks: memory bandwidth and matmul FLOP/s of this machine, and the fraction of them that a model reaches."""

from cutaway.bench.hardware import NUM_STAGES, measure_hardware

__all__ = ["NUM_STAGES", "measure_hardware"]
