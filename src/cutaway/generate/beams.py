"""Beam search: the best few continuations at each step, all prompts side by side, until no better end can come."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.errors import InputError, WeightError
from cutaway.generate.beam_rules import NONE, Rules
from cutaway.generate.start import LARGEST, EarlyStopping
from cutaway.model import Cache, DecoderOnly, EncoderDecoder, Transformer
from cutaway.model.inputs import check_size

BROKEN = 2
"""Beside 0 and 1, for a prompt that is done or goes on: its logits are not numbers."""
Step = Callable[[Int[Tensor, "R 1"]], Float[Tensor, "R V"]]
"""One more token of each row: the logits after it."""


class Beam(NamedTuple):
    """One continuation: its tokens, the end among them; its log-probability divided by length ** length_penalty."""

    tokens: list[int]
    score: float
    finish_reason: Literal["stop", "length"]


def beam_search(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    beams: int,
    max_new_tokens: int,
    eos: Collection[int] = (),
    n: int = 1,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    min_new_tokens: int = 0,
    decoder_start: int | None = None,
    forced_bos: int | None = None,
    forced_eos: int | Sequence[int] = (),
    banned: Sequence[Sequence[int]] = (),
    suppressed: Sequence[int] = (),
    suppressed_first: Sequence[int] = (),
    no_repeat_ngram: int = 0,
    repetition_penalty: float = 1.0,
) -> list[list[Beam]]:
    """For each prompt its `n` best continuations, the best first; fewer where there are no more.

    An encoder-decoder reads the prompts as its sources and writes from `decoder_start` on. `early_stopping` is True to
    end at the first `beams` ends, False to go on while the best beam's score so far beats one of them, "never" while
    any length could. The other settings are explained at `Start`; `forced_bos` is the first new token.
    """
    for name, value in (("beams", beams), ("max_new_tokens", max_new_tokens), ("n", n)):
        check_size(name, value)
    for name, value in (("min_new_tokens", min_new_tokens), ("no_repeat_ngram", no_repeat_ngram)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"{name} is {value!r}; give a whole number, 0 or more")
    if n > beams:
        raise InputError(f"n is {n}, but {beams} beams end in no more than {beams} texts; ask for more beams")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise InputError(f"early_stopping is {early_stopping!r}; use True, False or 'never'")
    number = isinstance(length_penalty, int | float) and not isinstance(length_penalty, bool)
    if not number or not abs(length_penalty) <= LARGEST:
        raise InputError(f"length_penalty is {length_penalty!r}; give a number from -{LARGEST} to {LARGEST}")
    size = model.config.vocab_size
    ends = sorted(_known("eos", eos, size))
    forbidden = [_known("banned", sequence, size) for sequence in banned]
    if not all(forbidden):
        raise InputError("banned holds an empty sequence, which would ban everything; give at least one token in each")
    rules = Rules(
        size,
        model.device,
        most=max_new_tokens,
        least=min_new_tokens,
        eos=ends,
        forced_bos=None if forced_bos is None else _known("forced_bos", [forced_bos], size)[0],
        forced_eos=_known("forced_eos", [forced_eos] if isinstance(forced_eos, int) else forced_eos, size),
        banned=[sequence for sequence in forbidden if sequence not in [[end] for end in ends]],
        suppressed=_known("suppressed", suppressed, size),
        suppressed_first=_known("suppressed_first", suppressed_first, size),
        no_repeat_ngram=no_repeat_ngram,
        repetition_penalty=repetition_penalty,
    )
    if len(prompts) == 0:
        return []
    search = Search(rules, beams, max_new_tokens, length_penalty, early_stopping)
    with torch.no_grad():
        given, cache, logits, step = _read(model, prompts, decoder_start, max_new_tokens)
        found = search.run(given if rules.look_back else given[:, :0], cache, logits, step)
    cut = max_new_tokens if len(rules.forced_eos) else None  # the last token was not the model's choice
    return [_beams(number, *each, ends, cut)[:n] for number, each in enumerate(found)]


@dataclass(frozen=True)
class Search:
    """The loop. A beam's score is the sum of its log-probabilities; −inf is no beam."""

    rules: Rules
    beams: int
    most: int
    length_penalty: float
    early_stopping: EarlyStopping

    def run(
        self, given: Int[Tensor, "P G"], cache: Cache, logits: Float[Tensor, "P V"], step: Step
    ) -> list[tuple[Tensor, Tensor]]:
        """For each prompt, scores and tokens of its ends. `given` is what the rules see before the first new token.

        The device is waited for once a step, to see which prompts are done; those leave the batch.
        """
        device, size = logits.device, self.rules.vocab_size
        found: dict[int, tuple[Tensor, Tensor]] = {}
        here = list(range(len(given)))  # the prompts still in the batch
        history = given.unsqueeze(1)
        score = torch.zeros(len(given), 1, device=device)
        ended = torch.full((len(given), self.beams), -torch.inf, device=device)
        texts = torch.full((len(given), self.beams, self.most), NONE, device=device)
        keep = max(2, 1 + len(self.rules.eos)) * self.beams  # so many that enough go on if as many as can end
        for new in range(self.most):
            width = score.shape[-1]  # one beam a prompt, at first
            log_p = self.rules(logits.float().log_softmax(-1), history.flatten(0, 1), new)
            total = (score.unsqueeze(-1) + log_p.view(*score.shape, size)).flatten(1)
            best, flat = total.topk(min(keep, total.shape[-1]))
            parent, token = flat // size, flat % size
            grown = torch.cat([_of(history, parent), token.unsqueeze(-1)], -1)
            ends = (token.unsqueeze(-1) == self.rules.eos).any(-1) | (new + 1 == self.most)
            # Only the best `beams` may end here; the others are there to go on in their place.
            worth = (best / (new + 1) ** self.length_penalty).masked_fill(~ends, -torch.inf)[:, : self.beams]
            text = F.pad(grown[:, : self.beams, given.shape[-1] :], (0, self.most - new - 1), value=NONE)
            ended, order = torch.cat([ended, worth], -1).topk(self.beams)
            texts = _of(torch.cat([texts, text], 1), order)
            score, order = best.masked_fill(ends, -torch.inf).topk(min(self.beams, best.shape[-1]))
            history, token, parent = _of(grown, order), token.gather(1, order), parent.gather(1, order)
            state = torch.where(best[:, 0].isnan(), BROKEN, self.goes_on(score, ended, new + 1).long()).tolist()
            if BROKEN in state:  # NaN is the largest of all, to topk
                number = here[state.index(BROKEN)]
                raise WeightError(
                    f"the logits for prompt {number} are not numbers after {new} new tokens; the weights are damaged,"
                    " or too large for their dtype: try float32"
                )
            found |= {here[row]: (ended[row], texts[row]) for row, on in enumerate(state) if not on}
            kept = [row for row, on in enumerate(state) if on]
            if not kept:
                break
            rows = torch.arange(len(here), device=device)
            if len(kept) < len(here):
                rows = torch.tensor(kept, device=device)
                here = [here[row] for row in kept]
                history, token, parent = history[rows], token[rows], parent[rows]
                score, ended, texts = score[rows], ended[rows], texts[rows]
            cache.select((rows.unsqueeze(-1) * width + parent).flatten())
            logits = step(token.view(-1, 1))
        return [found[number] for number in range(len(given))]

    def goes_on(self, score: Float[Tensor, "P R"], ended: Float[Tensor, "P N"], new: int) -> Bool[Tensor, " P"]:
        """Whether a prompt's best beam may still end above its worst end, which is −inf while there are too few."""
        worst = ended[:, -1]
        if new == self.most:
            return torch.zeros_like(worst, dtype=torch.bool)
        length = self.most if self.early_stopping == "never" and self.length_penalty > 0 else new
        hope = score[:, 0] / length**self.length_penalty > worst
        return hope & (worst == -torch.inf) if self.early_stopping is True else hope


