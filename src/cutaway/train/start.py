"""From a recipe to a loop that is ready to go, and from a run's directory to the loop where it was left."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cutaway.config import config as read_config
from cutaway.errors import InputError
from cutaway.model import Transformer, build
from cutaway.model.inputs import check_device
from cutaway.text import Tokenizer
from cutaway.train.balance import check as check_balance
from cutaway.train.loop import Loop, Watcher
from cutaway.train.optimise import make
from cutaway.train.reading import FORMS, Ask, Reading, read, task_of, tokenizer_of
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
    device: Device = None,
    watcher: Watcher | None = None,
) -> Run:
    """Carry out a recipe (a shipped one's name, a file, a dict) in a new directory."""
    loop = begin(read_recipe(source, changes), Path(directory), device=device, watcher=watcher)
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
    tokenizer = tokenizer_of(recipe)
    model = model_of(recipe, tokenizer, device, watcher)
    reading = read(recipe, tokenizer, watcher.say)
    task = task_of(recipe, tokenizer, model)
    return ready(Run.begin(directory, recipe, tokenizer, reading.fingerprint), reading, model, task, watcher)


def go_on(directory: Path, *, device: Device = None, watcher: Watcher | None = None) -> Loop:
    """A run where it was left: at its newest checkpoint that is whole."""
    run, watcher = Run.open(directory), watcher or Watcher()
    tokenizer = run.tokenizer
    reading = read(run.recipe, tokenizer, watcher.say)
    if reading.fingerprint != run.fingerprint:
        raise InputError(
            f"the data has changed since '{directory}' began, so it cannot go on as if it had not stopped; restore the"
            " files, or begin a new run"
        )
    model = model_of(run.recipe, tokenizer, device, watcher)
    return ready(run, reading, model, task_of(run.recipe, tokenizer, model), watcher)


def ready(run: Run, reading: Reading, model: Transformer, task: Ask, watcher: Watcher) -> Loop:
    chosen = run.recipe.optimiser
    optimiser = make(chosen.kind, model, **chosen.model_dump(exclude={"kind"}))
    loop = Loop(run, model, optimiser, reading, task, watcher)
    loop.restore()
    return loop


def model_of(recipe: Recipe, tokenizer: Tokenizer, device: Device, watcher: Watcher) -> Transformer:
    """The recipe's model with fresh weights and the tokenizer's vocabulary, if there is memory to train it."""
    config = read_config(recipe.model).replace(vocab_size=tokenizer.vocab_size)
    form = FORMS[type(recipe.objective)]
    if config.form != form:
        raise InputError(
            f"objective {recipe.objective.kind} is for a model of form {form}, and this one's is {config.form}; change"
            " one of the two"
        )
    check_balance(recipe, config)
    where = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_room(recipe, config, where, watcher.say)
    return build(config, device=where, seed=recipe.training.seed)
