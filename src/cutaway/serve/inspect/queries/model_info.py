"""Queries: description of the model, and tokenization."""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from cutaway.errors import CutawayError, InputError
from cutaway.lens.analysis.attribution import check_attributable
from cutaway.lens.analysis.inputs import AnalysisInputs
from cutaway.lens.structural_edits import STRUCTURAL_OPS, structural_targets, supports_structural_edit
from cutaway.model import EncoderOnly, Transformer
from cutaway.model.adapters.adapter_methods import describe_adapter
from cutaway.model.stack import Stack
from cutaway.pretrained import load_examples
from cutaway.serve.inspect.model_input import MAX_TOKENS
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult

MAX_CHARACTERS = 1 << 16


class ModelInfo(Query):
    """Form (such as decoder), stacks, layers, sites and supported structural edits of the model."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        model, config, tokenizer = inspector.model, inspector.config, inspector.tokenizer
        data = {
            "name": inspector.name,
            "generation": 0 if inspector.catalog is None else inspector.catalog.generation,
            "adapter": describe_adapter(model),
            "form": config.form,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "d_model": config.d_model,
            "vocab_size": config.vocab_size,
            "context": config.context,
            "stacks": {name: _describe_layers(stack) for name, stack in model.stacks.items()},
            "sites": [*inspector.sites, *_list_position_values(model)],
            "structural_edits": _list_structural_edits(model),
            "has_head": inspector.head is not None,
            "is_tied": inspector.head is not None and inspector.head.matrix is inspector.output_stack.embed.token,
            "attribution_error": _find_attribution_error(inspector),
            "is_run_directory": inspector.run is not None,
            "max_tokens": MAX_TOKENS,
            "is_untrained": tokenizer.is_untrained,
            "default_text": tokenizer.default_text,
            "default_source": tokenizer.default_source,
            "default_position": tokenizer.default_position,
            "mask_token_id": tokenizer.mask_token_id if isinstance(model, EncoderOnly) else None,
            "examples": load_examples(inspector.name),
        }
        return QueryResult(data)


def _list_position_values(model: Transformer) -> list[str]:
    """Return the names of the position embeddings and of the attention positions (angles or biases) that exist."""
    names = []
    for stack_name, stack in model.stacks.items():
        prefix = f"{stack_name}." if len(model.stacks) > 1 else ""
        if stack.embed.position is not None:
            names.append(f"{prefix}embed.position")
        if len(stack.positions):
            names += [f"{prefix}blocks.{layer}.attn.position" for layer in range(len(stack.blocks))]
    return names


def _find_attribution_error(inspector: Inspector) -> str | None:
    """Return why direct logit attribution does not apply to the model; None if it applies."""
    source = torch.zeros(1, 1, dtype=torch.long) if len(inspector.model.stacks) > 1 else None
    inputs = AnalysisInputs(inspector.model, None, torch.zeros(1, 1, dtype=torch.long), source)
    try:
        check_attributable(inputs)
    except CutawayError as error:
        return str(error)
    return None


def _list_structural_edits(model: Transformer) -> dict[str, list[str]]:
    """Return a dict from target of structural edits (such as `blocks.0`) to the operations that it supports."""
    operations = {name: STRUCTURAL_OPS[target[0]] for name, target in structural_targets(model).items()}
    return {name: [op for op in ops if supports_structural_edit(model, name, op)] for name, ops in operations.items()}


def _describe_layers(stack: Stack) -> list[dict[str, int | None]]:
    attentions: list[Any] = [block.get_submodule("attn.f") for block in stack.blocks]
    return [
        {"heads": attention.heads, "kv_heads": getattr(attention, "kv_heads", attention.heads), "window": window}
        for attention, window in zip(attentions, stack.windows, strict=True)
    ]


class Tokenize(Query):
    """Token ids of a text and the text of each token. `field` is "source" for the encoder of an encoder-decoder."""

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]
    field: Literal["text", "source"] = "text"

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        tokenizer = inspector.tokenizer
        token_ids = tokenizer.encode_source(self.text) if self.field == "source" else tokenizer.encode(self.text)
        if not token_ids:
            raise InputError("the text has no tokens; enter some text")
        context = inspector.config.context
        if context is not None and len(token_ids) > context <= MAX_TOKENS:
            limit = f"the maximum context length of this model is {context:,} tokens"
            raise InputError(f"the {self.field} has {len(token_ids):,} tokens; {limit}, so shorten it")
        if len(token_ids) > MAX_TOKENS:
            raise InputError(f"the text has {len(token_ids):,} tokens; the limit is {MAX_TOKENS:,}, so shorten it")
        token_strs = [tokenizer.decode_token(token) for token in token_ids]
        return QueryResult({"tokens": token_ids, "token_strs": token_strs})