def _of(tensor: Int[Tensor, "P R L"], index: Int[Tensor, "P K"]) -> Int[Tensor, "P K L"]:
    """For each prompt, these of its beams."""
    return tensor.take_along_dim(index.unsqueeze(-1), 1)


def _read(
    model: Transformer, prompts: Sequence[Sequence[int]], decoder_start: int | None, most: int
) -> tuple[Int[Tensor, "P G"], Cache, Float[Tensor, "P V"], Step]:
    """Read the prompts once each: what the decoder was given, the cache, the first logits, and how to go on."""
    size = model.config.vocab_size
    if isinstance(model, EncoderDecoder):
        if decoder_start is None:
            raise InputError("an encoder-decoder's answer begins with a token of its own; give it as decoder_start")
        start = torch.full((len(prompts), 1), _known("decoder_start", [decoder_start], size)[0], device=model.device)
        source, mask = _padded(prompts, model.config.source_vocab_size or size, model.device)  # type: ignore[union-attr]
        cache = model.new_cache(len(prompts), most)
        x = model.hidden(source, start, mask, cache=cache)
        return (
            start,
            cache,
            model.head(x[:, -1]),
            lambda token: model.head(model.hidden(None, token, cache=cache)[:, -1]),
        )
    if not isinstance(model, DecoderOnly):
        raise InputError("this model fills masks and does not write on; beam search needs a decoder")
    if decoder_start is not None:
        raise InputError("decoder_start is for encoder-decoders; put this model's first token into the prompt")
    tokens, mask = _padded(prompts, size, model.device)
    cache = model.new_cache(len(prompts), tokens.shape[-1] + most - 1)
    x = model.hidden(tokens, mask, cache=cache)
    given = tokens if mask is None else tokens.masked_fill(~mask, NONE)
    return given, cache, model.head(x[:, -1]), lambda token: model.head(model.hidden(token, cache=cache)[:, -1])


