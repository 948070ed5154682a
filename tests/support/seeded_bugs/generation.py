"""Bugs in how a text is written: greedily, by beams, by draws, by guesses."""

from typing import Any

import torch
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs, sample
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor

# ----------------------------------------------------------------------------------------------------- generation


@seeded_bug("generation")
def last_token_fed_twice() -> ReferenceGPT:
    """The prompt's last token is read again, behind a cache that holds it."""
    model = ReferenceGPT()

    def write(tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        _, state = model(tokens, mask)
        chosen = [tokens[:, -1:]]
        for _ in range(n):
            logits, state = model(chosen[-1], cache=state)
            chosen.append(logits[:, -1:].argmax(-1))
        return torch.cat(chosen[1:], 1)

    model.generate = write  # type: ignore[method-assign]
    return model


@seeded_bug("generation")
def one_token_too_many() -> ReferenceGPT:
    model = ReferenceGPT()
    model.generate = lambda tokens, n, mask=None: ReferenceGPT.generate(model, tokens, n + 1, mask)  # type: ignore[method-assign]
    return model


@seeded_bug("generation")
def mask_ignored_in_generate() -> ReferenceGPT:
    """Of texts padded on the left, the mask is forgotten."""
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


# ---------------------------------------------------------------------------------------------------- speculation


@seeded_bug("speculative-decoding")
def one_draft_token_too_many() -> ReferenceGPT:
    model = ReferenceGPT()
    model.count_accepted = lambda guess, own: min(ReferenceGPT.count_accepted(model, guess, own) + 1, len(guess))  # type: ignore[method-assign]
    return model


@seeded_bug("speculative-decoding")
def all_draft_tokens_accepted() -> ReferenceGPT:
    """All guesses are kept, whatever the model says itself."""
    model = ReferenceGPT()
    model.count_accepted = lambda guess, own: len(guess)  # type: ignore[method-assign]
    return model


# ---------------------------------------------------------------------------------------------------------- modes


def build_with_action_after_generate(action: Any) -> ReferenceGPT:
    """A model to which something is done after it wrote."""
    model = ReferenceGPT(dropout=0.1)

    def write(tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        training = model.training
        model.eval()
        out = ReferenceGPT.generate(model, tokens, n, mask)
        action(model, training)
        return out

    model.generate = write  # type: ignore[method-assign]
    return model


@seeded_bug("mode-restored", also_caught_by=("eval-determinism",))
def left_in_eval_mode() -> ReferenceGPT:
    return build_with_action_after_generate(lambda model, training: None)


@seeded_bug("mode-restored", also_caught_by=("eval-determinism",))
def always_left_in_training_mode() -> ReferenceGPT:
    return build_with_action_after_generate(lambda model, training: model.train())


@seeded_bug("mode-restored")
def weights_left_frozen() -> ReferenceGPT:
    def what(model: ReferenceGPT, training: bool) -> None:
        model.train(training)
        model.head.weight.requires_grad_(False)

    return build_with_action_after_generate(what)


@seeded_bug("mode-restored")
def grad_left_disabled() -> ReferenceGPT:
    def what(model: ReferenceGPT, training: bool) -> None:
        model.train(training)
        torch.set_grad_enabled(False)

    return build_with_action_after_generate(what)


# ---------------------------------------------------------------------------------------------------------- beams


@seeded_bug("beam-search")
def cache_not_reordered() -> ReferenceGPT:
    """Rows are as many as beams, and not those of their parents."""
    model = ReferenceGPT()
    model.reorder_cache = lambda state, parents: ReferenceGPT.reorder_cache(  # type: ignore[method-assign]
        model, state, torch.arange(len(parents)) % len(state[0][0])
    )
    return model


@seeded_bug("beam-search")
def scores_divided_by_length() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()

    def beams(tokens: Tensor, n: int, width: int) -> tuple[Tensor, Tensor]:
        found, sums = model.beam_search(tokens, n, width)
        return found, sums / n

    return model, check_kwargs(model) | {"beam_search": beams}


@seeded_bug("beam-search")
def sum_of_logits() -> tuple[ReferenceGPT, dict[str, Any]]:
    """Logits are added up in place of log-probabilities."""
    model = ReferenceGPT()

    def beams(tokens: Tensor, n: int, width: int) -> tuple[Tensor, Tensor]:
        sums, found = torch.zeros(1), tokens
        for _ in range(n):
            total = sums[:, None] + model(found)[0][:, -1]
            sums, place = total.flatten().topk(width)
            found = torch.cat((found[place // model.vocab_size], place[:, None] % model.vocab_size), 1)
        return found[:, tokens.shape[1] :], sums

    return model, check_kwargs(model) | {"beam_search": beams}


@seeded_bug("beam-search")
def identical_beams() -> tuple[ReferenceGPT, dict[str, Any]]:
    """All beams start from the prompt with a sum of 0, so that each does what the first does."""
    model = ReferenceGPT()

    def beams(tokens: Tensor, n: int, width: int) -> tuple[Tensor, Tensor]:
        found, sums = model.beam_search(tokens, n, width)
        return found[:1].expand(width, -1), sums[:1].expand(width)

    return model, check_kwargs(model) | {"beam_search": beams}


# -------------------------------------------------------------------------------------------------------- sampler


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
    def draw(logits: Tensor, n: int, top_p: float = 1.0) -> Tensor:
        p, tokens = logits.softmax(-1).sort(descending=True)
        keep = p.cumsum(0) <= top_p + 1e-6
        keep[0] = True
        return tokens[torch.multinomial(torch.where(keep, p, 0.0), n, replacement=True)]

    return build_with_sampler(draw)


@seeded_bug("sampling")
def sorted_ranks_as_tokens() -> tuple[ReferenceGPT, dict[str, Any]]:
    def draw(logits: Tensor, n: int) -> Tensor:
        return torch.multinomial(logits.softmax(-1).sort(descending=True).values, n, replacement=True)

    return build_with_sampler(draw)
