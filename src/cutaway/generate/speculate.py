"""Speculation: several guessed tokens are read in one pass, and those kept that the model might have said itself.

A token x that was guessed with chance q(x) is accepted with chance min(1, p(x)/q(x)), where p is the model's own. At
the first refusal a token is drawn from max(p − q, 0), and if none is refused one more from p. So what comes out has
exactly the distribution p (Leviathan et al. 2023, Chen et al. 2023). Where the most likely token is taken, p and q are
0 or 1, and the rule is the same. All settings are in p and in q, so none is changed by it.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.answer import Generation
from cutaway.generate.distribution import Needs, Rows, draw, probabilities, processed
from cutaway.generate.drafts import Drafter, ModelDraft, Proposal, check_draft, read_prompts, roomy
from cutaway.generate.engine import EngineError
from cutaway.generate.lookup import Lookup, LookupDraft
from cutaway.generate.noise import uniform
from cutaway.generate.plan import Plan
from cutaway.generate.runner import Runner, at_rest
from cutaway.generate.sampling import told
from cutaway.generate.seats import Seats
from cutaway.generate.settings import Settings
from cutaway.generate.ticket import Ticket
from cutaway.model import Transformer
from cutaway.text import Tokenizer

ACCEPTED = 2
"""The stream of random numbers that acceptance is decided by."""


@dataclass
class Counts:
    """How much guessing helped."""

    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    """Passes of the model in which an answer took part, over all answers."""
    tokens: int = 0
    """Of all answers, those that were given at their beginning left out."""

    @property
    def acceptance(self) -> float:
        """The share of guesses that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """1 without speculation."""
        return self.tokens / self.passes if self.passes else 0.0


def speculate(
    plan: Plan,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Settings],
    seeds: Sequence[int],
    *,
    begun: Sequence[int] = (),
    **how: Any,
) -> tuple[list[Generation], Counts]:
    """An answer to each prompt, and how much guessing helped; `how` is what `Speculation` takes."""
    speculation = Speculation(plan, tokenizer=tokenizer, **how)
    tickets = [
        speculation.submit(prompt, own, seed=seed, begun=begun)
        for prompt, own, seed in zip(prompts, settings, seeds, strict=True)
    ]
    speculation.run()
    return [ticket.result() for ticket in tickets], speculation.counts


