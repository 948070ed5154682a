"""Instruments that watch a model run: what it multiplies, attends to, reads, and where two runs part."""
