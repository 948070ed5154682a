"""From logits to text: caches, sampling, beams, speculation, and the engine that does it for many at once."""

from cutaway.callable_module import make_callable
from cutaway.generate.answer import Generation, Piece
from cutaway.generate.engine import BusyError, Engine, EngineError
from cutaway.generate.plan import Plan
from cutaway.generate.settings import Settings
from cutaway.generate.texts import generate
from cutaway.generate.ticket import Ticket

__all__ = ["BusyError", "Engine", "EngineError", "Generation", "Piece", "Plan", "Settings", "Ticket", "generate"]

make_callable(__name__, generate)
