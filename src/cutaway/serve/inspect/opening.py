"""A model, however it comes, made ready to be looked into."""

from pathlib import Path
from typing import Any

from cutaway.errors import InputError
from cutaway.generate.texts import opened
from cutaway.model import Transformer
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.words import CODE, PROSE, Words


def looked_into(thing: Any, text: str | None = None, *, name: str = "", run: Path | None = None) -> Inspector:
    """A checkpoint with its tokenizer, or a bare model, which reads bytes."""
    model, tokenizer, begin = (thing, None, None) if isinstance(thing, Transformer) else opened(thing)
    if not isinstance(model, Transformer):
        raise InputError(f"a {type(model).__name__} is no cutaway model; give one of ct.load(…) or ct.build(…)")
    if model.device.type == "meta":
        raise InputError("the model is on the meta device, where it has shapes and no values; build it on another")
    usual = CODE if name == "tiny-python" else PROSE
    two = len(model.stacks) > 1
    words = Words(
        model.config.vocab_size,
        tokenizer,
        start=((begin.decoder_start if begin else None) or 0) if two else None,
        text="" if two else text or usual,
        source=(text or usual) if two else None,
        begin=begin,
    )
    return Inspector(model, words, name=name, run=run)