def _padded(
    prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device
) -> tuple[Int[Tensor, "P T"], Bool[Tensor, "P T"] | None]:
    """One row a prompt, all ending together; no mask where they are of one length."""
    rows = [_known(f"prompt {number}", prompt, vocab_size) for number, prompt in enumerate(prompts)]
    if not all(rows):
        raise InputError(f"prompt {rows.index([])} is empty; give at least one token")
    width = max(map(len, rows))
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    if min(map(len, rows)) == width:
        return tokens, None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(width, device=device) >= width - lengths.unsqueeze(-1)


def _known(name: str, ids: Collection[int], vocab_size: int) -> list[int]:
    """Ids of this vocabulary, as integers."""
    try:
        known = [index(number) for number in ids]
    except TypeError:
        raise InputError(f"{name} is {ids!r:.60}; give token ids, which are whole numbers") from None
    for number in known:
        if not 0 <= number < vocab_size:
            raise InputError(f"{name} holds the id {number}; the vocabulary has ids 0 to {vocab_size - 1}")
    return known


def _beams(number: int, scores: Tensor, texts: Tensor, eos: Collection[int], cut: int | None) -> list[Beam]:
    """A prompt's ends on the host. One of length `cut` was cut, whatever its last token."""
    made = []
    for score, row in zip(scores.tolist(), texts.tolist(), strict=True):
        tokens = [token for token in row if token != NONE]
        if score > -math.inf:
            made.append(Beam(tokens, score, "stop" if tokens[-1] in eos and len(tokens) != cut else "length"))
    if not made:
        raise InputError(
            f"prompt {number} cannot be continued: each next token is banned, suppressed or would repeat a sequence;"
            " ask for less"
        )
    return made
