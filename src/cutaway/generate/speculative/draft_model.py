"""Who guesses the next tokens, so that a model can read several at once; and the one who does it by a smaller model."""

import copy
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.model_runner import ModelRunner
from cutaway.generate.engine.request import Request
from cutaway.generate.sampling.logits_processing import inverse_cdf_sample, logits_to_probs
from cutaway.generate.sampling.rng import uniform
from cutaway.generate.sampling.sampling_state import SamplingFeatures, SamplingState
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer

DRAFT_STREAM = 1
"""The stream of random numbers that drafts are drawn by; a token of the model's own is drawn by stream 0."""


class Proposal(NamedTuple):
    """Guesses for n rows: the first `lengths[i]` of row i's tokens."""

    tokens: Int64[Tensor, "n k"]
    lengths: list[int]
    probs: list[Float32[Tensor, "n V"]] | None = None
    """What each was drawn from; None if they were not drawn, but are certain."""


class Proposer(Protocol):
    """Follows the texts in their rows and guesses how they go on."""

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Take in texts that come into rows one behind the other."""
        ...

    def swap_rows(self, a: int, b: int) -> None: ...

    def propose(
        self, requests: Sequence[Request], max_tokens: Sequence[int], state: SamplingState, features: SamplingFeatures
    ) -> Proposal:
        """Up to `max_tokens` for each row; `state` is a copy that may be led ahead."""
        ...

    def truncate(self, lengths: Sequence[int]) -> None:
        """Of what each row's text was with all its guesses, only the first `lengths` tokens are still true."""
        ...


class DraftModelProposer:
    """Guesses by a smaller model, under the same settings as the model's own tokens."""

    def __init__(self, model: Transformer, target_config: EngineConfig, num_draft_tokens: int) -> None:
        """`target_config` is that of the model to guess for."""
        self.target_vocab_size, self.device = target_config.model.config.vocab_size, target_config.model.device
        self.max_token_id = model.config.vocab_size - 1
        stack = model.stacks["decoder"]
        learned = getattr(stack.embed.position, "max_positions", None)
        self.max_len = min([n for n in (target_config.num_slots, learned, *stack.rope_switch_lengths) if n is not None])
        """Tokens up to which the draft can read; there it falls silent."""
        own = EngineConfig(
            model,
            max_num_seqs=target_config.max_num_seqs,
            max_model_len=max(2, self.max_len),
            prefill_chunk_size=target_config.prefill_chunk_size,
            max_source_len=target_config.max_source_len,
            decoder_start_token_id=target_config.decoder_start_token_id,
        )
        # A row that is silent is padded as others read the two tokens that were said since.
        own = reserve_draft_slots(own, num_draft_tokens + 1)
        self.model_runner = ModelRunner(model, own.build_cache(), compile=False)
        self.prefill_chunk_size = own.prefill_chunk_size
        self.num_computed = [0] * target_config.max_num_seqs

    def add_requests(self, requests: Sequence[Request]) -> None:
        texts = [
            self._clamp_token_ids(ticket.all_token_ids) if len(ticket.all_token_ids) <= self.max_len else []
            for ticket in requests
        ]
        for ticket, text in zip(requests, texts, strict=True):
            assert ticket.row is not None
            self.model_runner.cache.assign_row(ticket.row)
            if ticket.source_tokens is not None and text:
                self.model_runner.encode_source(ticket.row, ticket.source_tokens, text)
        first = requests[0].row or 0
        self.num_computed[first : first + len(texts)] = prefill_prompts(
            self.model_runner, first, texts, [0] * len(texts), self.prefill_chunk_size
        )

    def swap_rows(self, a: int, b: int) -> None:
        self.model_runner.swap_rows(a, b)
        self.num_computed[a], self.num_computed[b] = self.num_computed[b], self.num_computed[a]

    def propose(
        self, requests: Sequence[Request], max_tokens: Sequence[int], state: SamplingState, features: SamplingFeatures
    ) -> Proposal:
        texts = [ticket.all_token_ids for ticket in requests]
        room = [max(0, self.max_len + 1 - len(text)) for text in texts]  # the last guess is not read
        counts = [min(pair) for pair in zip(max_tokens, room, strict=True)]
        if not any(counts):
            return Proposal(torch.zeros(len(counts), 0, dtype=torch.long, device=self.device), counts)
        guesses: list[Tensor] = []
        chances: list[Tensor] = []
        left = torch.tensor(counts, device=self.device)
        logits = self._prefill_new_tokens(
            [text[n:] if count else [] for text, n, count in zip(texts, self.num_computed, counts, strict=False)]
        )
        for turn in range(max(counts)):
            if turn > 0:
                logits = self._decode(guesses[-1], [count > turn for count in counts])
            q = _replace_invalid_probs(logits_to_probs(self._match_target_vocab(logits), state, features))
            guess = inverse_cdf_sample(q, uniform(state.int_params[:, 0], state.output_len, DRAFT_STREAM))
            state.append_tokens(guess, left > turn, features)
            guesses.append(guess)
            chances.append(q)
        return Proposal(torch.stack(guesses, -1), counts, chances)

    def _prefill_new_tokens(self, chunks: Sequence[Sequence[int]]) -> Float[Tensor, "n V"]:
        """Read what was said since; the logits after it, which mean nothing where nothing was read."""
        longest = max(map(len, chunks))
        tokens = torch.tensor([[*self._clamp_token_ids(piece), *[0] * (longest - len(piece))] for piece in chunks])
        mask = None
        if any(len(piece) < longest for piece in chunks):
            mask = torch.tensor([[place < len(piece) for place in range(longest)] for piece in chunks])
        x = self._forward_hidden(tokens, mask)
        ends = torch.tensor([max(0, len(piece) - 1) for piece in chunks], device=x.device)
        for row, piece in enumerate(chunks):
            self.num_computed[row] += len(piece)
        return self.model_runner.model.head(x[torch.arange(len(x), device=x.device), ends])

    def _decode(self, tokens: Int64[Tensor, " n"], active_rows: Sequence[bool]) -> Float[Tensor, "n V"]:
        """Read the guesses of the active rows; the logits after them."""
        mask = None if all(active_rows) else torch.tensor(active_rows).unsqueeze(-1)
        x = self._forward_hidden(tokens.clamp(max=self.max_token_id).unsqueeze(-1), mask)
        for row, reads in enumerate(active_rows):
            self.num_computed[row] += reads
        return self.model_runner.model.head(x[:, -1])

    def _forward_hidden(self, tokens: Int64[Tensor, "n T"], mask: Bool[Tensor, "n T"] | None) -> Float[Tensor, "n T d"]:
        part = self.model_runner.cache.view_rows(0, len(tokens), max_len=max(self.num_computed[: len(tokens)]))
        device = part.seq_lens.device
        return self.model_runner.forward_hidden(
            self.model_runner.model, tokens.to(device), None if mask is None else mask.to(device), part
        )

    def _match_target_vocab(self, logits: Float[Tensor, "n W"]) -> Float[Tensor, "n V"]:
        """To the model's vocabulary: padding is cut off, and what the draft does not have is never guessed."""
        return torch.nn.functional.pad(
            logits.to(self.device), (0, self.target_vocab_size - logits.shape[-1]), value=-torch.inf
        )

    def _clamp_token_ids(self, tokens: Sequence[int]) -> list[int]:
        """Padding of the model's vocabulary may be more than the draft's has; a guess after it is as good as any."""
        return [min(token, self.max_token_id) for token in tokens]

    def truncate(self, lengths: Sequence[int]) -> None:
        lengths = [min(pair) for pair in zip(self.num_computed, lengths, strict=False)]
        if lengths != self.num_computed[: len(lengths)]:
            part = self.model_runner.cache.view_rows(0, len(lengths), max_len=max(self.num_computed))
            part.crop(torch.tensor(lengths, device=part.seq_lens.device))
            self.num_computed[: len(lengths)] = lengths


