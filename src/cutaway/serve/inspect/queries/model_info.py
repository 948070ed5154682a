"""Queries: description of the model, and tokenization."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cutaway.errors import InputError
from cutaway.lens.structural_edits import STRUCTURAL_OPS, structural_targets, supports_structural_edit
from cutaway.model import Transformer
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
            "form": config.form,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "d_model": config.d_model,
            "vocab_size": config.vocab_size,
            "context": config.context,
            "stacks": {name: _describe_layers(stack) for name, stack in model.stacks.items()},
            "sites": list(inspector.sites),
            "structural_edits": _list_structural_edits(model),
            "has_head": inspector.head is not None,
            "is_run_directory": inspector.run_directory is not None,
            "max_tokens": MAX_TOKENS,
            "is_untrained": tokenizer.is_untrained,
            "default_text": tokenizer.default_text,
            "default_source": tokenizer.default_source,
            "examples": load_examples(inspector.name),
        }
        return QueryResult(data)


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
        if len(token_ids) > MAX_TOKENS:
            raise InputError(f"the text has {len(token_ids):,} tokens; the limit is {MAX_TOKENS:,}, so shorten it")
        token_strs = [tokenizer.decode_token(token) for token in token_ids]
        return QueryResult({"tokens": token_ids, "token_strs": token_strs})
