"""Text generation: KV caches, sampling, beam search, speculative decoding, and the continuous-batching engine."""

from cutaway.callable_module import make_callable
from cutaway.generate.api import generate
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.engine import BusyError, Engine, EngineError
from cutaway.generate.engine.output import Completion, CompletionChunk
from cutaway.generate.engine.request import Request, RequestGroup
from cutaway.generate.sampling.sampling_params import SamplingParams

__all__ = [
    "BusyError",
    "Completion",
    "CompletionChunk",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Request",
    "RequestGroup",
    "SamplingParams",
    "generate",
]

make_callable(__name__, generate)
