"""A run's state to its checkpoints and back, by one rank or by several that share it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.train.parts import Gathering, is_part, take
from cutaway.train.ranks import Ranks
from cutaway.train.saved import Saved, name_of, read
from cutaway.train.store import Store, Tensors


def save(
    store: Store, ranks: Ranks, step: int, tensors: Tensors, state: Mapping[str, Any], *, best: float | None
) -> None:
    """The leader writes: meanwhile, where it has all of the state; or tensor by tensor, as others bring their parts."""
    if ranks.mesh is None:
        if ranks.leader:
            store.save_soon(step, tensors, state, best=best)
        return
    gathering = Gathering(tensors)
    try:
        if ranks.leader:
            store.save(step, tensors, state, best=best, copied=gathering.copied)
    finally:
        gathering.rest()  # a disk may be full; the others do not know, and go on asking


def newest(store: Store, ranks: Ranks, say: Callable[[str], None]) -> Saved | None:
    """The checkpoint that the leader finds, read by every rank."""
    found = store.newest(report=say) if ranks.leader else None
    step = ranks.from_leader(-1 if found is None else found.step)
    if step < 0 or found is not None:
        return found
    seen = read(store.directory / name_of(step))
    if isinstance(seen, str):
        raise InputError(
            f"process {ranks.rank} cannot read {name_of(step)} ({seen}); every process must see the run's directory"
        )
    return seen


def put(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Take these weights, of which each rank may have a part."""
    mine = model.state_dict()
    if not any(is_part(tensor) for tensor in mine.values()):
        model.load_state_dict(dict(weights))
        return
    if mine.keys() != weights.keys():
        raise InputError("this checkpoint is of another model; resume a run with its own")
    for name, tensor in mine.items():
        take(tensor, weights[name])
