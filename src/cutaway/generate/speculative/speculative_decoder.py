"""Speculative decoding: several draft tokens are verified in one forward pass of the target model.

A draft token x with draft probability q(x) is accepted with probability min(1, p(x)/q(x)), where p is the target's. At
the first rejection a token is sampled from max(p − q, 0); if all drafts are accepted, one more from p. The output has
exactly the distribution p (Leviathan et al. 2023, Chen et al. 2023). In greedy decoding p and q are 0 or 1, and the
rule is the same. Sampling parameters apply to both p and q, so that they keep their meaning.
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
    """Statistics of speculative decoding."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_forward_passes: int = 0
    """Forward passes of the target model, counted once per request in the batch."""
    num_output_tokens: int = 0
    """Tokens of all completions, without output_prefix."""

    @property
    def acceptance_rate(self) -> float:
        """Fraction of draft tokens that were accepted."""
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
    """Generate a completion per prompt and return the statistics; `options`: arguments of `SpeculativeDecoder`."""
    decoder = SpeculativeDecoder(config, tokenizer=tokenizer, **options)
    requests = [
        decoder.submit(prompt, params, seed=seed, output_prefix=output_prefix)
        for prompt, params, seed in zip(prompts, sampling_params, seeds, strict=True)
    ]
    decoder.run()
    return [request.result() for request in requests], decoder.stats


