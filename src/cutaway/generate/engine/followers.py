"""Engines on several processes: rank 0 takes requests, and the other ranks, its followers, run the same steps.

A step depends only on the state of the engine and on the requests that were submitted or aborted before it. Rank 0
broadcasts these at the start of each step, so that the engines of all ranks have the same state.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, NamedTuple

from cutaway.errors import CutawayError, InputError
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.request import Request
from cutaway.generate.generation_config import CheckpointLike, unpack_checkpoint
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.model.parallel.process_group import TensorParallel

if TYPE_CHECKING:
    from cutaway.generate.engine.engine import Engine

_UNLIMITED = 2**62


class Submission(NamedTuple):
    """Arguments of `Engine.submit`."""

    prompt: Sequence[int]
    sampling_params: SamplingParams
    seed: int
    output_prefix: Sequence[int]
    adapter: str | None


class StepRequests(NamedTuple):
    """Requests that were submitted since the last step, and the arrival indices of those that were aborted."""

    submitted: list[Submission]
    aborted: frozenset[int]


def broadcast_config(config: EngineConfig) -> EngineConfig:
    """Replace the options by those of rank 0. If it has followers, they build an engine with these options."""
    ranks = config.model.tensor_parallel
    if ranks is None or (ranks.has_followers and ranks.rank > 0):  # a follower has the options of rank 0 already
        return config
    ranks.num_engines += 1
    options = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "model"}
    return replace(config, **ranks.broadcast_object(options))


class FollowerRequests:
    """Requests of an engine on rank 0 that its followers do not know yet."""

    def __init__(self, ranks: TensorParallel) -> None:
        self.ranks, self.engine_number = ranks, ranks.num_engines
        self.unsent: list[tuple[Request, Submission]] = []
        self.aborted: frozenset[int] = frozenset()
        """Arrival indices of the requests whose abortion the followers know."""

    def broadcast(self, engine: "Engine") -> None:
        """Send the requests that were submitted or aborted since the last step, and let the engine wait with them."""
        if self.engine_number != self.ranks.num_engines:
            raise InputError("the followers of this process run a newer engine; use one engine at a time")
        with engine.condition:
            unsent, self.unsent = self.unsent, []
            engine.waiting.extend(request for request, _ in unsent)
            requests = [*engine.waiting, *engine.scheduler.running]
        self.aborted = frozenset(request.arrival_index for request in requests if request.aborted)
        self.ranks.broadcast_object(StepRequests([submission for _, submission in unsent], self.aborted))


def follow(checkpoint: CheckpointLike) -> None:
    """Run the steps of rank 0's engines until rank 0 sends None."""
    model, tokenizer, _ = unpack_checkpoint(checkpoint)
    ranks = model.tensor_parallel
    assert ranks is not None
    from cutaway.generate.engine.engine import Engine

    engine: Engine | None = None
    while (message := ranks.broadcast_object(None)) is not None:
        if isinstance(message, dict):
            engine = None  # frees its cache
            engine = Engine(EngineConfig(model, **message), tokenizer=tokenizer, max_waiting=_UNLIMITED)
            continue
        assert isinstance(message, StepRequests)
        assert engine is not None
        for submission in message.submitted:
            engine.submit(
                submission.prompt,
                submission.sampling_params,
                seed=submission.seed,
                output_prefix=submission.output_prefix,
                adapter=submission.adapter,
            )
        for request in [*engine.waiting, *engine.scheduler.running]:
            if request.arrival_index in message.aborted:
                request.abort()
        try:
            engine.step()
        except CutawayError as error:
            raise CutawayError(f"process {ranks.rank}: {error}") from error
