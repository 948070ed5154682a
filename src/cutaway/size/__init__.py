"""Parameters, FLOPs, memory and time of a model, computed from its configuration. Imports no torch."""

from cutaway.callable_module import make_callable
from cutaway.size.estimate import SizeEstimate, size
from cutaway.size.hardware import Hardware, custom_hardware, get_hardware, list_hardware
from cutaway.size.options import SizeOptions
from cutaway.size.parameters import LayerParameterCounts, ParameterCounts, count_parameters

__all__ = [
    "Hardware",
    "LayerParameterCounts",
    "ParameterCounts",
    "SizeEstimate",
    "SizeOptions",
    "count_parameters",
    "custom_hardware",
    "get_hardware",
    "list_hardware",
    "size",
]

make_callable(__name__, size)
