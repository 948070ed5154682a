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
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.engine import EngineError
from cutaway.generate.engine.model_runner import ModelRunner, eval_mode
from cutaway.generate.engine.output import Completion
from cutaway.generate.engine.request import Request
from cutaway.generate.engine.scheduler import Scheduler
from cutaway.generate.sampling.sampler import gather_logprobs
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.generate.sampling.sampling_state import SamplingFeatures
from cutaway.generate.speculative.draft_model import (
    DraftModelProposer,
    Proposal,
    Proposer,
    check_draft_compatibility,
    prefill_prompts,
    reserve_draft_slots,
)
from cutaway.generate.speculative.ngram_draft import NgramConfig, NgramProposer
from cutaway.generate.speculative.rejection_sampler import RejectionSamplerOutput, rejection_sample
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer


@dataclass
class SpeculativeStats:
    """How much guessing helped."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_forward_passes: int = 0
    """Passes of the model in which an answer took part, over all answers."""
    num_output_tokens: int = 0
    """Of all answers, those that were given at their beginning left out."""

    @property
    def acceptance_rate(self) -> float:
        """The share of guesses that were accepted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def tokens_per_forward_pass(self) -> float:
        """1 without speculation."""
        return self.num_output_tokens / self.num_forward_passes if self.num_forward_passes else 0.0


def generate_speculative(
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Sequence[int]],
    sampling_params: Sequence[SamplingParams],
    seeds: Sequence[int],
    *,
    output_prefix: Sequence[int] = (),
    **options: Any,
) -> tuple[list[Completion], SpeculativeStats]:
    """An answer to each prompt, and how much guessing helped; `options` are what `SpeculativeDecoder` takes."""
    speculation = SpeculativeDecoder(config, tokenizer=tokenizer, **options)
    tickets = [
        speculation.submit(prompt, own, seed=seed, output_prefix=output_prefix)
        for prompt, own, seed in zip(prompts, sampling_params, seeds, strict=True)
    ]
    speculation.run()
    return [ticket.result() for ticket in tickets], speculation.stats


