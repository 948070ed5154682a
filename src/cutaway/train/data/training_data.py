"""Training data of a recipe: tokenizer, prepared token files, training and validation datasets."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from cutaway.tokenizer.chat.shipped_templates import load_chat_template
from cutaway.tokenizer.train import DEFAULT_SPECIAL_TOKENS, MASK_TOKEN
from cutaway.train.checkpoint.pretrained_checkpoint import BaseCheckpointInfo, base_tokenizer
from cutaway.train.data.datasets import Dataset, MixtureDataset, PackedDataset, PrefixDataset, Seq2SeqDataset
from cutaway.train.data.documents import read_documents
from cutaway.train.data.memmap import TokenSplit
from cutaway.train.data.prepare import prepare_data
from cutaway.train.data.record_data import load_record_datasets, uses_records
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.recipe.schema import (
    BPETokenizerConfig,
    CausalLMConfig,
    DataConfig,
    DistillationConfig,
    MaskedLMConfig,
    ObjectiveConfig,
    PrefixLMConfig,
    PretrainedTokenizerConfig,
    Seq2SeqConfig,
    SourceConfig,
)
from cutaway.user_files import user_cache_dir

_SourceDataset = PackedDataset | Seq2SeqDataset | PrefixDataset


@dataclass(frozen=True)
class TrainingData:
    """Training and validation datasets of a run."""

    train: Dataset
    validation: Dataset
    num_validation_sequences: int
    bytes_per_token: float | None
    """UTF-8 bytes per token of the validation text. None if the objective is neither causal-lm nor distillation."""
    fingerprint: str
    """Hash of documents and token ids; see `PreparedData.fingerprint`."""
    summary: Metrics | None = None
    """Statistics and examples of records, for `Callback.on_data`."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end a turn of the assistant in conversations."""

    @property
    def num_sequences(self) -> int | None:
        """Number of training sequences per epoch. None for a mixture of weighted sources, which has no epochs."""
        num_sequences: int | None = getattr(self.train, "num_sequences", None)
        return num_sequences

    @property
    def max_len(self) -> int | None:
        """Largest number of tokens of a sequence of the training records. None if the data are documents."""
        max_len: int | None = getattr(self.train, "max_len", None)
        return max_len

    @property
    def sequences_per_row(self) -> int:
        """Largest number of sequences of a training record, such as two for a pair of answers."""
        sequences_per_row: int = getattr(self.train, "sequences_per_row", 1)
        return sequences_per_row


