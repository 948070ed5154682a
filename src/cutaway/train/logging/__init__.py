"""Metrics of a run: callbacks, logs, TensorBoard, the plot of its losses, throughput."""