class SpeculativeDecoder:
    """Engine with speculative decoding: one or more tokens per request and step.

    A completion depends only on its own prompt, sampling parameters and seed. Sampled completions have the same
    distribution as without a draft, but are not the same for the same seed.
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
        """`num_draft_tokens`: draft tokens per step."""
        if not isinstance(num_draft_tokens, int) or isinstance(num_draft_tokens, bool) or num_draft_tokens < 1:
            raise InputError(
                f"num_draft_tokens is {num_draft_tokens!r}; pass a number of draft tokens per step, 1 or more"
            )
        if config.weight_bits is not None or config.compile:
            name = "compile" if config.weight_bits is None else "weight_bits"
            raise InputError(f"speculative decoding does not support {name}; leave out {name} or draft_model")
        self.config, self.tokenizer, self.num_draft_tokens = config, tokenizer, num_draft_tokens
        self.models = [model for model in (config.model, draft_model) if isinstance(model, Transformer)]
        self.proposer: Proposer
        if isinstance(draft_model, Transformer):
            check_draft_compatibility(config.model, tokenizer, draft_model, draft_tokenizer)
            self.proposer = DraftModelProposer(draft_model, config, num_draft_tokens)
        elif isinstance(draft_model, NgramConfig):
            self.proposer = NgramProposer(draft_model, config)
        else:
            raise InputError(f"draft_model is a {type(draft_model).__name__}; pass a model, or NgramConfig()")
        extended = reserve_draft_slots(config, num_draft_tokens)
        self.prefill_chunk_size = extended.prefill_chunk_size
        self.model_runner = ModelRunner(config.model, extended.build_cache(), compile=False)
        self.scheduler = SpeculativeScheduler(self.model_runner, config, self.proposer)
        self.waiting: deque[Request] = deque()
        self.stats = SpeculativeStats()

    def submit(
        self, prompt: Sequence[int], sampling_params: SamplingParams, *, seed: int, output_prefix: Sequence[int] = ()
    ) -> Request:
        """Queue a request for one completion, which starts with `output_prefix`; see `Engine.submit`."""
        request = self.config.build_request(
            prompt, sampling_params, self.tokenizer, seed=seed, output_prefix=output_prefix
        )
        max_len, rope_len = self.config.max_slots(request), self.config.dynamic_rope_len
        if rope_len is not None and max_len > rope_len:
            raise InputError(
                f"a sequence of up to {max_len} tokens would exceed {rope_len}, above which this model's RoPE"
                " frequencies depend on the length, so that drafts cannot be verified; lower max_new_tokens, or leave"
                " out draft_model"
            )
        if request.output.finish_reason is not None:  # output_prefix already reaches a limit or a stop token
            request.finish()
        else:
            self.waiting.append(request)
        return request

    def run(self) -> None:
        """Step until all requests are finished."""
        while self.step():
            pass

    def step(self) -> bool:
        """Admit waiting requests, propose drafts, verify them in one pass. Return False if no request is left."""
        training = any(model.training for model in self.models)
        with torch.no_grad(), eval_mode(*self.models) if training else nullcontext():
            self._remove_aborted()
            self._admit_waiting()
            self._draft_and_verify()
        return bool(self.scheduler.running or self.waiting)

    def _remove_aborted(self) -> None:
        aborted = [request for request in (*self.waiting, *self.scheduler.running) if request.aborted]
        self.waiting = deque(request for request in self.waiting if not request.aborted)
        for request in aborted:
            self.scheduler.release(request)
            request.finish("abort")

    def _draft_and_verify(self) -> None:
        """Propose and verify draft tokens for all running requests, and roll the caches back to the accepted ones."""
        requests = self.scheduler.decoding
        if not requests:
            return
        features, state = (
            self.model_runner.sampler.features(len(requests)),
            self.model_runner.sampler.first_rows(len(requests)),
        )
        max_drafts = [
            min(self.num_draft_tokens, request.output.max_tokens - len(request.output.tokens) - 1)
            for request in requests
        ]
        proposal = self.proposer.propose(requests, max_drafts, state.copy(), features)
        logits = self._score_draft_tokens(requests, proposal)
        verified = rejection_sample(logits, proposal, state, features)
        lengths = [
            request.num_computed_tokens + 1 + count
            for request, count in zip(requests, verified.num_accepted.tolist(), strict=True)
        ]
        view = self.model_runner.cache.view_rows(0, len(requests), max_len=max(lengths))
        view.crop(torch.tensor(lengths, device=view.seq_lens.device))
        self.proposer.truncate(lengths)
        for request, length in zip(requests, lengths, strict=True):
            request.num_computed_tokens = length
        self._process_tokens(requests, proposal, verified, logits, features)
        for request in reversed(requests):  # from the last row: it is released without a swap
            if request.error is not None or request.output.finish_reason is not None:
                self.scheduler.release(request, cache_valid=request.error is None)
                request.finish(error=request.error)

    def _admit_waiting(self) -> None:
        """Assign rows to waiting requests and prefill their prompts."""
        first_row = len(self.scheduler.running)
        while self.waiting and self.scheduler.allocate(self.waiting[0]):
            request = self.waiting.popleft()
            assert request.row is not None
            self.model_runner.init_row(request.row, request, self.config.eos_token_ids)
        new = self.scheduler.running[first_row:]
        if not new:
            return
        num_computed_tokens = prefill_prompts(
            self.model_runner,
            first_row,
            [request.all_token_ids for request in new],
            [request.num_computed_tokens for request in new],
            self.prefill_chunk_size,
        )
        self.proposer.add_requests(new)
        for request, num_computed in zip(new, num_computed_tokens, strict=True):
            request.num_computed_tokens = num_computed
            self.scheduler.maybe_start_decode(request)

    def _score_draft_tokens(self, requests: Sequence[Request], proposal: Proposal) -> Float[Tensor, "n T V"]:
        """Logits after each row's last token and after each of its draft tokens, in one forward pass."""
        last_tokens = torch.tensor([[request.all_token_ids[-1]] for request in requests], device=proposal.tokens.device)
        tokens = torch.cat((last_tokens, proposal.tokens), -1)
        mask = None
        if min(proposal.lengths) < proposal.tokens.shape[-1]:
            counts = torch.tensor(proposal.lengths, device=tokens.device).unsqueeze(-1)
            mask = torch.arange(tokens.shape[-1], device=tokens.device) <= counts
        view = self.model_runner.cache.view_rows(
            0, len(requests), max_len=max(request.num_computed_tokens for request in requests)
        )
        return self.model_runner.model.head(
            self.model_runner.forward_hidden(self.model_runner.model, tokens, mask, view)
        )

    def _process_tokens(
        self,
        requests: Sequence[Request],
        proposal: Proposal,
        verified: RejectionSamplerOutput,
        logits: Tensor,
        features: SamplingFeatures,
    ) -> None:
        """Append the verified tokens to each request, up to the one that finishes it, and update the statistics."""
        n, width = verified.tokens.shape
        gathered = gather_logprobs(logits.flatten(0, 1), verified.tokens.flatten(), features)
        logprobs, top_tokens, top_logprobs = (
            None if x is None else x.view(n, width, *x.shape[1:]).tolist() for x in gathered
        )
        tokens, num_accepted, invalid = (
            verified.tokens.tolist(),
            verified.num_accepted.tolist(),
            verified.invalid.tolist(),
        )
        for row, request in enumerate(requests):
            previous_len, count = len(request.output.tokens), request.sampling_params.logprobs
            for i, token in enumerate(tokens[row][: num_accepted[row] + 1]):
                if invalid[row] and i == num_accepted[row]:
                    request.error = EngineError(self.config.format_invalid_logits(request))
                    break
                top = None
                if top_tokens is not None and top_logprobs is not None and count:
                    top = dict(zip(top_tokens[row][i][:count], top_logprobs[row][i][:count], strict=True))
                self._process_token(request, token, None if logprobs is None else logprobs[row][i], top)
                if request.output.finish_reason is not None:
                    break
            self.stats.num_output_tokens += len(request.output.tokens) - previous_len
        self.stats.num_drafted += sum(proposal.lengths)
        self.stats.num_accepted += sum(num_accepted)
        self.stats.num_forward_passes += n

    def _process_token(
        self, request: Request, token: int, logprob: float | None, top_logprobs: dict[int, float] | None
    ) -> None:
        """Append one token; the last one before max_tokens is replaced by forced_eos_token_id, if set."""
        forced_eos_token_id = self.config.forced_eos_token_id
        is_last = forced_eos_token_id is not None and len(request.output.tokens) + 1 >= request.output.max_tokens
        if forced_eos_token_id is not None and is_last:
            token, logprob, top_logprobs = forced_eos_token_id, 0.0, top_logprobs and {forced_eos_token_id: 0.0}
        request.add_chunk(request.output.append_token(token, logprob, top_logprobs, forced_eos=is_last))


class SpeculativeScheduler(Scheduler):
    """Scheduler of two caches: a request has the same row in the target's and in the draft's cache."""

    def __init__(self, model_runner: ModelRunner, config: EngineConfig, proposer: Proposer) -> None:
        super().__init__(model_runner, config, prefix_caching=True)
        self.proposer = proposer

    def swap_rows(self, a: int, b: int) -> None:
        super().swap_rows(a, b)
        if a != b:
            self.proposer.swap_rows(a, b)
