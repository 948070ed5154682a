"""Draft proposers of speculative decoding: the interface, and proposals by a smaller draft model."""

import copy
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.model_runner import ModelRunner
from cutaway.generate.engine.prefill_budget import MAX_PADDED_PREFILL_TOKENS
from cutaway.generate.engine.request import Request
from cutaway.generate.sampling.logits_processing import inverse_cdf_sample, logits_to_probs
from cutaway.generate.sampling.rng import uniform
from cutaway.generate.sampling.sampling_state import SamplingFeatures, SamplingState
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer

_DRAFT_STREAM = 1
"""Random stream of draft tokens; the target model's tokens use stream 0."""


class Proposal(NamedTuple):
    """Draft tokens for n rows. Row i has `lengths[i]` draft tokens; the rest of the row is padding."""

    tokens: Int64[Tensor, "n k"]
    lengths: list[int]
    probs: list[Float32[Tensor, "n V"]] | None = None
    """Distribution that each draft token was sampled from; None for deterministic drafts (one-hot)."""


class Proposer(Protocol):
    """Proposes draft tokens for the sequences in the rows of the batch."""

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Prepare to propose draft tokens for new requests, which are in consecutive rows."""
        ...

    def swap_rows(self, a: int, b: int) -> None: ...

    def propose(
        self, requests: Sequence[Request], max_tokens: Sequence[int], state: SamplingState, features: SamplingFeatures
    ) -> Proposal:
        """Propose up to `max_tokens[i]` draft tokens for row i. `state` is a copy, which may be modified."""
        ...

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop rejected draft tokens from the proposer's cache: keep the first `lengths[i]` tokens of row i."""
        ...