class SpeculativeDecoder:
    """Takes requests as an engine does, and grows each text by one token or more a turn.

    An answer is a function of its own prompt, settings and seed, whoever else is there. Drawn ones are as likely as
    without a draft, but not the same for the same seed.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        draft_model: Transformer | NgramConfig,
        tokenizer: Tokenizer | None = None,
        draft_tokenizer: Tokenizer | None = None,
        num_draft_tokens: int = 4,
    ) -> None:
        """`num_draft_tokens`: how many tokens are guessed at a time."""
        if not isinstance(num_draft_tokens, int) or isinstance(num_draft_tokens, bool) or num_draft_tokens < 1:
            raise InputError(
                f"num_draft_tokens is {num_draft_tokens!r}; give how many tokens to guess at a time, from 1"
            )
        if config.weight_bits is not None or config.compile:
            name = "compile" if config.weight_bits is None else "weight_bits"
            raise InputError(
                f"guesses are tried on the model as it is, so {name} has no part in it; leave one of them out"
            )
        self.config, self.tokenizer, self.num_draft_tokens = config, tokenizer, num_draft_tokens
        self.models = [model for model in (config.model, draft_model) if isinstance(model, Transformer)]
        self.proposer: Proposer
        if isinstance(draft_model, Transformer):
            check_draft_compatibility(config.model, tokenizer, draft_model, draft_tokenizer)
            self.proposer = DraftModelProposer(draft_model, config, num_draft_tokens)
        elif isinstance(draft_model, NgramConfig):
            self.proposer = NgramProposer(draft_model, config)
        else:
            raise InputError(f"draft_model is a {type(draft_model).__name__}; give a model, or NgramConfig()")
        wider = reserve_draft_slots(config, num_draft_tokens)
        self.prefill_chunk_size = wider.prefill_chunk_size
        self.model_runner = ModelRunner(config.model, wider.build_cache(), compile=False)
        self.scheduler = SpeculativeScheduler(self.model_runner, config, self.proposer)
        self.waiting: deque[Request] = deque()
        self.stats = SpeculativeStats()

    def submit(
        self, prompt: Sequence[int], sampling_params: SamplingParams, *, seed: int, output_prefix: Sequence[int] = ()
    ) -> Request:
        """Ask for an answer that begins with `output_prefix` to a prompt of tokens; an encoder's is its source."""
        ticket = self.config.build_request(
            prompt, sampling_params, self.tokenizer, seed=seed, output_prefix=output_prefix
        )
        most, switch = self.config.max_slots(ticket), self.config.dynamic_rope_len
        if switch is not None and most > switch:
            raise InputError(
                f"a text of up to {most} tokens would grow past {switch}, where this model's rotary angles begin to"
                " depend on its length, so that guesses cannot be tried on it; ask for fewer tokens, or use no draft"
            )
        if ticket.output.finish_reason is not None:  # what it was begun with is all of it
            ticket.finish()
        else:
            self.waiting.append(ticket)
        return ticket

    def run(self) -> None:
        """Work until nobody waits."""
        while self.step():
            """Another."""

    def step(self) -> bool:
        """Take in who waits, guess, read all guesses at once, tell what is accepted. False if nothing is left to do."""
        training = any(model.training for model in self.models)
        with torch.no_grad(), eval_mode(*self.models) if training else nullcontext():
            self._remove_aborted()
            self._admit_waiting()
            self._draft_and_verify()
        return bool(self.scheduler.running or self.waiting)

    def _remove_aborted(self) -> None:
        gone = [ticket for ticket in (*self.waiting, *self.scheduler.running) if ticket.aborted]
        self.waiting = deque(ticket for ticket in self.waiting if not ticket.aborted)
        for ticket in gone:
            self.scheduler.release(ticket)
            ticket.finish("abort")

    def _draft_and_verify(self) -> None:
        """One round for all who have a row."""
        tickets = self.scheduler.decoding
        if not tickets:
            return
        needs, rows = (
            self.model_runner.sampler.features(len(tickets)),
            self.model_runner.sampler.first_rows(len(tickets)),
        )
        wanted = [min(self.num_draft_tokens, each.output.max_tokens - len(each.output.tokens) - 1) for each in tickets]
        proposal = self.proposer.propose(tickets, wanted, rows.copy(), needs)
        logits = self._score_draft_tokens(tickets, proposal)
        verdict = rejection_sample(logits, proposal, rows, needs)
        kept = [
            each.num_computed_tokens + 1 + count
            for each, count in zip(tickets, verdict.num_accepted.tolist(), strict=True)
        ]
        part = self.model_runner.cache.view_rows(0, len(tickets), max_len=max(kept))
        part.crop(torch.tensor(kept, device=part.seq_lens.device))
        self.proposer.truncate(kept)
        for each, length in zip(tickets, kept, strict=True):
            each.num_computed_tokens = length
        self._process_tokens(tickets, proposal, verdict, logits, needs)
        for each in reversed(tickets):  # the last row leaves without a swap
            if each.error is not None or each.output.finish_reason is not None:
                self.scheduler.release(each, cache_valid=each.error is None)
                each.finish(error=each.error)

    def _admit_waiting(self) -> None:
        """Rows to those who wait longest, and their prompts read."""
        first = len(self.scheduler.running)
        while self.waiting and self.scheduler.allocate(self.waiting[0]):
            ticket = self.waiting.popleft()
            assert ticket.row is not None
            self.model_runner.init_row(ticket.row, ticket, self.config.eos_token_ids)
        new = self.scheduler.running[first:]
        if not new:
            return
        ends = prefill_prompts(
            self.model_runner,
            first,
            [each.all_token_ids for each in new],
            [each.num_computed_tokens for each in new],
            self.prefill_chunk_size,
        )
        self.proposer.add_requests(new)
        for each, end in zip(new, ends, strict=True):
            each.num_computed_tokens = end
            self.scheduler.maybe_start_decode(each)

    def _score_draft_tokens(self, requests: Sequence[Request], proposal: Proposal) -> Float[Tensor, "n T V"]:
        """The logits after each row's last token and after each of its guesses."""
        last = torch.tensor([[each.all_token_ids[-1]] for each in requests], device=proposal.tokens.device)
        tokens = torch.cat((last, proposal.tokens), -1)
        mask = None
        if min(proposal.lengths) < proposal.tokens.shape[-1]:
            counts = torch.tensor(proposal.lengths, device=tokens.device).unsqueeze(-1)
            mask = torch.arange(tokens.shape[-1], device=tokens.device) <= counts
        part = self.model_runner.cache.view_rows(
            0, len(requests), max_len=max(each.num_computed_tokens for each in requests)
        )
        return self.model_runner.model.head(
            self.model_runner.forward_hidden(self.model_runner.model, tokens, mask, part)
        )

    def _process_tokens(
        self,
        requests: Sequence[Request],
        proposal: Proposal,
        verified: RejectionSamplerOutput,
        logits: Tensor,
        features: SamplingFeatures,
    ) -> None:
        """Give each answer its tokens until one ends it; what comes after that is dropped."""
        n, width = verified.tokens.shape
        chances = gather_logprobs(logits.flatten(0, 1), verified.tokens.flatten(), features)
        chosen, names, values = (None if x is None else x.view(n, width, *x.shape[1:]).tolist() for x in chances)
        said, accepted, bad = verified.tokens.tolist(), verified.num_accepted.tolist(), verified.invalid.tolist()
        for row, ticket in enumerate(requests):
            before, count = len(ticket.output.tokens), ticket.sampling_params.logprobs
            for place, token in enumerate(said[row][: accepted[row] + 1]):
                if bad[row] and place == accepted[row]:
                    ticket.error = EngineError(self.config.format_invalid_logits(ticket))
                    break
                top = None
                if names is not None and values is not None and count:
                    top = dict(zip(names[row][place][:count], values[row][place][:count], strict=True))
                self._process_token(ticket, token, None if chosen is None else chosen[row][place], top)
                if ticket.output.finish_reason is not None:
                    break
            self.stats.num_output_tokens += len(ticket.output.tokens) - before
        self.stats.num_drafted += sum(proposal.lengths)
        self.stats.num_accepted += sum(accepted)
        self.stats.num_forward_passes += n

    def _process_token(
        self, request: Request, token: int, logprob: float | None, top_logprobs: dict[int, float] | None
    ) -> None:
        end = self.config.forced_eos_token_id
        cut = end is not None and len(request.output.tokens) + 1 >= request.output.max_tokens
        if end is not None and cut:
            token, logprob, top_logprobs = end, 0.0, top_logprobs and {end: 0.0}
        request.add_chunk(request.output.append_token(token, logprob, top_logprobs, forced_eos=cut))


class SpeculativeScheduler(Scheduler):
    """Seats in two caches: a text has the same row in the model's and in the draft's."""

    def __init__(self, model_runner: ModelRunner, config: EngineConfig, proposer: Proposer) -> None:
        super().__init__(model_runner, config, prefix_caching=True)
        self.proposer = proposer

    def swap_rows(self, a: int, b: int) -> None:
        super().swap_rows(a, b)
        if a != b:
            self.proposer.swap_rows(a, b)
