"""What an engine is set up with: a model, the shape of its cache, and the tokens at which its texts begin and end."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from cutaway.errors import InputError
from cutaway.generate.cache import KINDS, PAGE, Kind, Rows, cross_widths
from cutaway.generate.settings import Settings
from cutaway.generate.ticket import Ticket
from cutaway.model import Transformer

UNASKED = 4096
"""Tokens of context that are taken for a model that names none."""
GIB = 2**30


@dataclass
class Plan:
    """How many texts at once, how long, and in which kind of cache."""

    model: Transformer
    rows: int = 8
    context: int | None = None
    """Tokens of a text, prompt and answer together; the model's own unless told."""
    kind: Kind | Literal["auto"] = "auto"
    """'full', 'ring' (sliding windows keep no more than they see), 'paged' (texts share what they begin alike with)."""
    cache_dtype: torch.dtype | None = None
    """torch.int8 halves a cache of 16-bit numbers; the model's own dtype unless told."""
    chunk: int = 512
    """Prompt tokens that are read between two steps."""
    memory: float | None = None
    """Bytes for the pages of a paged cache; for all rows in full unless told."""
    source: int = 512
    """The longest source of an encoder-decoder."""
    eos: Collection[int] = field(default_factory=frozenset)
    decoder_start: int | None = None
    forced_eos: int | None = None

    def __post_init__(self) -> None:
        if "decoder" not in self.model.stacks:
            raise InputError("this model is an encoder, which continues no text; use fill_mask, or model.encode")
        for name in ("rows", "chunk", "source"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}; give a whole number from 1")
        if self.kind != "auto" and self.kind not in KINDS:
            raise InputError(f"cache is {self.kind!r}; use auto, {', '.join(KINDS)}")
        self.slots = self.checked_context()
        self.chunk = min(self.chunk, self.slots)
        stack = self.model.stacks["decoder"]
        if self.kind == "auto":
            windows = any(window is not None and window < self.slots for window in stack.windows)
            self.kind = "ring" if windows and not stack.turns else "full"
        if self.kind == "ring" and stack.turns:
            raise InputError(
                "a ring cannot hold a text that LongRoPE reads again as a whole; use a full or paged cache"
            )
        if "encoder" in self.model.stacks and self.decoder_start is None:
            raise InputError("an encoder-decoder's answer begins with a token of its own; give decoder_start")

    @property
    def longest(self) -> int | None:
        """What the model can read: learned positions end, others do not."""
        return getattr(self.model.stacks["decoder"].embed.position, "length", None)

    def checked_context(self) -> int:
        own = self.model.config.context
        context = self.context if self.context is not None else min(own or UNASKED, self.longest or own or UNASKED)
        if not isinstance(context, int) or isinstance(context, bool) or context < 2:
            raise InputError(f"context is {context!r}; give a whole number of tokens from 2")
        if self.longest is not None and context > self.longest:
            raise InputError(f"context is {context}, but the model has learned {self.longest} positions; lower it")
        return context

    def pages(self) -> int | None:
        """How many pages the memory is enough for."""
        if self.kind != "paged" or self.memory is None:
            return None
        count = int(self.memory // max(1, self.bytes_of_slots(PAGE)))
        if count < -(-self.slots // PAGE):
            least = self.bytes_of_slots(self.slots) / GIB
            raise InputError(
                f"{self.memory / GIB:.3g} GiB holds no text of {self.slots} tokens; give {least:.3g} or more"
            )
        return min(count, self.rows * -(-self.slots // PAGE))

    def bytes_of_slots(self, slots: int) -> int:
        """What so many tokens of one text take."""
        stack = self.model.stacks["decoder"]
        dtype = self.cache_dtype or self.model.dtype
        total = 0
        for widths, window in zip(stack.cache_widths, stack.windows, strict=True):
            room = slots if window is None or self.kind != "ring" else min(slots, window + self.chunk - 1)
            per_head = 2 if dtype == torch.int8 else 0
            total += room * sum(heads * (width * dtype.itemsize + per_head) for heads, width in widths)
        return total

    @property
    def bytes(self) -> int:
        """What the cache takes."""
        pages = self.pages()
        own = (
            (pages + 1) * self.bytes_of_slots(PAGE)
            if pages is not None
            else self.rows * self.bytes_of_slots(self.slots)
        )
        cross = 0
        if "encoder" in self.model.stacks:
            for heads, width in cross_widths(self.model):
                cross += 2 * heads * width * self.model.dtype.itemsize
        return own + self.rows * self.source * cross

    def cache(self) -> Rows:
        """The cache, if there is memory for it."""
        free = free_memory(self.model.device)
        if free is not None and self.bytes > free:
            raise InputError(
                f"a {self.kind} cache of {self.rows} texts of {self.slots} tokens takes {self.bytes / GIB:.3g} GiB, and"
                f" {free / GIB:.3g} are free; lower rows or context, or keep it in int8"
            )
        kind: Kind = self.kind  # type: ignore[assignment]  # 'auto' was settled above
        how = {"kind": kind, "dtype": self.cache_dtype, "chunk": self.chunk, "pages": self.pages()}
        return Rows(self.model, self.rows, self.slots, source=self.source, **how)  # type: ignore[arg-type]

    def begin(self, prompt: Sequence[int], begun: Sequence[int]) -> tuple[list[int], list[int] | None]:
        """What the decoder reads first, and the source if there is an encoder."""
        size = self.model.config.vocab_size
        encodes = "encoder" in self.model.stacks
        if encodes:
            size = self.model.config.source_vocab_size or size  # type: ignore[union-attr]
        tokens = list(prompt)
        if not tokens:
            raise InputError("the prompt is empty; give at least one token, such as the beginning-of-text token")
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < size:
                raise InputError(f"the prompt holds the id {token!r}; the vocabulary has ids 0 to {size - 1}")
        if not encodes:
            if len(tokens) >= self.slots:
                raise InputError(
                    f"the prompt has {len(tokens)} tokens, and the context {self.slots}, answer included; shorten it"
                )
            return tokens + list(begun), None
        if len(tokens) > self.source:
            raise InputError(f"the source has {len(tokens)} tokens, and room is for {self.source}; shorten it")
        assert self.decoder_start is not None
        return [self.decoder_start, *begun], tokens

    def limit(self, tokens: Sequence[int], settings: Settings, begun: Sequence[int]) -> int:
        """Tokens of the answer at most: those asked for, or what the context has room for."""
        settings.check(self.model.config.vocab_size)
        room = self.slots - len(tokens) + len(begun) + 1 if self.kind else 0
        return max(1, min(settings.max_new_tokens or room, room))

    def room(self, ticket: Ticket) -> int:
        """Slots that a request takes at most."""
        return len(ticket.tokens) + ticket.answer.limit - len(ticket.begun) - 1

    def explain_bad(self, ticket: Ticket) -> str:
        place = len(ticket.answer.tokens)
        return (
            f"the model's logits for token {place} of the answer hold NaN, or nothing is left to choose from; check the"
            " weights (ct.load(..., check=True)), the dtype (float16 overflows in some models) and banned tokens"
        )


def free_memory(device: torch.device) -> int | None:
    """Bytes that could be taken now; None where nobody says."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu" or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    return available_memory() or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory() -> int | None:
    """What Linux says it could free."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
            found = dict(line.split(":", 1) for line in lines)
    except OSError:
        return None
    return int(found["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in found else None
