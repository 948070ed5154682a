"""What a run is, as data: the model, what it reads, what it must say, and how it learns."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, NonNegativeFloat, NonNegativeInt, Tag, TypeAdapter, ValidationError

from cutaway.config import Config
from cutaway.config import config as read_config
from cutaway.config.part import TAGGED, Count, Part, Positive, Rate, default_kind, explain
from cutaway.config.source import read_table
from cutaway.errors import ConfigError
from cutaway.train.changes import name_texts, put
from cutaway.train.ingredients import Data


class NextToken(Part):
    """Every token says the next one."""

    kind: Literal["next-token"] = "next-token"
    z: NonNegativeFloat = 0.0
    """Weight of logsumexp², which keeps logits from drifting."""
    balance: NonNegativeFloat = 0.0
    """Weight of how unevenly a mixture of experts uses them; 0.01 is usual."""


class Masked(Part):
    """Some tokens are hidden, and must be told from the others."""

    kind: Literal["masked"] = "masked"
    rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    spans: bool = False
    """Whether neighbours are hidden together."""
    z: NonNegativeFloat = 0.0
    balance: NonNegativeFloat = 0.0


class Seq2Seq(Part):
    """The target is told from the source and from itself so far."""

    kind: Literal["seq2seq"] = "seq2seq"
    smoothing: Rate = 0.0
    """Of each target's certainty, the share that all tokens get."""
    z: NonNegativeFloat = 0.0
    balance: NonNegativeFloat = 0.0


class Prefix(Part):
    """A decoder reads the source and says the target behind it: prompts and answers."""

    kind: Literal["prefix"] = "prefix"
    both_ways: bool = False
    """Whether tokens of the source see those behind them too."""
    smoothing: Rate = 0.0
    z: NonNegativeFloat = 0.0
    balance: NonNegativeFloat = 0.0


Objective = Annotated[Annotated[NextToken | Masked | Seq2Seq | Prefix, TAGGED], default_kind("next-token")]


class AdamW(Part):
    """Loshchilov and Hutter, 2019."""

    kind: Literal["adamw"] = "adamw"
    rate: Positive = 1e-3
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegativeFloat = 0.1


class Muon(Part):
    """Jordan, 2024: the layers' matrices by steps of equal length in all directions; AdamW for the rest."""

    kind: Literal["muon"] = "muon"
    rate: Positive = 1e-3
    momentum: Rate = 0.95
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegativeFloat = 0.1


class Adafactor(Part):
    """Shazeer and Stern, 2018: a row and a column of averages for each matrix."""

    kind: Literal["adafactor"] = "adafactor"
    rate: Positive = 1e-2
    weight_decay: NonNegativeFloat = 0.0


class Sgd(Part):
    """With momentum."""

    kind: Literal["sgd"] = "sgd"
    rate: Positive = 0.1
    momentum: Rate = 0.9
    weight_decay: NonNegativeFloat = 0.0


Optimiser = Annotated[Annotated[AdamW | Muon | Adafactor | Sgd, TAGGED], default_kind("adamw")]


class Schedule(Part):
    """What the learning rate is multiplied by as steps go by."""

    kind: Literal["cosine", "linear", "stable", "inverse-sqrt", "constant"] = "cosine"
    warmup: NonNegativeInt = 20
    """Steps in which it rises from 0."""
    floor: Rate = 0.1
    """What is left at the end."""
    decay: Rate = 0.2
    """For 'stable': the share of steps at the end in which it falls."""


class Training(Part):
    """How much is learned, and in what numbers."""

    steps: Count = 200
    batch: Count = 16
    """Sequences of a step."""
    pieces: Count = 1
    """Parts that a step's batch is cut into, one after another: less memory, the same step."""
    clip: Positive = 1.0
    """The gradient's greatest length."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What products are computed in; weights stay fp32. In fp16 the loss is scaled; what overflows is left out."""
    ema: Rate | None = None
    """How much of a running mean of the weights each step keeps; the mean is then looked at and exported."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What a block computes again on the way back, to hold less meanwhile: nothing, what is cheap, or all of it."""
    compile: bool | None = None
    """Whether blocks are compiled; on a GPU they are, unless told otherwise or objective.balance is given."""
    on_spike: Literal["skip", "go-on"] = "skip"
    """What is done with a step whose gradient is far longer than usual."""
    check: bool = True
    """Whether the model is asked, before the first step, if it is right; one that sees the future is not trained."""
    seed: NonNegativeInt = 0


