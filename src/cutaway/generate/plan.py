"""What an engine is set up with: a model, the shape of its cache, and the tokens at which its texts begin and end."""

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from cutaway.errors import InputError
from cutaway.generate.answer import Answer
from cutaway.generate.cache import KINDS, PAGE, Kind, Rows, cross_widths
from cutaway.generate.settings import Settings, ids, index, real, shown, whole
from cutaway.generate.ticket import Ticket
from cutaway.model import Transformer
from cutaway.model.inputs import FLOATS
from cutaway.model.rope import Rope
from cutaway.model.stack import Stack
from cutaway.text import Tokenizer

UNASKED = 4096
"""Tokens of context that are taken for a model that names none."""
GIB = 2**30


@dataclass
class Plan:
    """How many texts at once, how long, and in which kind of cache. A plan is checked when it is made."""

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
    bits: int | None = None
    """Bits of a weight in steps: 8, or on a GPU 4, where fewer bytes are worth a little rounding."""
    compiled: bool | None = None
    """Whether steps are made fast at once: recorded on a GPU, compiled on the CPU. Unless told, when it pays."""
    eos: Collection[int] = field(default_factory=frozenset)
    """Each of these ends a text. `generate` takes them from a checkpoint's files; a plan is told."""
    decoder_start: int | None = None
    forced_eos: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, Transformer):
            raise InputError(f"model is a {type(self.model).__name__}; give a model, such as a checkpoint's .model")
        if "decoder" not in self.model.stacks:
            raise InputError("this model is an encoder, which continues no text; use fill_mask, or model.encode")
        if self.model.device.type == "meta":
            raise InputError("this model is on the meta device, where it has shapes and no values; load its weights")
        for name in ("rows", "chunk", "source"):
            value = index(getattr(self, name))
            if value is None or value < 1:
                raise InputError(f"{name} is {shown(getattr(self, name))}; give a whole number from 1")
            setattr(self, name, value)
        if self.compiled is not None and not isinstance(self.compiled, bool):
            raise InputError(f"compiled is {shown(self.compiled)}; give True, False or None (when it pays)")
        if self.kind != "auto" and self.kind not in KINDS:
            raise InputError(f"cache is {shown(self.kind)}; use auto, {', '.join(KINDS)}")
        if self.cache_dtype is not None and self.cache_dtype not in (*FLOATS, torch.int8):
            raise InputError(f"cache_dtype is {shown(self.cache_dtype)}; use torch.int8 or a dtype of floats")
        if self.memory is not None and (real(self.memory) is None or not 0 < self.memory < math.inf):
            raise InputError(f"memory is {shown(self.memory)}; give a number of bytes above 0")
        self.slots = self.checked_context()
        self.chunk = min(self.chunk, self.slots)
        if self.kind == "auto":
            windows = any(window is not None and window < self.slots for window in self.decoder.windows)
            self.kind = "ring" if windows and self.whole_from is None else "full"
        if self.kind == "ring" and self.whole_from is not None:
            raise InputError(
                f"texts of over {self.whole_from} tokens are read as a whole by this model's scaling of RoPE, which a"
                f" ring cannot hold; use a full or paged cache, or a context of {self.whole_from}"
            )
        self.pages()  # says so if the memory is not enough for one text
        size = self.model.config.vocab_size
        self.eos = frozenset(token for token in ids("eos", self.eos) if token < size)
        if "encoder" in self.model.stacks and self.decoder_start is None:
            raise InputError("an encoder-decoder's answer begins with a token of its own; give decoder_start")
        for name in ("decoder_start", "forced_eos"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < size:
                raise InputError(f"{name} is the id {token}; the vocabulary has ids 0 to {size - 1}")

    @property
    def decoder(self) -> Stack:
        return self.model.stacks["decoder"]

    @property
    def turns(self) -> list[int]:
        """Lengths at which LongRoPE turns a text's tokens by other angles, so that it must be read again."""
        return [turn for turn in self.decoder.turns if turn < self.slots]

    @property
    def whole_from(self) -> int | None:
        """Longer texts than this turn by angles that depend on their length, so they are read in one piece."""
        ropes = [position for position in self.decoder.positions.values() if isinstance(position, Rope)]
        switches = [rope.switch_at for rope in ropes if rope.switch_at is not None and rope.switch_at < self.slots]
        return min(switches, default=None)

    @property
    def longest(self) -> int | None:
        """What the model can read: learned positions end, others do not."""
        return getattr(self.decoder.embed.position, "length", None)

    def checked_context(self) -> int:
        own = self.model.config.context
        context = self.context if self.context is not None else min(own or UNASKED, self.longest or own or UNASKED)
        found = index(context)
        if found is None or found < 2:
            raise InputError(f"context is {shown(context)}; give a whole number of tokens from 2")
        if self.longest is not None and found > self.longest:
            raise InputError(f"context is {found}, but the model has learned {self.longest} positions; lower it")
        return found

    @property
    def page(self) -> int:
        """Tokens in a page."""
        return min(PAGE, self.slots)

    def pages(self) -> int | None:
        """How many pages the memory is enough for, beside the one that belongs to nobody."""
        if self.kind != "paged" or self.memory is None:
            return None
        each, one = self.bytes_of_slots(self.page), -(-self.slots // self.page)
        count = int(self.memory // max(1, each)) - 1
        if count < one:
            raise InputError(
                f"{self.memory / GIB:.3g} GiB holds no text of {self.slots} tokens; give {(one + 1) * each / GIB:.3g}"
                " or more, or lower the context"
            )
        return min(count, self.rows * one)

    def bytes_of_slots(self, slots: int) -> int:
        """What so many tokens of one text take."""
        stack = self.decoder
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
        own = self.rows * self.bytes_of_slots(self.slots)
        if self.kind == "paged":
            pages = self.pages() or self.rows * -(-self.slots // self.page)
            own = (pages + 1) * self.bytes_of_slots(self.page)
        cross = 0
        if "encoder" in self.model.stacks:
            for heads, width in cross_widths(self.model):
                cross += 2 * heads * width * self.model.dtype.itemsize
        return own + self.rows * self.source * cross

    @torch.inference_mode(False)  # what is made in that mode can be changed in no other, as by another thread
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
        config = self.model.config
        encodes = "encoder" in self.model.stacks
        size = getattr(config, "source_vocab_size", None) or config.vocab_size
        tokens, first = known("the prompt", prompt, size), known("begun", begun, config.vocab_size)
        if not tokens:
            raise InputError("the prompt is empty; give at least one token, such as the beginning-of-text token")
        if not encodes:
            if len(tokens) + len(first) >= self.slots:
                raise InputError(
                    f"the prompt has {len(tokens)} tokens, and the context {self.slots}, answer included; shorten it"
                )
            return tokens + first, None
        learned = getattr(self.model.stacks["encoder"].embed.position, "length", None)
        room = self.source if learned is None else min(self.source, learned)
        if len(tokens) > room:
            raise InputError(f"the source has {len(tokens)} tokens, and room is for {room}; shorten it")
        assert self.decoder_start is not None
        return [self.decoder_start, *first], tokens

    def ticket(
        self,
        prompt: Sequence[int],
        settings: Settings,
        tokenizer: Tokenizer | None,
        *,
        seed: int,
        begun: Sequence[int] = (),
    ) -> Ticket:
        """A request that was checked, with what its answer is begun with told already."""
        if settings.stop and tokenizer is None:
            raise InputError("stop strings are found in text, and there is no tokenizer to make any; give stop_tokens")
        seed = whole("seed", seed, 0, 2**63 - 1)
        tokens, source = self.begin(prompt, begun)
        limit = self.limit(tokens, settings, begun)
        answer = Answer(settings, limit, tokenizer, self.eos, after=() if source else prompt)
        ticket = Ticket(tokens, settings, seed, answer)
        ticket.source, ticket.begun, ticket.launched = source, list(begun), len(begun)
        for token in ticket.begun:  # certain, so with log-probability 0
            ticket.tell(answer.take(token, 0.0, {token: 0.0} if settings.logprobs else None))
        return ticket

    def limit(self, tokens: Sequence[int], settings: Settings, begun: Sequence[int]) -> int:
        """Tokens of the answer at most: those asked for, or what the context has room for."""
        settings.check(self.model.config.vocab_size)
        room = self.slots - len(tokens) + len(begun)
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


def known(name: str, tokens: Sequence[int], size: int) -> list[int]:
    """Ids of this vocabulary, as integers."""
    found = []
    for token in tokens:
        number = token if type(token) is int else index(token)
        if number is None or not 0 <= number < size:
            raise InputError(f"{name} holds the id {shown(token)}; the vocabulary has ids 0 to {size - 1}")
        found.append(number)
    return found


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