class Speculation:
    """Takes requests as an engine does, and grows each text by one token or more a turn.

    An answer is a function of its own prompt, settings and seed, whoever else is there. Drawn ones are as likely as
    without a draft, but not the same for the same seed.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        draft: Transformer | Lookup,
        tokenizer: Tokenizer | None = None,
        draft_tokenizer: Tokenizer | None = None,
        ahead: int = 4,
    ) -> None:
        """`ahead`: how many tokens are guessed at a time."""
        if not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 1:
            raise InputError(f"ahead is {ahead!r}; give how many tokens to guess at a time, from 1")
        if plan.bits is not None or plan.compiled:
            name = "compiled" if plan.bits is None else "bits"
            raise InputError(
                f"guesses are tried on the model as it is, so {name} has no part in it; leave one of them out"
            )
        self.plan, self.tokenizer, self.ahead = plan, tokenizer, ahead
        self.models = [model for model in (plan.model, draft) if isinstance(model, Transformer)]
        self.drafter: Drafter
        if isinstance(draft, Transformer):
            check_draft(plan.model, tokenizer, draft, draft_tokenizer)
            self.drafter = ModelDraft(draft, plan, ahead)
        elif isinstance(draft, Lookup):
            self.drafter = LookupDraft(draft, plan)
        else:
            raise InputError(f"draft is a {type(draft).__name__}; give a model, or Lookup()")
        wider = roomy(plan, ahead)
        self.chunk = wider.chunk
        self.runner = Runner(plan.model, wider.cache(), fast=False)
        self.seats = Pairs(self.runner, plan, self.drafter)
        self.waiting: deque[Ticket] = deque()
        self.counts = Counts()

    def submit(self, prompt: Sequence[int], settings: Settings, *, seed: int, begun: Sequence[int] = ()) -> Ticket:
        """Ask for an answer to a prompt of tokens; `begun` are its first tokens. An encoder's prompt is its source."""
        ticket = self.plan.ticket(prompt, settings, self.tokenizer, seed=seed, begun=begun)
        most, switch = self.plan.room(ticket), self.plan.whole_from
        if switch is not None and most > switch:
            raise InputError(
                f"a text of up to {most} tokens would grow past {switch}, where this model's rotary angles begin to"
                " depend on its length, so that guesses cannot be tried on it; ask for fewer tokens, or use no draft"
            )
        if ticket.answer.reason is not None:  # what it was begun with is all of it
            ticket.finish()
        else:
            self.waiting.append(ticket)
        return ticket

    def run(self) -> None:
        """Work until nobody waits."""
        while self.turn():
            """Another."""

    def turn(self) -> bool:
        """Take in who waits, guess, read all guesses at once, tell what is accepted. False if nothing is left to do."""
        training = any(model.training for model in self.models)
        with torch.no_grad(), at_rest(*self.models) if training else nullcontext():
            self.drop_cancelled()
            self.admit()
            self.guess()
        return bool(self.seats.rows or self.waiting)

    def drop_cancelled(self) -> None:
        gone = [ticket for ticket in (*self.waiting, *self.seats.rows) if ticket.cancelled]
        self.waiting = deque(ticket for ticket in self.waiting if not ticket.cancelled)
        for ticket in gone:
            self.seats.leave(ticket)
            ticket.finish("cancelled")

    def guess(self) -> None:
        """One round for all who have a row."""
        tickets = self.seats.steppers
        if not tickets:
            return
        needs, rows = self.runner.sampler.needs(len(tickets)), self.runner.sampler.rows(len(tickets))
        wanted = [min(self.ahead, each.answer.limit - len(each.answer.tokens) - 1) for each in tickets]
        proposal = self.drafter.propose(tickets, wanted, rows.copy(), needs)
        logits = self.read(tickets, proposal)
        verdict = judge(logits, proposal, rows, needs)
        kept = [each.read + 1 + count for each, count in zip(tickets, verdict.accepted.tolist(), strict=True)]
        part = self.runner.cache.part(0, len(tickets), most=max(kept))
        part.rewind(torch.tensor(kept, device=part.length.device))
        self.drafter.keep(kept)
        for each, length in zip(tickets, kept, strict=True):
            each.read = length
        self.tell(tickets, proposal, verdict, logits, needs)
        for each in reversed(tickets):  # the last row leaves without a swap
            if each.error is not None or each.answer.reason is not None:
                self.seats.leave(each, sound=each.error is None)
                each.finish(error=each.error)

    def admit(self) -> None:
        """Rows to those who wait longest, and their prompts read."""
        first = len(self.seats.rows)
        while self.waiting and self.seats.take(self.waiting[0]):
            ticket = self.waiting.popleft()
            assert ticket.row is not None
            self.runner.open(ticket.row, ticket, self.plan.eos)
        new = self.seats.rows[first:]
        if not new:
            return
        ends = read_prompts(self.runner, first, [each.text for each in new], [each.read for each in new], self.chunk)
        self.drafter.open(new)
        for each, end in zip(new, ends, strict=True):
            each.read = end
            self.seats.ready(each)

    def read(self, tickets: Sequence[Ticket], proposal: Proposal) -> Float[Tensor, "n T V"]:
        """The logits after each row's last token and after each of its guesses."""
        last = torch.tensor([[each.text[-1]] for each in tickets], device=proposal.tokens.device)
        tokens = torch.cat((last, proposal.tokens), -1)
        mask = None
        if min(proposal.counts) < proposal.tokens.shape[-1]:
            counts = torch.tensor(proposal.counts, device=tokens.device).unsqueeze(-1)
            mask = torch.arange(tokens.shape[-1], device=tokens.device) <= counts
        part = self.runner.cache.part(0, len(tickets), most=max(each.read for each in tickets))
        return self.runner.model.head(self.runner.hidden(self.runner.model, tokens, mask, part))

    def tell(
        self, tickets: Sequence[Ticket], proposal: Proposal, verdict: "Verdict", logits: Tensor, needs: Needs
    ) -> None:
        """Give each answer its tokens until one ends it; what comes after that is dropped."""
        n, width = verdict.said.shape
        chances = told(logits.flatten(0, 1), verdict.said.flatten(), needs)
        chosen, names, values = (None if x is None else x.view(n, width, *x.shape[1:]).tolist() for x in chances)
        said, accepted, bad = verdict.said.tolist(), verdict.accepted.tolist(), verdict.bad.tolist()
        for row, ticket in enumerate(tickets):
            before, count = len(ticket.answer.tokens), ticket.settings.logprobs
            for place, token in enumerate(said[row][: accepted[row] + 1]):
                if bad[row] and place == accepted[row]:
                    ticket.error = EngineError(self.plan.explain_bad(ticket))
                    break
                top = None
                if names is not None and values is not None and count:
                    top = dict(zip(names[row][place][:count], values[row][place][:count], strict=True))
                self.tell_one(ticket, token, None if chosen is None else chosen[row][place], top)
                if ticket.answer.reason is not None:
                    break
            self.counts.tokens += len(ticket.answer.tokens) - before
        self.counts.drafted += sum(proposal.counts)
        self.counts.accepted += sum(accepted)
        self.counts.passes += n

    def tell_one(self, ticket: Ticket, token: int, logprob: float | None, top: dict[int, float] | None) -> None:
        end = self.plan.forced_eos
        cut = end is not None and len(ticket.answer.tokens) + 1 >= ticket.answer.limit
        if end is not None and cut:
            token, logprob, top = end, 0.0, top and {end: 0.0}
        ticket.tell(ticket.answer.take(token, logprob, top, cut=cut))


