"""Queries: description of the model, and tokenization."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cutaway.errors import InputError
from cutaway.lens.structural_edits import STRUCTURAL_OPS, structural_targets, supports_structural_edit
from cutaway.model import EncoderDecoder, EncoderOnly
from cutaway.model.stack import Stack
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import MAX_TOKENS
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.base import Query

MAX_CHARACTERS = 1 << 16


class ModelInfo(Query):
    """Form, stacks, layers, sites and supported structural edits of the model."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        model = inspector.model
        form = "encoder" if isinstance(model, EncoderOnly) else "decoder"
        form = "encoder-decoder" if isinstance(model, EncoderDecoder) else form
        return QueryResult(
            {
                "name": inspector.name,
                "form": form,
                "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
                "dtype": str(model.dtype).removeprefix("torch."),
                "d_model": inspector.config.d_model,
                "vocab_size": inspector.config.vocab_size,
                "context": inspector.config.context,
                "stacks": {name: _describe_layers(stack) for name, stack in model.stacks.items()},
                "sites": list(inspector.sites),
                "structural_edits": {
                    name: [
                        operation
                        for operation in STRUCTURAL_OPS[target[0]]
                        if supports_structural_edit(model, name, operation)
                    ]
                    for name, target in structural_targets(model).items()
                },
                "has_head": getattr(model, "head", None) is not None,
                "is_run_directory": inspector.run_directory is not None,
                "max_tokens": MAX_TOKENS,
                "is_untrained": inspector.tokenizer.is_untrained,
                "default_text": inspector.tokenizer.default_text,
                "default_source": inspector.tokenizer.default_source,
            }
        )


def _describe_layers(stack: Stack) -> list[dict[str, Any]]:
    layers = []
    block: Any
    for number, block in enumerate(stack.blocks):
        attention = block.attn.f
        kv_heads = getattr(attention, "kv_heads", attention.heads)
        layers.append({"heads": attention.heads, "kv_heads": kv_heads, "window": stack.windows[number]})
    return layers


class Tokenize(Query):
    """Token ids of a text and the text of each token; `field` selects the source of an encoder-decoder."""

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]
    field: Literal["text", "source"] = "text"

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        token_ids = (
            inspector.tokenizer.encode_source(self.text)
            if self.field == "source"
            else inspector.tokenizer.encode(self.text)
        )
        if not token_ids:
            raise InputError("the text has no tokens; enter some text")
        if len(token_ids) > MAX_TOKENS:
            raise InputError(f"the text has {len(token_ids):,} tokens; the limit is {MAX_TOKENS:,}, so shorten it")
        return QueryResult(
            {"tokens": token_ids, "token_strs": [inspector.tokenizer.decode_token(token) for token in token_ids]}
        )
