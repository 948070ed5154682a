"""A model that is looked into: passes over texts, the latest of them kept within a limit of memory."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.lens import edit, sites
from cutaway.lens.equations import is_added, on_stream
from cutaway.lens.readings.subject import resting
from cutaway.lens.taps import Taps
from cutaway.model import DecoderOnly, EncoderDecoder, EncoderOnly, Transformer
from cutaway.model.stack import Stack
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.kept import SQUARE, Kept, planned
from cutaway.serve.inspect.look import Look
from cutaway.serve.inspect.words import Words

Passed = Callable[[str, Tensor], None]
LIMIT = 1 << 30
"""Bytes of passes that are kept."""


class Inspector:
    """One model for all questions. A pass has it alone: an edit changes it for as long as it runs."""

    def __init__(
        self, model: Transformer, words: Words, *, name: str = "", run: Path | None = None, limit: int = LIMIT
    ) -> None:
        self.model, self.words, self.name, self.run, self.limit = model.eval(), words, name, run, limit
        self.sites = sites(model)
        self.alone = threading.RLock()
        self.passes: OrderedDict[str, Kept] = OrderedDict()

    @property
    def config(self) -> Config:
        return self.model.config

    def kept(self, look: Look, job: Job, passed: Passed = lambda name, value: None) -> Kept:
        """The pass over a text: one that was kept, or a new one, of which `passed` is told site by site."""
        self.refuse(look)
        with self.alone:
            found = self.passes.get(look.key)
            if found is None:
                found = Kept(look)
                self.read(found, self.affordable(look), job, passed)
                self.passes[look.key] = found
            self.passes.move_to_end(look.key)
            while len(self.passes) > 1 and sum(each.nbytes for each in self.passes.values()) > self.limit:
                self.passes.popitem(last=False)
            return found

    def with_values(self, look: Look, names: list[str], job: Job) -> Kept:
        """The same, with the values of these sites even where keeping all of them was too much."""
        kept = self.kept(look, job)
        missing = [name for name in names if name not in kept.values]
        if missing:
            if wrong := next((name for name in missing if name not in self.sites), None):
                raise InputError(f"'{wrong}' is no place in this model; there is {', '.join(list(self.sites)[:4])} …")
            with self.alone:
                self.read(kept, missing, job)
        return kept

    def affordable(self, look: Look) -> list[str]:
        """All but what is quadratic, if half of the limit holds it; else the stream and what is added to it."""
        found = [each for each in self.sites.values() if each.side not in SQUARE and each.name != "logits"]
        source = None if look.source is None else len(look.source)
        if planned(found, len(look.tokens), source, self.model.dtype.itemsize) > self.limit // 2:
            found = [each for each in found if on_stream(each.name) or is_added(each.name) or each.layer is None]
        return [each.name for each in found]

    def read(self, kept: Kept, names: list[str], job: Job, passed: Passed = lambda name, value: None) -> None:
        taps, note = Taps(), kept.reader(job, passed)
        with self.changed(kept.look):
            watching: list[RemovableHandle] = []
            try:
                watching.extend(kept.watch(self.model))
                taps.open((self.sites[name], note, None) for name in names)
                self.hidden(kept.look)
            finally:
                taps.close()
                for handle in watching:
                    handle.remove()

    @contextmanager
    def changed(self, look: Look) -> Iterator[None]:
        """The model alone, at rest, with the look's edits."""
        with self.alone, ExitStack() as stack:
            stack.enter_context(resting(self.model))
            if look.edits:
                stack.enter_context(edit(self.model, look.edits))
            yield

    def hidden(self, look: Look) -> Tensor:
        """The stream that the head reads, (1, T, d)."""
        tokens = torch.tensor([look.tokens], device=self.model.device)
        if isinstance(self.model, EncoderDecoder):
            return self.model.hidden(torch.tensor([look.source], device=self.model.device), tokens)
        if isinstance(self.model, EncoderOnly):
            return self.model.encode(tokens)
        assert isinstance(self.model, DecoderOnly)
        return self.model.hidden(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """What the head says of vectors, in fp32; hooks are passed by."""
        head: Any = getattr(self.model, "head", None)
        if head is None:
            raise InputError("this model has no head, so it says no tokens; look at its vectors instead")
        with torch.no_grad():
            return head.forward(hidden).float()

    def refuse(self, look: Look) -> None:
        """What this model cannot read, before anything is made of it."""
        two = isinstance(self.model, EncoderDecoder)
        if two != (look.source is not None):
            raise InputError("this model reads a source beside the text" if two else "this model reads no source")
        size = self.config.vocab_size
        for name, text, most in (
            ("tokens", look.tokens, size),
            ("source", look.source or (), getattr(self.config, "source_vocab_size", None) or size),
        ):
            if outside := next((token for token in text if token >= most), None):
                raise InputError(f"{name} has {outside}, and the vocabulary ends at {most - 1}")

    @property
    def writer(self) -> Stack:
        """The stack that the head reads."""
        return [*self.model.stacks.values()][-1]

    def place(self, look: Look, at: int) -> int:
        if at >= len(look.tokens):
            raise InputError(f"the text has {len(look.tokens)} tokens, 0 to {len(look.tokens) - 1}, and {at} is none")
        return at

    def likely(self, pairs: Iterable[tuple[int, float]]) -> list[dict[str, Any]]:
        """Tokens with their shares, as the page is told of them."""
        return [{"token": token, "text": self.words.of(token), "share": share} for token, share in pairs]
