"""The model at work for many texts: prompts are read in pieces, and all rows take their next step together."""

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cutaway.errors import InputError
from cutaway.generate.cache import Rows
from cutaway.generate.fast.worth import Ledger, Pace
from cutaway.generate.sampling import Drawn, Needs, Sampler
from cutaway.generate.ticket import Ticket
from cutaway.model import Transformer
from cutaway.model.cache import Cache
from cutaway.model.moe import MixtureOfExperts


class Runner:
    """One model, its cache and its sampler on one device. Nothing else touches them."""

    @torch.inference_mode(False)  # what is made in that mode can be changed in no other
    def __init__(
        self,
        model: Transformer,
        cache: Rows,
        *,
        fast: bool | None = None,
        bits: int | None = None,
        compiled: bool = True,
    ) -> None:
        """`fast`: at once (True), never (False), or when it pays. `bits` of a weight in fast steps, if fewer than the
        model's. `compiled`: whether making steps fast on the CPU means compiling them too."""
        if bits not in (None, 4, 8, 16):
            raise InputError(f"bits is {bits!r}; steps can use weights of 16, 8 or 4 bits")
        self.model: Any = model
        self.cache = cache
        self.sampler = Sampler(cache.batch, model.config.vocab_size, model.device)
        self.next = torch.zeros(cache.batch, 1, dtype=torch.long, device=model.device)
        """Of each row, the token that its next step reads."""
        self.encodes = "encoder" in model.stacks
        self.active = torch.zeros(cache.batch, dtype=torch.bool, device=model.device)
        self.bits = bits
        self.quick: Any = model
        """What takes the steps: the model, or its like made for them. Prompts are read by the model itself."""
        self.graphs: Callable[[int, Needs], Drawn] | None = None
        self.compiled_logits: Callable[[Tensor, Rows, Tensor], Tensor] | None = None
        """What computes a step's logits, if it was compiled."""
        kind = model.device.type
        able = not hooked(model) and kind in ("cuda", "cpu")
        if bits is not None and not able:
            raise InputError("bits is for steps made fast, and this model has hooks or is elsewhere; leave bits out")
        unasked = fast is None and kind == "cpu"  # a compiler takes most of a minute, and Ctrl-C for its own affair
        self.pace = Pace(Ledger(model, cache.batch, bits)) if able and fast is not False and not unasked else None
        """Measures steps: plain ones until it pays to make them fast, then what that cost."""
        if bits is not None and kind == "cpu":
            self.pack(bits, one_row=fast is True and cache.batch == 1)
        if self.pace is not None and (fast or (bits is not None and kind == "cuda")):
            start = time.perf_counter()
            self.hasten()
            self.pace.begin(time.perf_counter() - start)

    def hasten(self) -> None:
        """From now on steps are fast ones."""
        if self.model.device.type == "cuda":
            self.hasten_on_gpu()
        else:
            if self.quick is self.model:
                self.pack(None, one_row=self.cache.batch == 1)
            self.compiled_logits = torch.compile(self.step_logits, fullgraph=True)

    def pack(self, bits: int | None, *, one_row: bool) -> None:
        """Steps on the CPU by weights in the form that is read fastest."""
        from cutaway.generate.fast.lean import kind_for, lean

        if bits == 4:
            raise InputError("bits is 4, which is for GPUs; on the CPU use 8 or 16")
        kind = kind_for(self.model, bits, one_row_compiled=one_row)
        if kind is not None:
            self.quick = lean(self.model, kind).eval()

    def hasten_on_gpu(self) -> None:
        from cutaway.generate.fast.blocks import can_quicken, quick  # Triton, which not every machine has
        from cutaway.generate.fast.graphs import Graphs

        if can_quicken(self.model, self.cache):
            self.quick = quick(self.model, None if self.bits == 16 else self.bits).eval()
        elif self.bits is not None:
            raise InputError(f"bits is {self.bits}, which is for up to 64 texts at once and no 64-bit numbers")
        if can_be_recorded(self.model):
            self.graphs = Graphs(self.fixed_step, self.active)

    @torch.inference_mode(False)
    @torch.no_grad()
    def open(self, row: int, ticket: Ticket, eos: Collection[int]) -> None:
        """Give a row to a request; a source is read now."""
        self.cache.open(row, ticket.read, ticket.pages)
        prompt = ticket.tokens[: len(ticket.tokens) - len(ticket.begun)]  # what it begins with is said already
        self.sampler.set(row, ticket.settings, prompt, ticket.seed, eos=eos, answer=ticket.begun)
        if ticket.source is not None:
            self.read_source(row, ticket.source, ticket.tokens)

    def close(self, row: int) -> None:
        self.cache.close(row)
        self.sampler.clear(row)

    def let_go(self) -> None:
        """Forget the fast steps, which hold this runner: a cache may be most of the device's memory, and would stay
        until Python looks for such circles."""
        self.graphs = self.compiled_logits = None

    @torch.no_grad()
    def read(self, start: int, pieces: Sequence[Sequence[int]], before: Sequence[int]) -> None:
        """Read a piece of each of these rows' texts, of which they have read `before` tokens."""
        longest = max(map(len, pieces))
        tokens = torch.tensor([[*piece, *[0] * (longest - len(piece))] for piece in pieces])
        mask = None
        if any(len(piece) < longest for piece in pieces):
            mask = torch.tensor([[True] * len(piece) + [False] * (longest - len(piece)) for piece in pieces])
            mask = mask.to(self.model.device)
        part = self.cache.part(start, start + len(pieces), most=max(before))
        self.hidden(self.model, tokens.to(self.model.device), mask, part)

    @torch.no_grad()
    def read_source(self, row: int, source: Sequence[int], first: Sequence[int]) -> None:
        """Let an encoder read a row's source; `first` is what the decoder begins with."""
        alone: Cache = self.model.new_cache(1, len(first))
        device = self.model.device
        with any_length():
            self.model.hidden(
                torch.tensor([list(source)], device=device), torch.tensor([list(first)], device=device), cache=alone
            )
        self.cache.remember_source(row, alone)

    @torch.no_grad()
    def step(self, rows: int, most: int, ahead: int = 1) -> Drawn:
        """The next token of the first `rows` rows, none of which has read more than `most`.

        `ahead`: how many steps are still to come, as far as is known.
        """
        if self.pace is None:
            return self.one_step(rows, most)
        start = time.perf_counter()
        try:
            if self.pace.pays(ahead):
                self.hasten()
            drawn = self.one_step(rows, most)
        except (RuntimeError, ImportError, OSError) as error:  # no compiler here, or one that fails; nothing was said
            if interrupted(error):
                raise KeyboardInterrupt from error
            if not self.pace.hastened or self.pace.fast or self.bits is not None:
                raise
            warnings.warn(f"steps stay as they are, since making them fast failed: {error}", stacklevel=2)
            self.pace, self.quick, self.graphs, self.compiled_logits = None, self.model, None, None
            return self.one_step(rows, most)
        drawn.tokens.cpu()
        if self.pace.took(time.perf_counter() - start):
            self.pace = None
        return drawn

    def one_step(self, rows: int, most: int) -> Drawn:
        needs = self.sampler.needs(rows)
        if self.graphs is not None:
            return self.graphs(rows, needs)
        # The length of a tensor is a number that a compiled step takes as it comes, if it is neither 0 nor 1.
        span = torch.empty(max(2, most + 1), dtype=torch.bool)
        if self.compiled_logits is not None:  # else the compiler, which takes a second to import, is not needed
            torch._dynamo.mark_dynamic(span, 0)
        logits = (self.compiled_logits or self.step_logits)(self.next[:rows], self.cache.part(0, rows, most=most), span)
        drawn = self.sampler.sample(logits, needs)
        self.next[:rows, 0] = drawn.tokens
        return drawn

    def step_logits(self, tokens: Tensor, part: Rows, span: Tensor) -> Tensor:
        part.used = span.shape[0] - 1
        return self.quick.head(self.hidden(self.quick, tokens, None, part))[:, -1]

    def fixed_step(self, rows: int, needs: Needs) -> Drawn:
        """A step whose shapes depend on nothing but `rows`; only active rows take part."""
        part = self.cache.part(0, rows, most=0)
        part.fixed = True
        active = self.active[:rows]
        logits = self.quick.head(self.hidden(self.quick, self.next[:rows], active.unsqueeze(-1), part))[:, -1]
        drawn = self.sampler.sample(logits, needs, active)
        self.next[:rows, 0] = torch.where(active, drawn.tokens, self.next[:rows, 0])
        return drawn

    def hidden(self, model: Any, tokens: Tensor, mask: Tensor | None, cache: Rows) -> Tensor:
        given = (None, tokens, None, mask) if self.encodes else (tokens, mask)
        if not tokens.is_cuda:
            return model.hidden(*given, cache=cache)
        with any_length():
            return model.hidden(*given, cache=cache)

    def swap(self, a: int, b: int) -> None:
        """Two texts change rows."""
        if a != b:
            self.cache.swap(a, b)
            self.sampler.swap(a, b)
            kept = self.next[a].clone()
            self.next[a] = self.next[b]
            self.next[b] = kept


def any_length() -> AbstractContextManager[None]:
    """Attention by kernels that are ready for every shape: cuDNN plans for each anew, which takes longer than reading,
    and texts have all lengths."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@contextmanager
def at_rest(*models: Transformer) -> Iterator[None]:
    """Models that are being trained answer without dropout, and go on being trained."""
    training = [module for model in models for module in model.modules() if module.training]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def interrupted(error: BaseException | None) -> bool:
    """Whether it was the user who stopped this: a compiler takes that for a failure of its own."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def hooked(model: Transformer) -> bool:
    """Whether somebody looks at the model's modules, or changes what they do."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def can_be_recorded(model: Transformer) -> bool:
    """Experts in other numbers than bf16 are computed one by one, by counts that only the host can read."""
    experts = any(isinstance(module, MixtureOfExperts) for module in model.modules())
    return not experts or model.dtype == torch.bfloat16
