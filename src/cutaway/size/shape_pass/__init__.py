"""The forward and backward pass on tensor shapes: counts FLOPs, saved activations and peak memory without torch."""

from cutaway.size.shape_pass.cost_counter import CostCounter
from cutaway.size.shape_pass.execution_config import ExecutionConfig
from cutaway.size.shape_pass.passes import PassCost, inference_pass, training_pass
from cutaway.size.shape_pass.tensor import Weight

__all__ = ["CostCounter", "ExecutionConfig", "PassCost", "Weight", "inference_pass", "training_pass"]
