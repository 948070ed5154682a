"""What model this is, and a text as it reads it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cutaway.errors import InputError
from cutaway.lens.structure import WAYS, can, places
from cutaway.model import EncoderDecoder, EncoderOnly
from cutaway.model.stack import Stack
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.look import MOST_TOKENS
from cutaway.serve.inspect.question import Question
from cutaway.serve.inspect.wire import Answer

MOST_LETTERS = 1 << 16


class About(Question):
    """Its form, its stacks and their layers, which changes of its build it can take."""

    def answer(self, of: Inspector, job: Job) -> Answer:
        model = of.model
        form = "encoder" if isinstance(model, EncoderOnly) else "decoder"
        form = "encoder-decoder" if isinstance(model, EncoderDecoder) else form
        return Answer(
            {
                "name": of.name,
                "form": form,
                "parameters": sum(each.numel() for each in model.parameters()),
                "dtype": str(model.dtype).removeprefix("torch."),
                "d_model": of.config.d_model,
                "vocab_size": of.config.vocab_size,
                "context": of.config.context,
                "stacks": {name: layers(stack) for name, stack in model.stacks.items()},
                "sites": list(of.sites),
                "builds": {
                    name: [how for how in WAYS[part[0]] if can(model, name, how)]
                    for name, part in places(model).items()
                },
                "has_head": getattr(model, "head", None) is not None,
                "is_run": of.run is not None,
                "most_tokens": MOST_TOKENS,
                "fresh": of.words.fresh,
                "text": of.words.text,
                "source": of.words.source,
            }
        )


def layers(stack: Stack) -> list[dict[str, Any]]:
    found = []
    block: Any
    for number, block in enumerate(stack.blocks):
        f = block.attn.f
        groups = getattr(f, "kv_heads", f.heads)
        found.append({"heads": f.heads, "kv_heads": groups, "window": stack.windows[number]})
    return found


class Tokens(Question):
    """A text as the model reads it: ids, and each one's text. The source of an encoder-decoder is a side of its own."""

    text: Annotated[str, Field(max_length=MOST_LETTERS)]
    side: Literal["text", "source"] = "text"

    def answer(self, of: Inspector, job: Job) -> Answer:
        ids = of.words.source_ids(self.text) if self.side == "source" else of.words.ids(self.text)
        if not ids:
            raise InputError("this text has no tokens; type a word")
        if len(ids) > MOST_TOKENS:
            raise InputError(f"this text has {len(ids):,} tokens, and up to {MOST_TOKENS:,} are shown; shorten it")
        return Answer({"tokens": ids, "words": [of.words.of(token) for token in ids]})
