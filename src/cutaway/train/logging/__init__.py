"""Logging of a run: callbacks, metrics log, TensorBoard, loss plot, throughput."""