class Pairs(Seats):
    """Seats in two caches: a text has the same row in the model's and in the draft's."""

    def __init__(self, runner: Runner, plan: Plan, drafter: Drafter) -> None:
        super().__init__(runner, plan, share=True)
        self.drafter = drafter

    def swap(self, a: int, b: int) -> None:
        super().swap(a, b)
        if a != b:
            self.drafter.swap(a, b)


class Verdict(NamedTuple):
    """What was made of a round's guesses."""

    said: Int64[Tensor, "n T"]
    """The accepted guesses, then the token that the model said after them; what follows that means nothing."""
    accepted: Int64[Tensor, " n"]
    bad: Bool[Tensor, " n"]
    """The logits of the last token held NaN or +inf, or nothing was left to choose."""


def judge(logits: Float[Tensor, "n T V"], proposal: Proposal, rows: Rows, needs: Needs) -> Verdict:
    """Accept or refuse guess by guess, and draw what comes after the accepted ones; `rows` remember what was said."""
    width = logits.shape[1]
    counts = torch.tensor(proposal.counts, device=logits.device)
    guesses = torch.nn.functional.pad(proposal.tokens, (0, 1))
    said, accepted = guesses.clone(), torch.zeros_like(counts)
    going, bad = torch.ones_like(counts, dtype=torch.bool), torch.zeros_like(counts, dtype=torch.bool)
    for place in range(width):
        p = probabilities(logits[:, place], rows, needs)
        fine = processed(logits[:, place], rows, needs).amax(-1).isfinite()
        guess, rest, good = guesses[:, place].unsqueeze(-1), p, torch.zeros_like(going)
        if place < width - 1:
            guessed = place < counts
            q = torch.zeros_like(p).scatter_(-1, guess, 1.0) if proposal.chances is None else proposal.chances[place]
            limit = uniform(rows.whole[:, 0], rows.step, ACCEPTED) * q.gather(-1, guess).squeeze(-1)
            good = guessed & fine & (limit < p.gather(-1, guess).squeeze(-1))
            left = (p - q).clamp(min=0)
            # Where p and q are equal but for rounding nothing is left, and p is as good.
            rest = torch.where((guessed & (left.sum(-1) > 0)).unsqueeze(-1), left, p)
        own = draw(rest, uniform(rows.whole[:, 0], rows.step))
        ends = going & ~good
        bad |= ends & ~fine
        said[:, place] = torch.where(ends, own, said[:, place])
        rows.advance(said[:, place], going, needs)
        going &= good
        accepted += going
    return Verdict(said, accepted, bad)


def expected_tokens(acceptance: float, ahead: int) -> float:
    """Tokens a pass if each guess is accepted with this chance: 1 + a + … + a^ahead = (1 − a^(ahead+1)) / (1 − a)."""
    if not 0 <= acceptance <= 1 or ahead < 0:
        raise InputError(f"acceptance is {acceptance!r} and ahead {ahead!r}; give a chance from 0 to 1, and 0 or more")
    return sum(acceptance**i for i in range(ahead + 1))
