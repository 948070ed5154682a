"""From a recipe to the data that a loop reads: tokenizer, shards, sequences by position, and what each asks for."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.size.calibration import where as measurements
from cutaway.text import Tokenizer, byte_tokenizer, tokenizer_from_directory, train_bpe
from cutaway.train import objectives
from cutaway.train.data import documents, shards
from cutaway.train.data.arrays import Split
from cutaway.train.data.batches import Data, Mixture, Packed, Pairs
from cutaway.train.data.sources import Source
from cutaway.train.objectives import Task
from cutaway.train.recipe import STANDARD_LIBRARY, Bpe, Masked, NextToken, Ready, Recipe, Seq2Seq

Say = Callable[[str], None]
Ask = Callable[[Any, int], Task]
"""What a batch, whose first sequence has this position, asks of a model."""


@dataclass(frozen=True)
class Reading:
    """What a run learns from, and what it is looked at with."""

    train: Data[Any, Any]
    validation: Data[Any, Any]
    held: int
    """Sequences of validation data."""
    bytes_per_token: float | None
    """Of validation text; None where bits a byte mean nothing."""
    fingerprint: str


def read(recipe: Recipe, tokenizer: Tokenizer, say: Say) -> Reading:
    """The recipe's data as ids; what could not be read is said."""
    where = measurements().parent / "data"
    sources = sources_of(recipe)
    weighed = any(each.weight is not None for each in recipe.data.sources)
    parts = [[each] for each in sources] if weighed else [sources]
    how: Any = {"validation": recipe.data.validation, "seed": recipe.training.seed}
    prepared = [shards.prepare(part, tokenizer, where, **how) for part in parts]
    for each in prepared:
        if each.troubles.total:
            say(f"passed over: {each.troubles}")
    print_of_all = hashlib.sha256("".join(each.fingerprint for each in prepared).encode()).hexdigest()
    ways = [sequences(recipe, tokenizer, each.train, shuffle=True) for each in prepared]
    held = [sequences(recipe, tokenizer, each.validation, shuffle=False) for each in prepared]
    bytes_per_token = None
    if isinstance(recipe.objective, NextToken):
        tokens = sum(len(each.validation.tokens) for each in prepared)
        bytes_per_token = sum(each.validation.bytes for each in prepared) / tokens
    weights = [source.weight for source in sources]
    seed = recipe.training.seed
    return Reading(
        ways[0] if len(ways) == 1 else Mixture(list(zip(ways, weights, strict=True)), seed),
        held[0] if len(held) == 1 else Mixture(list(zip(held, weights, strict=True)), seed),
        sum(each.sequences for each in held),
        bytes_per_token,
        print_of_all,
    )


def sequences(recipe: Recipe, tokenizer: Tokenizer, split: Split, *, shuffle: bool) -> Packed | Pairs:
    seed, length = recipe.training.seed, recipe.data.length
    if not isinstance(recipe.objective, Seq2Seq):
        return Packed(split, length, seed, shuffle=shuffle)
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.pad_id
    if start is None:
        raise InputError("a target begins with a token of its own, and this tokenizer has no bos or pad; use another")
    return Pairs(split, seed, start=start, pad=tokenizer.pad_id or 0, longest=length, shuffle=shuffle)


def sources_of(recipe: Recipe) -> list[Source]:
    found = []
    for each in recipe.data.sources:
        path = None if each.path == STANDARD_LIBRARY else Path(each.path).expanduser()
        found.append(Source(path, each.field, each.target, each.weight or 1.0))
    return found


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The recipe's tokenizer; one that is trained here has a mask where the objective needs it."""
    match recipe.data.tokenizer:
        case Bpe(vocab_size=size):
            return train_bpe(texts(recipe), size)
        case Ready(path=path):
            found = tokenizer_from_directory(path)
            if found is None:
                raise InputError(f"'{path}' holds no tokenizer; give a directory with a tokenizer.json, or use bpe")
            return found
    return byte_tokenizer()


def texts(recipe: Recipe) -> Iterator[str]:
    for source in sources_of(recipe):
        for document in documents.read(source):
            yield document.text
            if document.target is not None:
                yield document.target


def task_of(recipe: Recipe, tokenizer: Tokenizer, model: Transformer, device: torch.device) -> Ask:
    """What the recipe's objective makes of a batch."""
    objective = recipe.objective
    if isinstance(objective, NextToken):
        bordered = recipe.data.borders
        return lambda batch, first: objectives.next_token(batch.tokens, batch.documents if bordered else None).to(
            device
        )
    if isinstance(objective, Seq2Seq):
        return lambda batch, first: objectives.seq2seq(*batch).to(device)
    mask = tokenizer.mask_id
    if mask is None:
        raise InputError("objective masked hides tokens behind a mask token, and this tokenizer has none; use another")
    how: Any = {"mask_id": mask, "vocab_size": model.config.vocab_size, "seed": recipe.training.seed}
    how |= {"rate": objective.rate, "spans": objective.spans, "special": special(tokenizer)}

    def masked(batch: Any, first: int) -> Task:
        positions = range(first, first + len(batch.tokens))
        documents = batch.documents if recipe.data.borders else None
        return objectives.masked(batch.tokens, documents, positions=positions, **how).to(device)

    return masked


def special(tokenizer: Tokenizer) -> list[int]:
    named = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id)
    return [number for number in named if number is not None]


FORMS = {NextToken: "decoder", Masked: "encoder", Seq2Seq: "encoder-decoder"}
"""What each objective trains."""