class Parallel(Part):
    """What processes share, where torchrun starts several; beside that each has a copy, and sequences of its own."""

    shards: Count | Literal["all"] = 1
    """Processes that share weights, gradients and the optimiser's state (FSDP2); with 1, each has all of them (DDP)."""
    tensor: Count = 1
    """Processes that share each matrix, and read the same sequences."""


class Watching(Part):
    """What is looked at on the way."""

    every: Count = 50
    """Steps between two looks at the validation data."""
    sequences: Count = 64
    """How many of it."""
    sample: str | None = None
    """A text that is continued, answered or filled at each look."""
    answers: NonNegativeInt = 64
    """Of pairs: how many are answered at each look, and compared with their targets."""
    tensorboard: bool = False
    """Whether the run's figures are written for TensorBoard too."""


class Saving(Part):
    """What is kept in case of an end."""

    every: Count = 50
    keep: Count = 2


class Pretrained(Part):
    """A model that has learned before: its weights, its settings, its tokenizer."""

    checkpoint: str
    """A directory, a run, a .gguf file or a hub id."""


def _sort_of_model(given: Any) -> str:
    """A table that names a checkpoint says nothing else."""
    if isinstance(given, str):
        return "preset"
    known = isinstance(given, Pretrained) or (isinstance(given, Mapping) and "checkpoint" in given)
    return "pretrained" if known else "table"


Model = Annotated[
    Annotated[str, Tag("preset")] | Annotated[Pretrained, Tag("pretrained")] | Annotated[dict[str, Any], Tag("table")],
    Discriminator(_sort_of_model),
]


class Recipe(Part):
    """A whole run."""

    model: Model = "tiny-gpt"
    """A preset's name or a table of settings, with the tokenizer's vocabulary; or a checkpoint to go on from."""
    data: Data = Data()
    objective: Objective = NextToken()
    optimiser: Optimiser = AdamW()
    schedule: Schedule = Schedule()
    training: Training = Training()
    parallel: Parallel = Parallel()
    watching: Watching = Watching()
    saving: Saving = Saving()

    @property
    def shape(self) -> Config:
        """What a model is that begins afresh."""
        if isinstance(self.model, Pretrained):
            raise ConfigError(
                "this recipe goes on from a checkpoint; give its model as a preset or a table of settings"
            )
        return read_config(self.model)


ADAPTER = TypeAdapter(Recipe)


def recipe(
    source: Recipe | Mapping[str, Any] | str | Path, changes: Sequence[str] = (), texts: Sequence[str | Path] = ()
) -> Recipe:
    """A Recipe from a shipped one's name, a dict, or a .toml or .json file.

    Each change is 'a.b=value', as in TOML; `texts` are read in the place of the recipe's own.
    """
    if isinstance(source, Recipe):
        data = source.model_dump(mode="json", exclude_none=True)
    elif isinstance(source, Mapping):
        data = deepcopy(dict(source))  # changes are not the caller's
    elif Path(source).suffix in (".toml", ".json"):
        data = read_table(Path(source))
    else:
        data = shipped(str(source))
    if texts:
        name_texts(data, texts)
    for change in changes:
        put(data, change)
    try:
        return ADAPTER.validate_python(data)
    except ValidationError as error:
        raise explain(error, data, tags=0) from None


def recipes() -> list[str]:
    """The names of those that come with cutaway."""
    return sorted(file.name[:-5] for file in files("cutaway.train.recipes").iterdir() if file.name.endswith(".toml"))


def shipped(name: str) -> dict[str, Any]:
    if name not in recipes():
        raise ConfigError(f"there is no recipe '{name}'; give a .toml file, or one of {', '.join(recipes())}")
    import tomllib

    return tomllib.loads((files("cutaway.train.recipes") / f"{name}.toml").read_text(encoding="utf-8"))


def schema() -> dict[str, Any]:
    """The JSON schema of a Recipe, for editors that complete and check."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | ADAPTER.json_schema()
