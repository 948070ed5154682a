"""Load the base checkpoint of a fine-tuning run, and take config, family and tokenizer from it."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict

from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.config.head import TaskHead
from cutaway.config.presets import presets
from cutaway.errors import ConfigError, CutawayError, InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.load import load, load_config
from cutaway.families.registry import find_family
from cutaway.families.replace_head import replace_head
from cutaway.families.save import merge_adapters
from cutaway.generate.generation_config import read_generation_config
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.formats.marian import MarianTokenizer
from cutaway.train.recipe.schema import ModelSource, Precision, PretrainedModelConfig, read_model_config

BASE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of the frozen weights under an adapter, by training precision."""
NUM_FINGERPRINT_SAMPLES = 256


@dataclass(frozen=True)
class BaseCheckpointInfo:
    """Metadata of the base checkpoint. A run stores the metadata, so that it can resume without the base checkpoint.

    All fields are empty if the run trains from scratch.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # when run.json is read
    family: str | None = None
    hf_config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    weights_fingerprint: str | None = None
    """`weights_fingerprint` of the base model, if the run trains an adapter, which is useless with other weights."""
    sentence_transformers_config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_checkpoint(
        cls, base_checkpoint: Checkpoint | None, *, with_fingerprint: bool = False
    ) -> "BaseCheckpointInfo":
        if base_checkpoint is None:
            return cls()
        return cls(
            base_checkpoint.family,
            base_checkpoint.hf_config,
            base_checkpoint.generation_config,
            to_dict(base_checkpoint.config),
            weights_fingerprint(base_checkpoint.model) if with_fingerprint else None,
            base_checkpoint.sentence_transformers_config,
        )

    def eos_token_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Tokens at which generation stops."""
        return read_generation_config(self.generation_config, self.hf_config, tokenizer).eos_token_ids

    def with_eos_token_ids(self, tokenizer: Tokenizer, token_ids: Collection[int]) -> "BaseCheckpointInfo":
        """Add tokens at which generation stops, such as the token that ends a turn in the chat template."""
        known = self.eos_token_ids(tokenizer)
        missing = sorted(set(token_ids) - set(known))
        if self.config is None or not missing:
            return self
        return replace(self, generation_config=self.generation_config | {"eos_token_id": [*known, *missing]})

    def decoder_start_token_id(self, tokenizer: Tokenizer) -> int:
        """Id of the token that starts every target of an encoder-decoder. Raises InputError if there is none."""
        config = read_generation_config(self.generation_config, self.hf_config, tokenizer)
        token_id = config.decoder_start_token_id
        if token_id is None:
            token_id = tokenizer.pad_token_id
        if token_id is None:
            raise InputError(
                "targets need a start token, but the tokenizer has no bos or pad token; use another tokenizer"
            )
        return token_id


def load_base_config(source: ModelSource) -> Config | None:
    """Config of the checkpoint that is fine-tuned, without its weights. None if the run trains from scratch."""
    if not isinstance(source, PretrainedModelConfig):
        return None
    _check_base_source(source)
    return load_config(source.checkpoint)


def load_base_checkpoint(
    source: ModelSource, precision: Precision = "fp32", *, as_stored: bool = False
) -> Checkpoint | None:
    """Load the checkpoint that is fine-tuned. None if the run trains from scratch.

    The weights are in fp32, because they are trained. If an adapter is trained, they are in the training precision. If
    they are quantized, or with `as_stored`, they stay as stored: memory-mapped, and converted one layer at a time. If
    the checkpoint is an adapter, it is merged with its own base.
    """
    if not isinstance(source, PretrainedModelConfig):
        return None
    _check_base_source(source)
    dtype: torch.dtype | None = BASE_DTYPES[precision] if source.adapter is not None else torch.float32
    is_mapped = as_stored or source.quantization != "none"
    return merge_adapters(load(source.checkpoint, dtype=None if is_mapped else dtype))


def _check_base_source(source: PretrainedModelConfig) -> None:
    if not source.checkpoint:
        raise InputError(
            "model.checkpoint is empty, because the recipe fine-tunes a checkpoint of your choice; pass it with --base:"
            " a directory, a run, a .gguf file or a Hub id"
        )
    if source.checkpoint in presets() and not Path(source.checkpoint).exists():
        raise InputError(
            f"model.checkpoint '{source.checkpoint}' is a preset, which has no trained weights to fine-tune; pass a"
            f" model directory, a .gguf file, a Hub id ('owner/{source.checkpoint}') or a model of the package, such as"
            f" tiny-english; to train the preset from scratch, set model = '{source.checkpoint}'"
        )


def reload_base_checkpoint(
    source: ModelSource, base_info: BaseCheckpointInfo, precision: Precision = "fp32", *, seed: int = 0
) -> Checkpoint | None:
    """Load the base checkpoint of a resumed run. None if it is missing or has changed.

    `seed` is that of the run, with which the head of a task was initialized.
    """
    try:
        base_checkpoint = load_base_checkpoint(source, precision)
        if base_checkpoint is not None and base_info.config is not None:
            head = read_config(base_info.config).head
            if isinstance(head, TaskHead) and head != base_checkpoint.config.head:
                base_checkpoint = replace_head(base_checkpoint, head, seed=seed)
    except CutawayError:
        return None
    if base_checkpoint is None or to_dict(base_checkpoint.config) != base_info.config:
        return None
    expected = base_info.weights_fingerprint
    if expected is not None and weights_fingerprint(base_checkpoint.model) != expected:
        return None
    return base_checkpoint


def weights_fingerprint(model: Transformer) -> str:
    """Hash of a sample of each weight, to recognize other weights without reading all of them."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, len(flat) // NUM_FINGERPRINT_SAMPLES)].cpu().float().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def resolve_model_config(source: ModelSource, tokenizer: Tokenizer, base_info: BaseCheckpointInfo) -> Config:
    """Config of the model to train.

    A fine-tuning run uses the config of the base checkpoint. A run from scratch uses the config of the recipe, whose
    vocab_size follows from the tokenizer unless it is given. Raises an error if the tokenizer has more tokens than the
    model.
    """
    if base_info.config is None:
        return read_model_config(source, tokenizer.vocab_size)
    config = read_config(base_info.config)
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, but the checkpoint has vocab_size"
            f" {config.vocab_size:,}; remove data.tokenizer to use the checkpoint's tokenizer"
        )
    return config


def base_tokenizer(base_checkpoint: Checkpoint) -> Tokenizer:
    """Tokenizer of the base checkpoint. Raises InputError if there is none, or if it cannot encode targets (Marian)."""
    if base_checkpoint.tokenizer is None:
        raise InputError("the checkpoint has no tokenizer; set data.tokenizer to the tokenizer it was trained with")
    if isinstance(base_checkpoint.tokenizer, MarianTokenizer):
        raise InputError(
            "the checkpoint's Marian tokenizer encodes the source language only; set data.tokenizer to a tokenizer for"
            " both languages, with kind = 'pretrained'"
        )
    return base_checkpoint.tokenizer


def resolve_export_family(config: Config, family: str | None) -> str:
    """Name of the family in whose format a model is exported.

    This is `family` if it is given, or the first family that supports the config, or else 'cutaway'.
    """
    if family is not None:
        return family
    try:
        return find_family(config)[0].name
    except ConfigError:
        return "cutaway"
