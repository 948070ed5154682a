"""From a recipe to the data of a run: tokenizer, prepared token files, datasets by position."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.size.measured_hardware import user_cache_dir
from cutaway.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from cutaway.tokenizer.train import DEFAULT_SPECIAL_TOKENS, MASK_TOKEN
from cutaway.train.checkpoint.base_checkpoint import NO_BASE_CHECKPOINT, BaseCheckpointInfo, base_tokenizer
from cutaway.train.data import dates, documents, prepare
from cutaway.train.data.datasets import MixtureDataset, PackedDataset, PositionalDataset, PrefixDataset, Seq2SeqDataset
from cutaway.train.data.memmap import TokenSplit
from cutaway.train.data.sources import TextSource
from cutaway.train.recipe.schema import (
    DATES_PATH,
    STDLIB_PATH,
    BPETokenizerConfig,
    CausalLMConfig,
    MaskedLMConfig,
    PrefixLMConfig,
    PretrainedTokenizerConfig,
    Recipe,
    Seq2SeqConfig,
)

LogFn = Callable[[str], None]


@dataclass(frozen=True)
class TrainingData:
    """What a run learns from, and what it is looked at with."""

    train: PositionalDataset[Any, Any]
    validation: PositionalDataset[Any, Any]
    num_validation_sequences: int
    """Sequences of validation data."""
    bytes_per_token: float | None
    """Of validation text; None where bits a byte mean nothing."""
    fingerprint: str


def load_training_data(
    recipe: Recipe, tokenizer: Tokenizer, log: LogFn, base_info: BaseCheckpointInfo = NO_BASE_CHECKPOINT
) -> TrainingData:
    """The recipe's data as ids; what could not be read is said."""
    where = data_cache_directory()
    sources = resolve_sources(recipe)
    weighed = any(each.weight is not None for each in recipe.data.sources)
    parts = [[each] for each in sources] if weighed else [sources]
    split, seed = recipe.data.validation_split, recipe.training.seed
    prepared = [prepare.prepare_data(part, tokenizer, where, validation_split=split, seed=seed) for part in parts]
    for each in prepared:
        if each.skipped.total:
            log(f"passed over: {each.skipped}")
    print_of_all = hashlib.sha256("".join(each.fingerprint for each in prepared).encode()).hexdigest()
    ways = [build_dataset(recipe, tokenizer, base_info, each.train, shuffle=True) for each in prepared]
    held = [build_dataset(recipe, tokenizer, base_info, each.validation, shuffle=False) for each in prepared]
    bytes_per_token = None
    if isinstance(recipe.objective, CausalLMConfig):
        tokens = sum(len(each.validation.tokens) for each in prepared)
        bytes_per_token = sum(each.validation.num_bytes for each in prepared) / tokens
    weights = [source.weight for source in sources]
    return TrainingData(
        ways[0] if len(ways) == 1 else MixtureDataset(list(zip(ways, weights, strict=True)), seed),
        held[0] if len(held) == 1 else MixtureDataset(list(zip(held, weights, strict=True)), seed),
        sum(each.num_sequences for each in held),
        bytes_per_token,
        print_of_all,
    )


def build_dataset(
    recipe: Recipe, tokenizer: Tokenizer, base_info: BaseCheckpointInfo, split: TokenSplit, *, shuffle: bool
) -> PackedDataset | Seq2SeqDataset | PrefixDataset:
    seed, length, pad = recipe.training.seed, recipe.data.seq_len, tokenizer.pad_token_id or 0
    match recipe.objective:
        case Seq2SeqConfig():
            start = base_info.decoder_start_token_id(tokenizer)
            return Seq2SeqDataset(split, seed, start_id=start, pad_id=pad, max_len=length, shuffle=shuffle)
        case PrefixLMConfig():
            return PrefixDataset(
                split,
                length,
                seed,
                bos_id=tokenizer.bos_token_id,
                eos_id=tokenizer.eos_token_id,
                pad_id=pad,
                shuffle=shuffle,
            )
    return PackedDataset(split, length, seed, shuffle=shuffle)


def data_cache_directory() -> Path:
    """Where data is kept that was read or made once."""
    return user_cache_dir() / "data"


def resolve_sources(recipe: Recipe) -> list[TextSource]:
    found = []
    for each in recipe.data.sources:
        if not each.path:
            columns = "" if each.target_column is None else " with a source and a target in each row, .tsv or .jsonl"
            raise InputError(f"this recipe has no text of its own; name yours with --text, files{columns}")
        path = None if each.path == STDLIB_PATH else Path(each.path).expanduser()
        path = dates.ensure_dates_file(data_cache_directory()) if each.path == DATES_PATH else path
        found.append(TextSource(path, each.text_column, each.target_column, each.weight or 1.0, each.group_column))
    return found


def build_tokenizer(recipe: Recipe, base_checkpoint: Checkpoint | None = None) -> Tokenizer:
    """The recipe's tokenizer; one that is made here has a mask where the objective needs it."""
    special = (
        (*DEFAULT_SPECIAL_TOKENS, MASK_TOKEN)
        if isinstance(recipe.objective, MaskedLMConfig)
        else DEFAULT_SPECIAL_TOKENS
    )
    match recipe.data.tokenizer:
        case BPETokenizerConfig(vocab_size=size):
            return train_bpe(iter_texts(recipe), size, special_tokens=special)
        case PretrainedTokenizerConfig(path=path):
            found = load_tokenizer(path)
            if found is None:
                raise InputError(f"'{path}' holds no tokenizer; give a directory with a tokenizer.json, or use bpe")
            return found
        case None if base_checkpoint is not None:
            return base_tokenizer(base_checkpoint)
    return byte_tokenizer(special_tokens=special)


def iter_texts(recipe: Recipe) -> Iterator[str]:
    for source in resolve_sources(recipe):
        for document in documents.read_documents(source):
            yield document.text
            if document.target is not None:
                yield document.target
