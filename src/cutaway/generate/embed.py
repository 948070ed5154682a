"""`embed`: sentence embeddings of texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.argument_checks import check_positive_int
from cutaway.config.head import EmbeddingHead
from cutaway.errors import InputError
from cutaway.eval_mode import eval_mode
from cutaway.generate.generation_config import CheckpointLike, unpack_checkpoint
from cutaway.generate.text_batches import max_text_len, run_on_texts
from cutaway.model import EncoderOnly, Transformer
from cutaway.model.head import pool
from cutaway.tokenizer.text_encoder import TextEncoder


def embed(
    checkpoint: CheckpointLike | Transformer,
    texts: str | Sequence[str],
    *,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Embeddings of texts, (number of texts, dimension), in fp32 on the CPU.

    The embedding head of the model computes them. A model without an embedding head computes the mean of the last
    hidden states, divided by its norm. Texts that are longer than the context of the model are truncated at the end.
    Texts follow the default prompt of a sentence-transformers directory, if it names one (default_prompt_name).
    """
    model, tokenizer, _ = unpack_checkpoint(checkpoint)
    if tokenizer is None:
        raise InputError("the checkpoint has no tokenizer, which is needed to encode texts; load one that has")
    if batch_size is not None:
        check_positive_int("batch_size", batch_size)
    items = [texts] if isinstance(texts, str) else list(texts)
    encoder = TextEncoder(tokenizer, max_text_len(model.config, tokenizer))
    prompt = default_prompt(getattr(checkpoint, "sentence_transformers_config", {}))
    encoded = [encoder.encode(prompt + text if prompt else text) for text in items]
    run = model if isinstance(model.config.head, EmbeddingHead) else _mean_pooling(model)
    with eval_mode(model):
        rows = run_on_texts(run, model, encoded, tokenizer.pad_token_id or 0, batch_size=batch_size, progress=progress)
    return torch.stack(rows) if rows else torch.zeros(0, 0)


def default_prompt(settings: Mapping[str, Any]) -> str:
    """Text before each text, from config_sentence_transformers.json. Usually empty."""
    return named_prompt(settings, settings.get("default_prompt_name"))


def named_prompt(settings: Mapping[str, Any], name: object) -> str:
    """The prompt of this name in config_sentence_transformers.json. Empty if there is none."""
    prompts = settings.get("prompts")
    prompt = prompts.get(name, "") if isinstance(prompts, Mapping) and isinstance(name, str) else ""
    return prompt if isinstance(prompt, str) else ""


def _mean_pooling(model: Transformer) -> Callable[..., Tensor]:
    compute: Any = model.encode if isinstance(model, EncoderOnly) else model.hidden_states

    def run(tokens: Tensor, mask: Tensor | None, **kwargs: Tensor) -> Tensor:
        return F.normalize(pool(compute(tokens, mask, **kwargs), mask, "mean"), dim=-1)

    return run
