"""From a recipe to a loop that is ready to go, and from a run's directory to the loop where it was left."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.model import Transformer, build
from cutaway.text import Tokenizer
from cutaway.train.audience import Watcher
from cutaway.train.balance import check as check_balance
from cutaway.train.doubt import doubt
from cutaway.train.learner import Learner
from cutaway.train.loop import Loop
from cutaway.train.optimise import make
from cutaway.train.origin import Origin, base_of, config_of, same_base
from cutaway.train.ranks import ALONE, Device, Ranks, together
from cutaway.train.reading import FORMS, FRESH, Ask, Reading, read, task_of, tokenizer_of
from cutaway.train.recipe import Recipe
from cutaway.train.recipe import recipe as read_recipe
from cutaway.train.room import check_room
from cutaway.train.run import ABOUT, Run, check_new
from cutaway.train.saving import put
from cutaway.train.schedule import check as check_schedule
from cutaway.train.spread import fill, spread
from cutaway.train.track import check_installed


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
    with together(device) as ranks:
        chosen = read_recipe(source, changes, texts)
        loop = begin(chosen, Path(directory), device=device, watcher=watcher, ranks=ranks)
        loop.go()
    return loop.run


def resume(directory: str | Path, *, device: Device = None, watcher: Watcher | None = None) -> Run:
    """Go on with a run, as if it had never stopped."""
    with together(device) as ranks:
        loop = go_on(Path(directory), device=device, watcher=watcher, ranks=ranks)
        loop.go()
    return loop.run


def begin(
    recipe: Recipe, directory: Path, *, device: Device = None, watcher: Watcher | None = None, ranks: Ranks = ALONE
) -> Loop:
    """A new run; its directory is made when everything it needs is there. Of several ranks the leader makes it."""
    if ranks.restarted and (directory / ABOUT).exists():
        return go_on(directory, device=device, watcher=watcher, ranks=ranks)
    where, watcher = ranks.device(device), heard(watcher, ranks)
    ranks.arrange(recipe.parallel, where)
    with ranks.in_turn():
        if ranks.leader:
            check_new(directory)
        check_schedule(recipe.schedule, recipe.training.steps)
        if recipe.watching.tensorboard:
            check_installed()
        run = None if ranks.leader else Run.open(directory)
        base = base_of(recipe)
        origin = Origin.of(base)
        tokenizer = tokenizer_of(recipe, base) if run is None else run.tokenizer
        model = model_of(recipe, tokenizer, where, watcher, ranks, origin)
        reading = read(recipe, tokenizer, watcher.say, origin)
        task = task_of(recipe, tokenizer, model, where)
        if run is None and recipe.training.check and ranks.mesh is None:  # where ranks share it, it has no weights yet
            doubt(model, recipe.training.seed, watcher.say)
        run = run or Run.begin(directory, recipe, tokenizer, reading.fingerprint, origin)
    return ready(run, reading, model, task, where, watcher, ranks, base)


def go_on(
    directory: Path,
    *,
    changes: Sequence[str] = (),
    device: Device = None,
    watcher: Watcher | None = None,
    ranks: Ranks = ALONE,
) -> Loop:
    """A run where it was left: at its newest checkpoint that is whole. Changes are of what ranks share."""
    run, where, watcher = Run.open(directory), ranks.device(device), heard(watcher, ranks)
    ranks.arrange(read_recipe(run.recipe, changes).parallel, where)
    with ranks.in_turn():
        tokenizer = run.tokenizer
        reading = read(run.recipe, tokenizer, watcher.say, run.origin)
    model = model_of(run.recipe, tokenizer, where, watcher, ranks, run.origin)
    task, base = task_of(run.recipe, tokenizer, model, where), same_base(run.recipe, run.origin)
    loop = ready(run, reading, model, task, where, watcher, ranks, base)
    if loop.done == 0 and run.origin.config is not None and base is None:
        raise InputError(
            f"'{directory}' has no checkpoint of its own yet, and what it began with is gone or has changed; begin anew"
        )
    return loop


def ready(
    run: Run,
    reading: Reading,
    model: Transformer,
    task: Ask,
    device: torch.device,
    watcher: Watcher,
    ranks: Ranks,
    base: Checkpoint | None = None,
) -> Loop:
    if reading.fingerprint != run.fingerprint:
        raise InputError(
            f"the data has changed since '{run.directory}' began, so it cannot go on as if it had not stopped; restore"
            " the files, or begin a new run"
        )
    chosen = run.recipe.optimiser
    learner = Learner(model, run.recipe)
    wrapped = spread(learner, ranks)
    if ranks.mesh is not None:
        fill(model, device, run.recipe.training.seed)
    if base is not None:
        put(model, base.model.state_dict())
    optimiser = make(chosen.kind, model, **chosen.model_dump(exclude={"kind"}))
    loop = Loop(run, learner, optimiser, reading, task, watcher, ranks, wrapped)
    loop.restore()
    return loop


def model_of(
    recipe: Recipe,
    tokenizer: Tokenizer,
    device: torch.device,
    watcher: Watcher,
    ranks: Ranks,
    origin: Origin = FRESH,
) -> Transformer:
    """The recipe's model with fresh weights, if there is memory to train it; where ranks share them it has none yet."""
    config = config_of(recipe, tokenizer, origin)
    form = FORMS[type(recipe.objective)]
    if config.form != form:
        raise InputError(
            f"objective {recipe.objective.kind} is for a model of form {form}, and this one's is {config.form}; change"
            " one of the two"
        )
    if config.head.kind == "none":
        raise InputError("this model has no head, so it cannot say a token; give it one: head.kind = 'lm'")
    check_balance(recipe, config)
    check_room(recipe, config, device, watcher.say, ranks)
    return shaped(recipe, config, device if ranks.mesh is None else torch.device("meta"))


def shaped(recipe: Recipe, config: Config, device: torch.device) -> Transformer:
    """The model as the recipe trains it; without values on the meta device."""
    model = build(config, device=device, seed=recipe.training.seed)
    model.use_recompute(recipe.training.recompute)
    pooler = getattr(model, "pooler", None)
    if pooler is not None:
        pooler.requires_grad_(False)  # no objective asks for it, and ranks would wait for its gradient
    return model


def heard(watcher: Watcher | None, ranks: Ranks) -> Watcher:
    """Only the leader is heard."""
    return watcher if watcher is not None and ranks.leader else Watcher()
