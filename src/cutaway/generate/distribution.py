"""The chances of the next token: from logits and what each row asks for to a distribution, and a draw from it.

What the rows need between them is known on the host (`Needs`); nothing here asks a tensor for its value, so a step can
be captured in a CUDA graph or compiled whole. Order, as transformers' processors: repetition, presence and frequency,
bias and bans, the least length, temperature, top-k, top-p, min-p.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int, Int64
from torch import Tensor

from cutaway.generate.settings import Settings

WINDOWS = (64, 256, 1024)
"""How many of the largest logits are sought for top-k; beyond the last, all are searched."""
FARTHEST = 2**31 - 1
FINEST = 2.0**42
"""Parts of the largest chance in which top-p counts: a million tokens' fit an int64."""


@dataclass(frozen=True)
class Needs:
    """What the rows of a batch need between them: the key of a compiled or captured step."""

    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    window: int = 0
    """How many of the largest logits top-k and top-p look at; 0 where there is neither."""
    min_p: bool = False
    repetition: bool = False
    counts: bool = False
    bias: bool = False
    least: bool = False
    logprobs: int | None = None

    def __or__(self, other: "Needs") -> "Needs":
        told = [n for n in (self.logprobs, other.logprobs) if n is not None]
        return Needs(
            self.sampled or other.sampled,
            self.top_k or other.top_k,
            self.top_p or other.top_p,
            max(self.window, other.window),
            self.min_p or other.min_p,
            self.repetition or other.repetition,
            self.counts or other.counts,
            self.bias or other.bias,
            self.least or other.least,
            max(told, default=None),
        )

    @property
    def processed(self) -> bool:
        """Whether any logit is changed before the choice."""
        return self.repetition or self.counts or self.bias or self.least


def needs_of(settings: Settings, vocab_size: int, stop_ids: Iterable[int]) -> Needs:
    """What one request needs."""
    sampled = settings.temperature > 0
    size = min(settings.top_k or vocab_size, vocab_size)
    top_k, top_p = sampled and size < vocab_size, sampled and (settings.top_p or 1) < 1
    return Needs(
        sampled=sampled,
        top_k=top_k,
        top_p=top_p,
        window=next((w for w in WINDOWS if size <= w < vocab_size), vocab_size) if top_k or top_p else 0,
        min_p=sampled and bool(settings.min_p),
        repetition=settings.repetition_penalty != 1,
        counts=settings.presence_penalty != 0 or settings.frequency_penalty != 0,
        bias=bool(settings.logit_bias or settings.banned),
        least=settings.min_new_tokens > 0 and bool(set(stop_ids)),
        logprobs=settings.logprobs,
    )


@dataclass
class Rows:
    """What each row asks for and what it has read, as tensors; those as wide as the vocabulary only where used."""

    numbers: Float64[Tensor, "n 6"]
    """temperature, top_p, min_p, repetition, presence, frequency."""
    whole: Int64[Tensor, "n 3"]
    """seed, top_k, least length."""
    step: Int64[Tensor, " n"]
    """How many tokens the answer has."""
    seen: Bool[Tensor, "n V"] | None = None
    """In the prompt or the answer."""
    counts: Int[Tensor, "n V"] | None = None
    """How often in the answer."""
    bias: Float32[Tensor, "n V"] | None = None
    stops: Bool[Tensor, "n V"] | None = None
    """What would end the text."""

    @property
    def sampled(self) -> Bool[Tensor, " n"]:
        return self.numbers[:, 0] > 0

    def number(self, column: int) -> Float32[Tensor, "n 1"]:
        return self.numbers[:, column : column + 1].float()

    def tensors(self) -> list[Tensor]:
        wide = (self.seen, self.counts, self.bias, self.stops)
        return [self.numbers, self.whole, self.step, *(tensor for tensor in wide if tensor is not None)]

    def first(self, n: int) -> "Rows":
        """A view of the first n rows."""
        wide = [None if t is None else t[:n] for t in (self.seen, self.counts, self.bias, self.stops)]
        return Rows(self.numbers[:n], self.whole[:n], self.step[:n], *wide)

    def copy(self) -> "Rows":
        """The same rows, to be led ahead of the real ones and thrown away."""
        seen, counts = (None if t is None else t.clone() for t in (self.seen, self.counts))
        return Rows(self.numbers, self.whole, self.step.clone(), seen, counts, self.bias, self.stops)

    def advance(self, tokens: Int64[Tensor, " n"], active: Bool[Tensor, " n"], needs: Needs) -> None:
        """Write down, in place, that each active row's answer grew by this token."""
        self.step += active
        token, grows = tokens.unsqueeze(-1), active.unsqueeze(-1)
        if needs.repetition and self.seen is not None:
            self.seen.scatter_(-1, token, self.seen.gather(-1, token) | grows)
        if needs.counts and self.counts is not None:
            self.counts.scatter_add_(-1, token, grows.to(self.counts.dtype))


