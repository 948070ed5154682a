"""A run's model as it is by now, for whoever looks while it learns; nothing of the run is touched."""

from pathlib import Path

from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.model import build
from cutaway.train.folders import listing
from cutaway.train.origin import config_of
from cutaway.train.run import Run
from cutaway.train.saved import Saved, read


def halfway(directory: Path, *, device: str | None = None) -> tuple[Checkpoint, int]:
    """The model of the newest checkpoint that is whole, and its step; fresh weights and 0 before the first."""
    run = Run.open(directory)
    tokenizer = run.tokenizer
    model = build(config_of(run.recipe, tokenizer, run.origin), device=device, seed=run.recipe.training.seed)
    found = newest(run.checkpoints)
    if found is None and run.origin.config is not None:
        raise InputError(
            f"'{directory}' has no checkpoint of its own yet; wait for its first, or open what it began with"
        )
    if found is not None:
        model.load_state_dict(found.tensors["weights"])
    origin = run.origin
    checkpoint = Checkpoint(
        model.eval(), model.config, origin.family, theirs=origin.theirs, generation=origin.generation,
        read_tokenizer=lambda: tokenizer,
    )  # fmt: skip
    return checkpoint, 0 if found is None else found.step


def newest(folder: Path) -> Saved | None:
    """Unlike a run that goes on, this clears nothing up: another process may be writing there."""
    names = [path.name for path in listing(folder) if path.name.startswith("step-")]
    for name in sorted(names, reverse=True):  # all as wide, so letters go as numbers do
        found = read(folder / name)
        if isinstance(found, Saved):
            return found
    return None
