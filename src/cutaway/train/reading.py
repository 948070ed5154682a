"""From a recipe to the data that a loop reads: tokenizer, shards, sequences by position, and what each asks for."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.model import Transformer
from cutaway.size.calibration import where as measurements
from cutaway.text import Tokenizer, byte_tokenizer, tokenizer_from_directory, train_bpe
from cutaway.text.made import MASK, SPECIAL
from cutaway.train import objectives
from cutaway.train.data import dates, documents, shards
from cutaway.train.data.arrays import Split
from cutaway.train.data.batches import Data, Joined, Mixture, Packed, Pairs
from cutaway.train.data.sources import Source
from cutaway.train.ingredients import DATES, STANDARD_LIBRARY, Bpe, Ready
from cutaway.train.objectives import Task
from cutaway.train.origin import Origin, tokenizer_beside
from cutaway.train.recipe import Masked, NextToken, Prefix, Recipe, Seq2Seq

Say = Callable[[str], None]
Ask = Callable[[Any, int], Task]
"""What a batch, whose first sequence has this position, asks of a model."""
FRESH = Origin()


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


def read(recipe: Recipe, tokenizer: Tokenizer, say: Say, origin: Origin = FRESH) -> Reading:
    """The recipe's data as ids; what could not be read is said."""
    where = folder()
    sources = sources_of(recipe)
    weighed = any(each.weight is not None for each in recipe.data.sources)
    parts = [[each] for each in sources] if weighed else [sources]
    how: Any = {"validation": recipe.data.validation, "seed": recipe.training.seed}
    prepared = [shards.prepare(part, tokenizer, where, **how) for part in parts]
    for each in prepared:
        if each.troubles.total:
            say(f"passed over: {each.troubles}")
    print_of_all = hashlib.sha256("".join(each.fingerprint for each in prepared).encode()).hexdigest()
    ways = [sequences(recipe, tokenizer, origin, each.train, shuffle=True) for each in prepared]
    held = [sequences(recipe, tokenizer, origin, each.validation, shuffle=False) for each in prepared]
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


def sequences(
    recipe: Recipe, tokenizer: Tokenizer, origin: Origin, split: Split, *, shuffle: bool
) -> Packed | Pairs | Joined:
    seed, length, pad = recipe.training.seed, recipe.data.length, tokenizer.pad_id or 0
    match recipe.objective:
        case Seq2Seq():
            start = origin.first_token(tokenizer)
            return Pairs(split, seed, start=start, pad=pad, longest=length, shuffle=shuffle)
        case Prefix():
            return Joined(split, length, seed, bos=tokenizer.bos_id, eos=tokenizer.eos_id, pad=pad, shuffle=shuffle)
    return Packed(split, length, seed, shuffle=shuffle)


def folder() -> Path:
    """Where data is kept that was read or made once."""
    return measurements().parent / "data"


def sources_of(recipe: Recipe) -> list[Source]:
    found = []
    for each in recipe.data.sources:
        if not each.path:
            columns = "" if each.target is None else " with a source and a target in each row, .tsv or .jsonl"
            raise InputError(f"this recipe has no text of its own; name yours with --text, files{columns}")
        path = None if each.path == STANDARD_LIBRARY else Path(each.path).expanduser()
        path = dates.file(folder()) if each.path == DATES else path
        found.append(Source(path, each.field, each.target, each.weight or 1.0, each.group))
    return found


def tokenizer_of(recipe: Recipe, base: Checkpoint | None = None) -> Tokenizer:
    """The recipe's tokenizer; one that is made here has a mask where the objective needs it."""
    special = (*SPECIAL, MASK) if isinstance(recipe.objective, Masked) else SPECIAL
    match recipe.data.tokenizer:
        case Bpe(vocab_size=size):
            return train_bpe(texts(recipe), size, special=special)
        case Ready(path=path):
            found = tokenizer_from_directory(path)
            if found is None:
                raise InputError(f"'{path}' holds no tokenizer; give a directory with a tokenizer.json, or use bpe")
            return found
        case None if base is not None:
            return tokenizer_beside(base)
    return byte_tokenizer(special=special)


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
    if isinstance(objective, Prefix):
        how = {"both_ways": objective.both_ways}
        return lambda batch, first: objectives.prefix(batch.tokens, None, batch.lengths, mask=batch.mask, **how).to(
            device
        )
    mask = tokenizer.mask_id
    if mask is None:
        raise InputError("objective masked hides tokens behind a mask token, and this tokenizer has none; use another")
    hiding: Any = {"mask_id": mask, "vocab_size": model.config.vocab_size, "seed": recipe.training.seed}
    hiding |= {"rate": objective.rate, "spans": objective.spans, "special": special(tokenizer)}

    def masked(batch: Any, first: int) -> Task:
        positions = range(first, first + len(batch.tokens))
        tokens = batch.tokens[:, :-1]  # the last is the next sequence's first
        documents = batch.documents[:, :-1] if recipe.data.borders else None
        return objectives.masked(tokens, documents, positions=positions, **hiding).to(device)

    return masked


def special(tokenizer: Tokenizer) -> list[int]:
    named = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id)
    return [number for number in named if number is not None]


FORMS = {NextToken: "decoder", Masked: "encoder", Seq2Seq: "encoder-decoder", Prefix: "decoder"}
"""What each objective trains."""