def prefill_prompts(
    model_runner: ModelRunner,
    first_row: int,
    sequences: Sequence[Sequence[int]],
    num_computed: Sequence[int],
    chunk_size: int,
) -> list[int]:
    """Read all but the last token of texts in rows from `first_row` on, of which `num_computed` are known.

    Returns how many are known then. Those that go on from the same place are read together, in passes of at most
    `chunk_size` tokens.
    """
    ends = [max(0, len(text) - 1) for text in sequences]
    start = 0
    while start < len(sequences):
        before, longest, stop = num_computed[start], ends[start] - num_computed[start], start + 1
        while stop < len(sequences) and num_computed[stop] == before:
            wider = max(longest, ends[stop] - before)
            if wider * (stop + 1 - start) > chunk_size:
                break
            longest, stop = wider, stop + 1
        for at in range(before, before + longest, chunk_size):
            pieces = [sequences[i][at : min(ends[i], at + chunk_size)] for i in range(start, stop)]
            model_runner.prefill(first_row + start, pieces, [at] * len(pieces))
        start = stop
    return ends


def _replace_invalid_probs(probs: Float32[Tensor, "n V"]) -> Float32[Tensor, "n V"]:
    """A draft whose logits are NaN, or who may say nothing, guesses token 0: what it guesses need not be good."""
    first = torch.zeros_like(probs[0])
    first[0] = 1
    return torch.where(probs.sum(-1, keepdim=True).isfinite(), probs, first)


def reserve_draft_slots(config: EngineConfig, num_draft_tokens: int) -> EngineConfig:
    """With room for guesses: behind the text (where padding goes, which has no position) and in rings."""
    config = copy.copy(config)
    config.num_slots += num_draft_tokens
    config.prefill_chunk_size = max(config.prefill_chunk_size, num_draft_tokens + 1)
    return config


def check_draft_compatibility(
    model: Transformer, tokenizer: Tokenizer | None, draft_model: Transformer, draft_tokenizer: Tokenizer | None
) -> None:
    """A draft must be of the same form and mean the same by its tokens."""
    if draft_model.stacks.keys() != model.stacks.keys():
        forms = [" and ".join(each.stacks) for each in (draft_model, model)]
        raise InputError(f"the draft is {forms[0]}, and the model {forms[1]}; use a draft of the same form")
    for name in ("vocab_size", "source_vocab_size"):
        mine, theirs = (getattr(each.config, name, None) for each in (model, draft_model))
        named = name == "vocab_size" and tokenizer is not None and draft_tokenizer is not None
        if mine != theirs and not named:
            raise InputError(
                f"the draft's {name} is {theirs}, and the model's {mine}; use a draft with the same tokens"
            )
    if tokenizer is None or draft_tokenizer is None:
        return
    for number in range(max(tokenizer.vocab_size, draft_tokenizer.vocab_size)):
        ours, theirs = tokenizer.id_to_token(number), draft_tokenizer.id_to_token(number)
        if ours != theirs:
            raise InputError(
                f"token {number} is {ours!r} to the model and {theirs!r} to the draft; use a draft with the same tokens"
            )