def processed(logits: Float[Tensor, "n V"], rows: Rows, needs: Needs) -> Float[Tensor, "n V"]:
    """The logits after all that depends on the tokens so far. NaN stays NaN: nothing is overwritten, only added to."""
    if not needs.processed:
        return logits
    x = logits.float()
    if needs.repetition and rows.seen is not None:
        penalty = rows.number(3)
        x = torch.where(rows.seen, torch.where(x < 0, x * penalty, x / penalty), x)
    if needs.counts and rows.counts is not None:
        x = x - rows.number(4) * (rows.counts > 0) - rows.number(5) * rows.counts
    if needs.bias and rows.bias is not None:
        x = x + rows.bias
    if needs.least and rows.stops is not None:
        early = (rows.step < rows.whole[:, 2]).unsqueeze(-1)
        x = x + torch.zeros_like(x).masked_fill(rows.stops & early, -math.inf)
    return x


def weights(x: Float[Tensor, "n V"], best: Float[Tensor, " n"], rows: Rows, needs: Needs) -> Float32[Tensor, "n V"]:
    """What each token's chance is proportional to: exp((x − best) / temperature), 0 for what the filters leave out."""
    temperature = rows.number(0)
    x = (x.float() - best.float().unsqueeze(-1)) / torch.where(temperature > 0, temperature, 1)
    weight = x.exp()
    keep = kept(x, weight, rows, needs) if needs.window else None
    if needs.min_p:  # the most likely token weighs 1
        enough = weight >= rows.number(2)
        keep = enough if keep is None else keep & enough
    return weight if keep is None else torch.where(keep, weight, 0)


def kept(x: Float32[Tensor, "n V"], weight: Float32[Tensor, "n V"], rows: Rows, needs: Needs) -> Bool[Tensor, "n V"]:
    """What top-k leaves, with all that equal its last; of that what top-p leaves, of equals those with smaller ids.

    Only values are compared, never the order of equals, and masses are whole numbers, which add up to the same in any
    order: the answer depends on neither the batch nor the device.
    """
    key = x.view(torch.int32) & FARTHEST  # no x is above 0, so the bits of |x| rise as x falls
    last, near = last_of_top_k(key, rows, needs)
    if not needs.top_p:
        return key <= last
    total = (whole(weight) * (key <= last)).sum(-1, keepdim=True)
    edge, wanted = edge_of_top_p(key, last, near, total, rows)
    equal = key == edge
    return (key < edge) | (equal & (equal.cumsum(-1) <= wanted))


def last_of_top_k(
    key: Int[Tensor, "n V"], rows: Rows, needs: Needs
) -> tuple[Int[Tensor, "n 1"], Int[Tensor, "n k"] | None]:
    """The farthest key that top-k leaves, and the nearest keys in order if they are few."""
    top_k = rows.whole[:, 1:2].contiguous()
    if needs.window < key.shape[-1]:
        near = key.topk(needs.window, largest=False).values
        last = near.gather(-1, top_k.clamp(max=needs.window) - 1).masked_fill(top_k > needs.window, FARTHEST)
        return last, near
    if needs.top_k:
        return crossing(key, torch.ones_like(key, dtype=torch.int64), top_k)[0], None
    return torch.full_like(key[:, :1], FARTHEST), None


