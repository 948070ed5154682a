"""Seeded bugs in greedy decoding, speculative decoding, restored modes, beam search and sampling."""

from typing import Any

import torch
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs, sample
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor

# generation


@seeded_bug("generation")
def last_token_fed_twice() -> ReferenceGPT:
    """The prompt's last token is fed again, though the cache already holds it."""
    model = ReferenceGPT()

    def generate(tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        _, cache = model(tokens, mask)
        new_tokens = [tokens[:, -1:]]
        for _ in range(n):
            logits, cache = model(new_tokens[-1], cache=cache)
            new_tokens.append(logits[:, -1:].argmax(-1))
        return torch.cat(new_tokens[1:], 1)

    model.generate = generate  # type: ignore[method-assign]
    return model


@seeded_bug("generation")
def one_token_too_many() -> ReferenceGPT:
    model = ReferenceGPT()
    model.generate = lambda tokens, n, mask=None: ReferenceGPT.generate(model, tokens, n + 1, mask)  # type: ignore[method-assign]
    return model


@seeded_bug("generation")
def mask_ignored_in_generate() -> ReferenceGPT:
    """The mask of a left-padded batch is ignored."""
    model = ReferenceGPT()
    model.generate = lambda tokens, n, mask=None: ReferenceGPT.generate(model, tokens, n)  # type: ignore[method-assign]
    return model


@seeded_bug("generation")
def first_row_repeated() -> ReferenceGPT:
    model = ReferenceGPT()
    model.generate = (
        lambda tokens, n, mask=None: (  # type: ignore[method-assign]
            ReferenceGPT.generate(model, tokens, n, mask)[:1].expand(len(tokens), -1)
        )
    )
    return model


@seeded_bug("generation")
def last_position_of_a_right_padded_batch() -> ReferenceGPT:
    """The first new token is taken from the last position of the batch, which is padding in shorter rows."""
    model = ReferenceGPT()
    model.last_real = lambda logits, mask: logits[:, -1:]  # type: ignore[method-assign]
    return model


# speculative-decoding


@seeded_bug("speculative-decoding")
def one_draft_token_too_many() -> ReferenceGPT:
    model = ReferenceGPT()
    model.count_accepted = lambda draft, target: min(  # type: ignore[method-assign]
        ReferenceGPT.count_accepted(model, draft, target) + 1, len(draft)
    )
    return model


@seeded_bug("speculative-decoding")
def all_draft_tokens_accepted() -> ReferenceGPT:
    """All draft tokens are accepted."""
    model = ReferenceGPT()
    model.count_accepted = lambda draft, target: len(draft)  # type: ignore[method-assign]
    return model


# mode-restored


def build_with_action_after_generate(action: Any) -> ReferenceGPT:
    """A model whose generate calls `action(model, training)` at its end."""
    model = ReferenceGPT(dropout=0.1)

    def generate(tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        training = model.training
        model.eval()
        out = ReferenceGPT.generate(model, tokens, n, mask)
        action(model, training)
        return out

    model.generate = generate  # type: ignore[method-assign]
    return model


@seeded_bug("mode-restored", also_caught_by=("eval-determinism",))
def left_in_eval_mode() -> ReferenceGPT:
    return build_with_action_after_generate(lambda model, training: None)


@seeded_bug("mode-restored", also_caught_by=("eval-determinism",))
def always_left_in_training_mode() -> ReferenceGPT:
    return build_with_action_after_generate(lambda model, training: model.train())


@seeded_bug("mode-restored")
def weights_left_frozen() -> ReferenceGPT:
    def action(model: ReferenceGPT, training: bool) -> None:
        model.train(training)
        model.head.weight.requires_grad_(False)

    return build_with_action_after_generate(action)


@seeded_bug("mode-restored")
def grad_left_disabled() -> ReferenceGPT:
    def action(model: ReferenceGPT, training: bool) -> None:
        model.train(training)
        torch.set_grad_enabled(False)

    return build_with_action_after_generate(action)


# beam-search


@seeded_bug("beam-search")
def cache_not_reordered() -> ReferenceGPT:
    """There is one cache row per beam, but not the row of its parent."""
    model = ReferenceGPT()
    model.reorder_cache = lambda cache, parents: ReferenceGPT.reorder_cache(  # type: ignore[method-assign]
        model, cache, torch.arange(len(parents)) % len(cache[0][0])
    )
    return model


@seeded_bug("beam-search")
def scores_divided_by_length() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()

    def search(tokens: Tensor, n: int, num_beams: int) -> tuple[Tensor, Tensor]:
        beams, scores = model.beam_search(tokens, n, num_beams)
        return beams, scores / n

    return model, check_kwargs(model) | {"beam_search": search}


@seeded_bug("beam-search")
def sum_of_logits() -> tuple[ReferenceGPT, dict[str, Any]]:
    """Sums logits instead of log-probabilities."""
    model = ReferenceGPT()

    def search(tokens: Tensor, n: int, num_beams: int) -> tuple[Tensor, Tensor]:
        scores, beams = torch.zeros(1), tokens
        for _ in range(n):
            candidates = scores[:, None] + model(beams)[0][:, -1]
            scores, index = candidates.flatten().topk(num_beams)
            beams = torch.cat((beams[index // model.vocab_size], index[:, None] % model.vocab_size), 1)
        return beams[:, tokens.shape[1] :], scores

    return model, check_kwargs(model) | {"beam_search": search}


@seeded_bug("beam-search")
def identical_beams() -> tuple[ReferenceGPT, dict[str, Any]]:
    """All beams start from the prompt with a score of 0, so that they stay identical."""
    model = ReferenceGPT()

    def search(tokens: Tensor, n: int, num_beams: int) -> tuple[Tensor, Tensor]:
        beams, scores = model.beam_search(tokens, n, num_beams)
        return beams[:1].expand(num_beams, -1), scores[:1].expand(num_beams)

    return model, check_kwargs(model) | {"beam_search": search}


# sampling


def build_with_sampler(sampler: Any) -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()
    return model, check_kwargs(model) | {"sample": sampler}


@seeded_bug("sampling")
def temperature_ignored() -> tuple[ReferenceGPT, dict[str, Any]]:
    return build_with_sampler(lambda logits, n, temperature=1.0: sample(logits, n))


@seeded_bug("sampling")
def temperature_applied_twice() -> tuple[ReferenceGPT, dict[str, Any]]:
    return build_with_sampler(lambda logits, n, temperature=1.0: sample(logits / temperature, n, temperature))


@seeded_bug("sampling")
def top_k_keeps_one_more() -> tuple[ReferenceGPT, dict[str, Any]]:
    return build_with_sampler(
        lambda logits, n, top_k=None: sample(logits, n, top_k=None if top_k is None else top_k + 1)
    )


@seeded_bug("sampling")
def top_p_drops_crossing_token() -> tuple[ReferenceGPT, dict[str, Any]]:
    def sample_tokens(logits: Tensor, n: int, top_p: float = 1.0) -> Tensor:
        p, tokens = logits.softmax(-1).sort(descending=True)
        keep = p.cumsum(0) <= top_p + 1e-6
        keep[0] = True
        return tokens[torch.multinomial(torch.where(keep, p, 0.0), n, replacement=True)]

    return build_with_sampler(sample_tokens)


@seeded_bug("sampling")
def sorted_ranks_as_tokens() -> tuple[ReferenceGPT, dict[str, Any]]:
    def sample_tokens(logits: Tensor, n: int) -> Tensor:
        return torch.multinomial(logits.softmax(-1).sort(descending=True).values, n, replacement=True)

    return build_with_sampler(sample_tokens)


@seeded_bug("sampling")
def top_k_keeps_one_more_with_keyword_arguments() -> tuple[ReferenceGPT, dict[str, Any]]:
    """The sampler takes its parameters as **kwargs."""

    def sample_tokens(logits: Tensor, n: int, **kwargs: Any) -> Tensor:
        top_k = kwargs.pop("top_k", None)
        return sample(logits, n, top_k=None if top_k is None else top_k + 1, **kwargs)

    return build_with_sampler(sample_tokens)


@seeded_bug("sampling")
def top_p_before_temperature() -> tuple[ReferenceGPT, dict[str, Any]]:
    def sample_tokens(logits: Tensor, n: int, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
        p, tokens = logits.softmax(-1).sort(descending=True)
        p = torch.where(p.cumsum(0) - p < top_p, p, 0.0)
        return tokens[torch.multinomial((p.log() / temperature).softmax(-1), n, replacement=True)]

    return build_with_sampler(sample_tokens)


def build_with_eos(*, stop_early: bool) -> tuple[ReferenceGPT, dict[str, Any]]:
    """One row that ends with eos ends all rows: the others are padded with eos, or, with `stop_early`, cut off."""
    model = ReferenceGPT()
    tokens = torch.randint(model.vocab_size, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        eos = int(model(tokens)[0].argmax(-1).flatten().mode().values)

    def generate(tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        out = ReferenceGPT.generate(model, tokens, n, mask)
        ended = (out == eos).any(0)
        end = int(ended.long().argmax()) + 1 if bool(ended.any()) else n
        return out[:, :end] if stop_early else torch.where(torch.arange(n) < end, out, eos)

    model.generate = generate  # type: ignore[method-assign]
    return model, {**check_kwargs(model), "eos_token_id": eos, "generate_padded": None}


@seeded_bug("generation")
def one_eos_pads_all_rows() -> tuple[ReferenceGPT, dict[str, Any]]:
    return build_with_eos(stop_early=False)


@seeded_bug("generation")
def one_eos_stops_all_rows() -> tuple[ReferenceGPT, dict[str, Any]]:
    return build_with_eos(stop_early=True)