class DraftModelProposer:
    """Proposes tokens sampled from a smaller model with the request's sampling parameters."""

    def __init__(self, model: Transformer, target_config: EngineConfig, num_draft_tokens: int) -> None:
        """`target_config`: engine configuration of the target model."""
        self.target_vocab_size, self.device = target_config.model.config.vocab_size, target_config.model.device
        self.max_token_id = model.config.vocab_size - 1
        stack = model.stacks["decoder"]
        max_positions = getattr(stack.embed.position, "max_positions", None)
        lengths = (target_config.num_slots, max_positions, *stack.rope_switch_lengths)
        self.max_len = min(length for length in lengths if length is not None)
        """Maximum sequence length of the draft model; longer sequences get no drafts."""
        config = EngineConfig(
            model,
            max_num_seqs=target_config.max_num_seqs,
            max_model_len=max(2, self.max_len),
            prefill_chunk_size=target_config.prefill_chunk_size,
            max_source_len=target_config.max_source_len,
            decoder_start_token_id=target_config.decoder_start_token_id,
        )
        # One more slot: a row without drafts is padded while other rows process up to two newly accepted tokens.
        config = reserve_draft_slots(config, num_draft_tokens + 1)
        self.model_runner = ModelRunner(model, config.build_cache(), compile=False)
        self.prefill_chunk_size = config.resolved_prefill_chunk_size
        self.num_computed = [0] * target_config.max_num_seqs

    def add_requests(self, requests: Sequence[Request]) -> None:
        token_ids = [request.all_token_ids for request in requests]
        sequences = [self._clamp_token_ids(ids) if len(ids) <= self.max_len else [] for ids in token_ids]
        for request, tokens in zip(requests, sequences, strict=True):
            assert request.row is not None
            self.model_runner.cache.assign_row(request.row)
            if request.source_tokens is not None and tokens:
                self.model_runner.encode_source(request.row, request.source_tokens, tokens)
        self._prefill_prompts(requests[0].row or 0, sequences)

    def _prefill_prompts(self, first_row: int, sequences: Sequence[Sequence[int]]) -> None:
        """Prefill all but the last token of each sequence, in rows first_row, first_row + 1, …

        A forward pass has at most `prefill_chunk_size` tokens."""
        ends = [max(0, len(sequence) - 1) for sequence in sequences]
        self.num_computed[first_row : first_row + len(ends)] = ends
        start = 0
        while start < len(ends):
            longest, stop = ends[start], start + 1
            while stop < len(ends) and max(longest, ends[stop]) * (stop + 1 - start) <= self.prefill_chunk_size:
                longest, stop = max(longest, ends[stop]), stop + 1
            for position in range(0, longest, self.prefill_chunk_size):
                chunks = [
                    sequence[position : min(end, position + self.prefill_chunk_size)]
                    for sequence, end in zip(sequences[start:stop], ends[start:stop], strict=True)
                ]
                self.model_runner.prefill(first_row + start, chunks, [position] * len(chunks))
            start = stop

    def swap_rows(self, a: int, b: int) -> None:
        self.model_runner.swap_rows(a, b)
        self.num_computed[a], self.num_computed[b] = self.num_computed[b], self.num_computed[a]

    def propose(
        self, requests: Sequence[Request], max_tokens: Sequence[int], state: SamplingState, features: SamplingFeatures
    ) -> Proposal:
        sequences = [request.all_token_ids for request in requests]
        # The last draft token is not an input of the draft model, so it does not count towards max_len.
        limits = [max(0, self.max_len + 1 - len(tokens)) for tokens in sequences]
        counts = [min(pair) for pair in zip(max_tokens, limits, strict=True)]
        if not any(counts):
            return Proposal(torch.zeros(len(counts), 0, dtype=torch.long, device=self.device), counts)
        draft_tokens: list[Tensor] = []
        probs: list[Tensor] = []
        num_drafts = torch.tensor(counts, device=self.device)
        rows = zip(sequences, self.num_computed, counts, strict=False)
        logits = self._prefill_new_tokens([tokens[n:] if count else [] for tokens, n, count in rows])
        for i in range(max(counts)):
            if i > 0:
                logits = self._decode(draft_tokens[-1], [count > i for count in counts])
            q = _replace_invalid_probs(logits_to_probs(self._match_target_vocab(logits), state, features))
            token = inverse_cdf_sample(q, uniform(state.int_params[:, 0], state.output_len, _DRAFT_STREAM))
            state.append_tokens(token, num_drafts > i, features)
            draft_tokens.append(token)
            probs.append(q)
        return Proposal(torch.stack(draft_tokens, -1), counts, probs)

    def _prefill_new_tokens(self, chunks: Sequence[Sequence[int]]) -> Float[Tensor, "n V"]:
        """Run the draft model on the tokens accepted since the last call; return the logits after each chunk.

        The logits of a row with an empty chunk are undefined."""
        longest = max(map(len, chunks))
        tokens = torch.tensor([[*self._clamp_token_ids(chunk), *[0] * (longest - len(chunk))] for chunk in chunks])
        mask = None
        if any(len(chunk) < longest for chunk in chunks):
            mask = torch.tensor([[i < len(chunk) for i in range(longest)] for chunk in chunks])
        x = self._forward_hidden(tokens, mask)
        last_index = torch.tensor([max(0, len(chunk) - 1) for chunk in chunks], device=x.device)
        for row, chunk in enumerate(chunks):
            self.num_computed[row] += len(chunk)
        return self.model_runner.model.lm_head(x[torch.arange(len(x), device=x.device), last_index])

    def _decode(self, tokens: Int64[Tensor, " n"], active_rows: Sequence[bool]) -> Float[Tensor, "n V"]:
        """Run the draft model on one draft token per active row; return the logits of the next token."""
        mask = None if all(active_rows) else torch.tensor(active_rows).unsqueeze(-1)
        x = self._forward_hidden(tokens.clamp(max=self.max_token_id).unsqueeze(-1), mask)
        for row, active in enumerate(active_rows):
            self.num_computed[row] += active
        return self.model_runner.model.lm_head(x[:, -1])

    def _forward_hidden(self, tokens: Int64[Tensor, "n T"], mask: Bool[Tensor, "n T"] | None) -> Float[Tensor, "n T d"]:
        runner = self.model_runner
        view = runner.cache.view_rows(0, len(tokens), max_len=max(self.num_computed[: len(tokens)]))
        device = view.seq_lens.device
        mask = None if mask is None else mask.to(device)
        return runner.forward_hidden(runner.model, tokens.to(device), mask, view)

    def _match_target_vocab(self, logits: Float[Tensor, "n W"]) -> Float[Tensor, "n V"]:
        """Convert logits to the target's vocabulary size: cut off padding, or add tokens with probability 0."""
        missing = self.target_vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits.to(self.device), (0, missing), value=-torch.inf)

    def _clamp_token_ids(self, tokens: Sequence[int]) -> list[int]:
        """Clamp ids to the draft model's vocabulary.

        Only padding entries of the target's vocabulary have larger ids. Drafts after such a token are arbitrary, and
        rejection sampling keeps the output correct."""
        return [min(token, self.max_token_id) for token in tokens]

    def truncate(self, lengths: Sequence[int]) -> None:
        lengths = [min(pair) for pair in zip(self.num_computed, lengths, strict=False)]
        if lengths != self.num_computed[: len(lengths)]:
            view = self.model_runner.cache.view_rows(0, len(lengths), max_len=max(self.num_computed))
            view.crop(torch.tensor(lengths, device=view.seq_lens.device))
            self.num_computed[: len(lengths)] = lengths


