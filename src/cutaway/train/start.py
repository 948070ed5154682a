"""From a recipe to a loop that is ready to go, and from a run's directory to the loop where it was left."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.model import Transformer, build
from cutaway.model.inputs import check_device
from cutaway.text import Tokenizer
from cutaway.train.loop import Loop, Watcher
from cutaway.train.optimise import make
from cutaway.train.origin import Origin, base_of, config_of, same_base
from cutaway.train.reading import FORMS, FRESH, Ask, Reading, read, task_of, tokenizer_of
from cutaway.train.recipe import Recipe
from cutaway.train.recipe import recipe as read_recipe
from cutaway.train.room import check_room
from cutaway.train.run import Run, check_new

Device = torch.device | str | None


def train(
    source: Any,
    directory: str | Path,
    *,
    changes: Sequence[str] = (),
    texts: Sequence[str | Path] = (),
    device: Device = None,
    watcher: Watcher | None = None,
) -> Run:
    """Carry out a recipe (a shipped one's name, a file, a dict) in a new directory, on texts of one's own if given."""
    loop = begin(read_recipe(source, changes, texts), Path(directory), device=device, watcher=watcher)
    loop.go()
    return loop.run


def resume(directory: str | Path, *, device: Device = None, watcher: Watcher | None = None) -> Run:
    """Go on with a run, as if it had never stopped."""
    loop = go_on(Path(directory), device=device, watcher=watcher)
    loop.go()
    return loop.run


def begin(recipe: Recipe, directory: Path, *, device: Device = None, watcher: Watcher | None = None) -> Loop:
    """A new run; its directory is made when everything it needs is there."""
    check_new(directory)
    watcher = watcher or Watcher()
    base = base_of(recipe)
    origin = Origin.of(base)
    tokenizer = tokenizer_of(recipe, base)
    model = model_of(recipe, tokenizer, device, watcher, origin, base)
    reading = read(recipe, tokenizer, watcher.say, origin)
    task = task_of(recipe, tokenizer, model)
    return ready(Run.begin(directory, recipe, tokenizer, reading.fingerprint, origin), reading, model, task, watcher)


def go_on(directory: Path, *, device: Device = None, watcher: Watcher | None = None) -> Loop:
    """A run where it was left: at its newest checkpoint that is whole."""
    run, watcher = Run.open(directory), watcher or Watcher()
    tokenizer = run.tokenizer
    reading = read(run.recipe, tokenizer, watcher.say, run.origin)
    if reading.fingerprint != run.fingerprint:
        raise InputError(
            f"the data has changed since '{directory}' began, so it cannot go on as if it had not stopped; restore the"
            " files, or begin a new run"
        )
    base = same_base(run.recipe, run.origin)
    model = model_of(run.recipe, tokenizer, device, watcher, run.origin, base)
    loop = ready(run, reading, model, task_of(run.recipe, tokenizer, model), watcher)
    if loop.done == 0 and run.origin.config is not None and base is None:
        raise InputError(
            f"'{directory}' has no checkpoint of its own yet, and what it began with is gone or has changed; begin anew"
        )
    return loop


def ready(run: Run, reading: Reading, model: Transformer, task: Ask, watcher: Watcher) -> Loop:
    chosen = run.recipe.optimiser
    optimiser = make(chosen.kind, model, **chosen.model_dump(exclude={"kind"}))
    loop = Loop(run, model, optimiser, reading, task, watcher)
    loop.restore()
    return loop


def model_of(
    recipe: Recipe,
    tokenizer: Tokenizer,
    device: Device,
    watcher: Watcher,
    origin: Origin = FRESH,
    base: Checkpoint | None = None,
) -> Transformer:
    """The recipe's model with fresh weights, or with those of the checkpoint, if there is memory to train it."""
    config = config_of(recipe, tokenizer, origin)
    form = FORMS[type(recipe.objective)]
    if config.form != form:
        raise InputError(
            f"objective {recipe.objective.kind} is for a model of form {form}, and this one's is {config.form}; change"
            " one of the two"
        )
    if config.head.kind == "none":
        raise InputError("this model has no head, so it cannot say a token; give it one: head.kind = 'lm'")
    where = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_room(recipe, config, where, watcher.say)
    return build(config, device=where, seed=recipe.training.seed) if base is None else base.model.to(where)
