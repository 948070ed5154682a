"""What model this is, and a text as it reads it."""

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
    """Its form, its stacks and their layers, which changes of its build it can take."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        model = inspector.model
        form = "encoder" if isinstance(model, EncoderOnly) else "decoder"
        form = "encoder-decoder" if isinstance(model, EncoderDecoder) else form
        return QueryResult(
            {
                "name": inspector.name,
                "form": form,
                "num_parameters": sum(each.numel() for each in model.parameters()),
                "dtype": str(model.dtype).removeprefix("torch."),
                "d_model": inspector.config.d_model,
                "vocab_size": inspector.config.vocab_size,
                "context": inspector.config.context,
                "stacks": {name: _describe_layers(stack) for name, stack in model.stacks.items()},
                "sites": list(inspector.sites),
                "structural_edits": {
                    name: [how for how in STRUCTURAL_OPS[part[0]] if supports_structural_edit(model, name, how)]
                    for name, part in structural_targets(model).items()
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
    found = []
    block: Any
    for number, block in enumerate(stack.blocks):
        f = block.attn.f
        groups = getattr(f, "kv_heads", f.heads)
        found.append({"heads": f.heads, "kv_heads": groups, "window": stack.windows[number]})
    return found


class Tokenize(Query):
    """A text as the model reads it: ids, and each one's text. The source of an encoder-decoder is a side of its own."""

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]
    field: Literal["text", "source"] = "text"

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        ids = (
            inspector.tokenizer.encode_source(self.text)
            if self.field == "source"
            else inspector.tokenizer.encode(self.text)
        )
        if not ids:
            raise InputError("this text has no tokens; type a word")
        if len(ids) > MAX_TOKENS:
            raise InputError(f"this text has {len(ids):,} tokens, and up to {MAX_TOKENS:,} are shown; shorten it")
        return QueryResult({"tokens": ids, "token_strs": [inspector.tokenizer.decode_token(token) for token in ids]})
