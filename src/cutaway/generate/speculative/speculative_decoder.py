"""Speculative decoding: several draft tokens are verified in one forward pass of the target model.

A draft token x is accepted with probability min(1, p(x)/q(x)), where q is the distribution of the draft model and p
that of the target model. At the first rejection, a token is sampled from max(p − q, 0), normalized. If all draft tokens
are accepted, one more token is sampled from p. The output has exactly the distribution p (Leviathan et al. 2023, Chen
et al. 2023). The same rule holds in greedy decoding, where p and q are 0 or 1. Sampling parameters apply to both p and
q.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cutaway.argument_checks import check_positive_int
from cutaway.errors import InputError
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.engine import Engine
from cutaway.generate.engine.request import Request
from cutaway.generate.engine.scheduler import Scheduler
from cutaway.generate.sampling.logits_processing import mask_by_grammar
from cutaway.generate.sampling.sampler import gather_logprobs
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.generate.sampling.sampling_state import SamplingFeatures
from cutaway.generate.speculative.draft_model import (
    DraftModelProposer,
    Proposal,
    Proposer,
    check_draft_compatibility,
    reserve_draft_slots,
)
from cutaway.generate.speculative.ngram_draft import NgramConfig, NgramProposer
from cutaway.generate.speculative.rejection_sampler import RejectionSamplerOutput, rejection_sample
from cutaway.generate.structured_output.constraint import bitmask_width
from cutaway.generate.structured_output.grammar import ALL_TOKENS
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer


@dataclass
class SpeculativeStats:
    """Numbers of draft tokens, forward passes and output tokens, over all requests of a `SpeculativeDecoder`."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_forward_passes: int = 0
    """Number of forward passes of the target model, in which a pass over a batch counts once per request."""
    num_output_tokens: int = 0
    """Number of tokens of all completions, without output_prefix."""

    @property
    def acceptance_rate(self) -> float:
        """Fraction of draft tokens that were accepted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def tokens_per_forward_pass(self) -> float:
        """Number of output tokens per forward pass and request; 1 without speculation."""
        return self.num_output_tokens / self.num_forward_passes if self.num_forward_passes else 0.0


class SpeculativeDecoder(Engine):
    """Engine with speculative decoding: one or more tokens per request and step.

    A completion depends only on its own prompt, sampling parameters and seed. Sampled completions have the same
    distribution as without a draft, but the same seed gives other tokens than without a draft.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        draft_model: Transformer | NgramConfig,
        tokenizer: Tokenizer | None = None,
        draft_tokenizer: Tokenizer | None = None,
        num_draft_tokens: int = 4,
        max_waiting: int = 1024,
    ) -> None:
        """`num_draft_tokens`: maximum number of draft tokens per request and step."""
        check_positive_int("num_draft_tokens", num_draft_tokens)
        if config.weight_bits is not None or config.compile:
            name = "compile" if config.weight_bits is None else "weight_bits"
            raise InputError(f"speculative decoding does not support {name}; leave out {name} or draft_model")
        self.proposer: Proposer
        if isinstance(draft_model, Transformer):
            check_draft_compatibility(config.model, tokenizer, draft_model, draft_tokenizer)
            self.proposer = DraftModelProposer(draft_model, config, num_draft_tokens)
        elif isinstance(draft_model, NgramConfig):
            self.proposer = NgramProposer(draft_model, config)
        else:
            raise InputError(f"draft_model is a {type(draft_model).__name__}; pass a model, or NgramConfig()")
        extended = reserve_draft_slots(config, num_draft_tokens)
        extended.compile = False
        super().__init__(extended, tokenizer=tokenizer, max_waiting=max_waiting)
        self.models += [draft_model] if isinstance(draft_model, Transformer) else []
        self.request_config, self.num_draft_tokens = config, num_draft_tokens
        # The caches of the proposers are not built again, so requests are not preempted.
        self.scheduler = Scheduler(self.model_runner, extended, prefix_caching=True, preemption=False)
        self.scheduler.swap_functions.append(self.proposer.swap_rows)  # a request has the same row in both caches
        self.async_scheduling = self.can_pause = self.samples_after_prefill = False
        self.rope_switch_lengths = []  # no sequence reaches a switch length: see `_build_request`
        self.stats = SpeculativeStats()

    def _build_request(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        seed: int,
        output_prefix: Sequence[int],
        adapter: str | None,
    ) -> Request:
        request = self.request_config.build_request(
            prompt, sampling_params, self.tokenizer, seed=seed, output_prefix=output_prefix, adapter=adapter
        )
        max_len, rope_len = self.request_config.max_slots(request), self.request_config.dynamic_rope_len
        if rope_len is not None and max_len > rope_len:
            raise InputError(
                f"a sequence of up to {max_len} tokens would exceed {rope_len}, above which this model's RoPE"
                " frequencies depend on the length, so that drafts cannot be verified; lower max_new_tokens, or leave"
                " out draft_model"
            )
        return request

    @torch.no_grad()
    def _decode_step(self) -> None:
        """Propose draft tokens for all decoding requests and verify them in one forward pass."""
        new = [request for request in self.scheduler.decoding if request.num_sampled_tokens == 0]
        with self._isolate_failures(new):
            if new:
                self.proposer.add_requests(new)
        requests = self.scheduler.decoding
        with self._isolate_failures(requests):
            if requests:
                self._draft_and_verify(requests)

    def _draft_and_verify(self, requests: Sequence[Request]) -> None:
        """Propose and verify draft tokens, and remove the rejected tokens from the caches."""
        sampler = self.model_runner.sampler
        features, state = sampler.features(len(requests)), sampler.first_rows(len(requests))
        tokens_left = [request.output.max_tokens - len(request.output.tokens) for request in requests]
        max_drafts = [min(self.num_draft_tokens, left - 1) for left in tokens_left]
        without_grammar = replace(features, grammar=False)  # grammars apply to the target model's logits
        proposal = self.proposer.propose(requests, max_drafts, state.copy(), without_grammar)
        logits = self._score_draft_tokens(requests, proposal)
        allowed = self._mask_by_grammars(logits, requests, proposal) if features.grammar else logits
        verified = rejection_sample(allowed, proposal, state, without_grammar)
        for request, count in zip(requests, verified.num_accepted.tolist(), strict=True):
            request.num_computed_tokens += 1 + count
        lengths = [request.num_computed_tokens for request in requests]
        view = self.model_runner.cache.view_rows(0, len(requests), max_len=max(lengths))
        view.crop(torch.tensor(lengths, device=view.seq_lens.device))
        self.proposer.truncate(lengths)
        self._process_tokens(requests, proposal, verified, logits, features)

    def _score_draft_tokens(self, requests: Sequence[Request], proposal: Proposal) -> Float[Tensor, "n T V"]:
        """Logits after each row's last token and after each of its draft tokens, in one forward pass."""
        last_tokens = torch.tensor([[request.all_token_ids[-1]] for request in requests], device=proposal.tokens.device)
        tokens = torch.cat((last_tokens, proposal.tokens), -1)
        mask = None
        if min(proposal.lengths) < proposal.tokens.shape[-1]:
            counts = torch.tensor(proposal.lengths, device=tokens.device).unsqueeze(-1)
            mask = torch.arange(tokens.shape[-1], device=tokens.device) <= counts
        max_len = max(request.num_computed_tokens for request in requests)
        view = self.model_runner.cache.view_rows(0, len(requests), max_len=max_len)
        return self.model_runner.forward_logits(self.model_runner.model, tokens, mask, view)

    def _mask_by_grammars(
        self, logits: Float[Tensor, "n T V"], requests: Sequence[Request], proposal: Proposal
    ) -> Float[Tensor, "n T V"]:
        """Logits of the tokens that the requests' grammars allow after each draft token, and −inf elsewhere.

        The bitmasks are computed while the device runs the forward pass."""
        shape = *logits.shape[:2], bitmask_width(logits.shape[-1])
        bitmask = torch.full(shape, ALL_TOKENS, dtype=torch.int32, pin_memory=logits.is_cuda)
        for rows, request, draft, count in zip(
            bitmask, requests, proposal.tokens.tolist(), proposal.lengths, strict=True
        ):
            if request.grammar is not None:
                request.grammar.fill_draft_bitmasks(rows[: count + 1], draft[:count])
        return mask_by_grammar(logits, bitmask.to(logits.device, non_blocking=True))

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
        logprob_columns: list[list[Any]] = [[None] * (n * width) if x is None else x.tolist() for x in gathered]
        tokens, num_accepted, invalid = (x.tolist() for x in verified)
        for row in reversed(range(n)):  # from the last row: it is released without a swap
            request, last = requests[row], num_accepted[row]
            previous_len, count = len(request.output.tokens), request.sampling_params.logprobs
            with self._isolate_failures([request]):
                for i, token in enumerate(tokens[row][: last + 1]):
                    logprob, top_tokens, top_logprobs = (column[row * width + i] for column in logprob_columns)
                    top = dict(zip(top_tokens[:count], top_logprobs[:count], strict=True)) if count else None
                    self._process_token(request, token, invalid[row] and i == last, logprob, top)
                    if request.finished.is_set():
                        break
            self.stats.num_output_tokens += len(request.output.tokens) - previous_len
        self.stats.num_drafted += sum(proposal.lengths)
        self.stats.num_accepted += sum(num_accepted)
        self.stats.num_forward_passes += n