def edge_of_top_p(
    key: Int[Tensor, "n V"],
    last: Int[Tensor, "n 1"],
    near: Int[Tensor, "n k"] | None,
    total: Int64[Tensor, "n 1"],
    rows: Rows,
) -> tuple[Int[Tensor, "n 1"], Int64[Tensor, "n 1"]]:
    """The farthest key that top-p leaves of those up to `last`, whose mass is `total`; and how many that equal it."""
    top_p = rows.numbers[:, 1:2]
    enough = (top_p * total).ceil().long()
    if near is not None:
        edge, before = crossing_in_order(near, mass(near) * (near <= last), enough)
    else:
        edge, before = crossing(key, mass(key) * (key <= last), enough)
    each = mass(edge).clamp(min=1)
    wanted = (enough - before + each - 1) // each
    return torch.where(top_p < 1, edge, last), torch.where(top_p < 1, wanted, key.shape[-1])


def mass(key: Int[Tensor, "n k"]) -> Int64[Tensor, "n k"]:
    """What a token with this key weighs, as a whole number."""
    return whole((-key.view(torch.float32)).exp())


def whole(weight: Float32[Tensor, "n k"]) -> Int64[Tensor, "n k"]:
    """A chance, of which the largest is 1, as a whole number."""
    return (weight.double() * FINEST).long()


def crossing_in_order(
    key: Int[Tensor, "n k"], amount: Int64[Tensor, "n k"], enough: Int64[Tensor, "n 1"]
) -> tuple[Int[Tensor, "n 1"], Int64[Tensor, "n 1"]]:
    """The key at which the amounts, added up in the order of keys, reach `enough`; and the amount of smaller keys."""
    spot = torch.searchsorted(amount.cumsum(-1), enough).clamp(max=key.shape[-1] - 1)
    edge = key.gather(-1, spot)
    return edge, (amount * (key < edge)).sum(-1, keepdim=True)


def crossing(
    key: Int[Tensor, "n V"], amount: Int64[Tensor, "n V"], enough: Int64[Tensor, "n 1"]
) -> tuple[Int[Tensor, "n 1"], Int64[Tensor, "n 1"]]:
    """The same for keys in any order: their 31 bits are found digit by digit, which spares a sort."""
    edge, before = torch.zeros_like(enough), torch.zeros_like(enough)
    for above, below in ((31, 20), (20, 9), (9, 0)):
        size = 2 ** (above - below)
        here = amount if above == 31 else amount * (key >> above == edge)
        held = enough.new_zeros(len(key), size).scatter_add_(-1, ((key >> below) & (size - 1)).long(), here)
        upto = before + held.cumsum(-1)
        digit = torch.searchsorted(upto, enough).clamp(max=size - 1)
        before = upto.gather(-1, digit) - held.gather(-1, digit)
        edge = (edge << (above - below)) | digit
    return edge.to(key.dtype), before


def draw(weight: Float[Tensor, "n V"], number: Float64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """The token at `number` (0 to 1) of the cumulative weights; never one of weight 0."""
    upto = weight.cumsum(-1, dtype=torch.float64)
    spot = torch.searchsorted(upto, number.unsqueeze(-1) * upto[:, -1:], right=True).clamp(max=weight.shape[-1] - 1)
    # A sum in parallel may step by a rounding error where nothing was added: such a spot is no token's.
    return torch.where(weight.gather(-1, spot) > 0, spot, weight.argmax(-1, keepdim=True)).squeeze(-1)


def probabilities(logits: Float[Tensor, "n V"], rows: Rows, needs: Needs) -> Float32[Tensor, "n V"]:
    """The distribution that `Sampler.sample` draws from; all on the most likely token where the temperature is 0."""
    best, choice = (x := processed(logits, rows, needs)).max(-1)
    certain = (torch.arange(x.shape[-1], device=x.device) == choice.unsqueeze(-1)).float()
    if not needs.sampled:
        return certain
    weight = weights(x, best, rows, needs)
    share = (weight / weight.sum(-1, keepdim=True, dtype=torch.float64)).float()
    return torch.where(rows.sampled.unsqueeze(-1), share, certain)
