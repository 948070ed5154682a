"""What a configuration costs before it exists: parameters, FLOPs, bytes, time. No torch here."""

from cutaway.callable_module import make_callable
from cutaway.size.hardware import Hardware, custom, hardware, known
from cutaway.size.params import LayerParams, Params, count
from cutaway.size.question import Question
from cutaway.size.sizing import Size, size

__all__ = ["Hardware", "LayerParams", "Params", "Question", "Size", "count", "custom", "hardware", "known", "size"]

make_callable(__name__, size)