def _replace_invalid_probs(probs: Float32[Tensor, "n V"]) -> Float32[Tensor, "n V"]:
    """Replace invalid rows (NaN, or all tokens suppressed) by a one-hot at token 0.

    The output stays correct, because rejection sampling corrects any draft."""
    one_hot = torch.zeros_like(probs[0])
    one_hot[0] = 1
    return torch.where(probs.sum(-1, keepdim=True).isfinite(), probs, one_hot)


def reserve_draft_slots(config: EngineConfig, num_draft_tokens: int) -> EngineConfig:
    """Return a copy of the config with `num_draft_tokens` more cache slots per row, for draft tokens and padding.

    Ring buffers get room for a chunk of all draft tokens and the token before them."""
    config = copy.copy(config)
    config.num_slots += num_draft_tokens
    chunk_size = config.prefill_chunk_size or min(config.resolved_prefill_chunk_size, MAX_PADDED_PREFILL_TOKENS)
    config.prefill_chunk_size = max(chunk_size, num_draft_tokens + 1)
    return config


def check_draft_compatibility(
    model: Transformer, tokenizer: Tokenizer | None, draft_model: Transformer, draft_tokenizer: Tokenizer | None
) -> None:
    """Raise if the draft model differs from the target `model` in its stacks (encoder, decoder) or its vocabulary."""
    if draft_model.stacks.keys() != model.stacks.keys():
        ours, theirs = (" and ".join(each.stacks) for each in (draft_model, model))
        raise InputError(
            f"the draft model has {ours}, but the target model has {theirs}; use a draft model of the same structure"
        )
    for name in ("vocab_size", "source_vocab_size"):
        target_size, draft_size = (getattr(each_model.config, name, None) for each_model in (model, draft_model))
        compare_tokens = name == "vocab_size" and tokenizer is not None and draft_tokenizer is not None
        if target_size != draft_size and not compare_tokens:
            sizes = f"the draft model's {name} is {draft_size}, but the target model's is {target_size}"
            raise InputError(f"{sizes}; use a draft model with the same vocabulary")
    if tokenizer is None or draft_tokenizer is None:
        return
    for token_id in range(max(tokenizer.vocab_size, draft_tokenizer.vocab_size)):
        target_token, draft_token = tokenizer.id_to_token(token_id), draft_tokenizer.id_to_token(token_id)
        if target_token != draft_token:
            tokens = f"{target_token!r} in the target model and {draft_token!r} in the draft model"
            raise InputError(f"token {token_id} is {tokens}; use a draft model with the same vocabulary")