def load_training_data(
    data: DataConfig,
    objective: ObjectiveConfig,
    tokenizer: Tokenizer,
    base_info: BaseCheckpointInfo,
    config: Config,
    seed: int,
    log: Callable[[str], None],
    batch_size: int | None = None,
) -> TrainingData:
    """Tokenize the sources, unless their tokens are in the cache, and open them as datasets. Log skipped documents.

    `batch_size`: number of sequences of a training step, for objectives whose rows depend on it.
    """
    if uses_records(objective):
        records = load_record_datasets(data, objective, tokenizer, base_info, config, seed, log, batch_size)
        return TrainingData(
            records.train,
            records.validation,
            records.validation.num_sequences,
            None,
            records.fingerprint,
            records.summary,
            records.end_token_ids,
        )
    directory, split, sources = user_cache_dir() / "data", data.validation_split, data.sources
    if len({source.distill for source in sources}) > 1 and not any(source.weight is not None for source in sources):
        raise InputError(
            "data.sources[].distill differs between sources, which needs weights, because sources without weights are"
            " concatenated; set data.sources[].weight"
        )
    is_weighted = any(source.weight is not None for source in sources)
    groups = [(source,) for source in sources] if is_weighted else [sources]
    prepared = [prepare_data(group, tokenizer, directory, validation_split=split, seed=seed) for group in groups]
    for each in prepared:
        if each.skipped.total:
            log(f"skipped documents: {each.skipped}")
    fingerprint = hashlib.sha256("".join(each.fingerprint for each in prepared).encode()).hexdigest()

    def build_dataset(split: TokenSplit, source: SourceConfig, shuffle: bool) -> _SourceDataset:
        pad_id, seq_len = tokenizer.pad_token_id or 0, data.seq_len
        match objective:
            case Seq2SeqConfig():
                start_id = base_info.decoder_start_token_id(tokenizer)
                return Seq2SeqDataset(split, seed, start_id=start_id, pad_id=pad_id, max_len=seq_len, shuffle=shuffle)
            case PrefixLMConfig():
                bos_id, eos_id = tokenizer.bos_token_id, tokenizer.eos_token_id
                return PrefixDataset(split, seq_len, seed, bos_id=bos_id, eos_id=eos_id, pad_id=pad_id, shuffle=shuffle)
        return PackedDataset(split, seq_len, seed, shuffle=shuffle, distill=source.distill)

    def mix(datasets: list[_SourceDataset]) -> Dataset:
        if len(datasets) == 1:
            return datasets[0]
        return MixtureDataset(
            [(each, source.weight or 1.0) for each, source in zip(datasets, sources, strict=True)], seed
        )

    # Without weights, all sources are one dataset, so `distill` must be the same for all.
    train = [build_dataset(each.train, source, True) for each, (source, *_) in zip(prepared, groups, strict=True)]
    validation = [
        build_dataset(each.validation, source, False) for each, (source, *_) in zip(prepared, groups, strict=True)
    ]
    if num_skipped := sum(dataset.num_skipped for dataset in (*train, *validation)):
        log(f"skipped source-target pairs: {num_skipped:,} are longer than data.seq_len {data.seq_len}")
    bytes_per_token = None
    if isinstance(objective, CausalLMConfig | DistillationConfig):
        num_tokens = sum(len(each.validation.tokens) for each in prepared)
        bytes_per_token = sum(each.validation.num_bytes for each in prepared) / num_tokens
    num_validation = sum(dataset.num_sequences for dataset in validation)
    return TrainingData(mix(train), mix(validation), num_validation, bytes_per_token, fingerprint)


def build_tokenizer(
    data: DataConfig, objective: ObjectiveConfig, base_checkpoint: Checkpoint | None = None
) -> Tokenizer:
    """Build or load the tokenizer of a recipe, with the recipe's chat template if there is one."""
    tokenizer = _build_tokenizer(data, objective, base_checkpoint)
    if data.chat_template is not None:
        tokenizer.chat_template = load_chat_template(data.chat_template, tokenizer)
    return tokenizer


def _build_tokenizer(data: DataConfig, objective: ObjectiveConfig, base_checkpoint: Checkpoint | None) -> Tokenizer:
    """Build or load a tokenizer. A new tokenizer has a mask token if the objective is masked-lm."""
    special_tokens: tuple[str, ...] = DEFAULT_SPECIAL_TOKENS
    if isinstance(objective, MaskedLMConfig):
        special_tokens = (*special_tokens, MASK_TOKEN)
    match data.tokenizer:
        case BPETokenizerConfig(vocab_size=size):
            return train_bpe(_iter_texts(data), size, special_tokens=special_tokens)
        case PretrainedTokenizerConfig(path=path):
            tokenizer = load_tokenizer(path)
            if tokenizer is None:
                raise InputError(f"data.tokenizer.path '{path}' has no tokenizer; pass a path with a tokenizer.json")
            return tokenizer
        case None if base_checkpoint is not None:
            return base_tokenizer(base_checkpoint)
    return byte_tokenizer(special_tokens=special_tokens)


def _iter_texts(data: DataConfig) -> Iterator[str]:
    """Iterate over the texts and targets of all documents, to train a tokenizer."""
    for source in data.sources:
        for document in read_documents(source):
            yield document.text
            if document.target is not None:
                yield document.target
