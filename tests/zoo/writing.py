"""Bugs in how a text is written: greedily, by beams, by draws, by guesses."""

from typing import Any

import torch
from torch import Tensor

from zoo.bug import bug
from zoo.home import Home, offers, sample

# ----------------------------------------------------------------------------------------------------- generation


@bug("generation")
def the_last_token_twice() -> Home:
    """The prompt's last token is read again, behind a cache that holds it."""
    model = Home()

    def write(tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        _, state = model(tokens, mask)
        chosen = [tokens[:, -1:]]
        for _ in range(n):
            logits, state = model(chosen[-1], state=state)
            chosen.append(logits[:, -1:].argmax(-1))
        return torch.cat(chosen[1:], 1)

    model.write = write  # type: ignore[method-assign]
    return model


@bug("generation")
def one_token_too_many() -> Home:
    model = Home()
    model.write = lambda tokens, n, mask=None: Home.write(model, tokens, n + 1, mask)  # type: ignore[method-assign]
    return model


@bug("generation")
def padding_that_counts() -> Home:
    """Of texts padded on the left, the mask is forgotten."""
    model = Home()
    model.write = lambda tokens, n, mask=None: Home.write(model, tokens, n)  # type: ignore[method-assign]
    return model


@bug("generation")
def every_row_like_the_first() -> Home:
    model = Home()
    model.write = (
        lambda tokens, n, mask=None: (  # type: ignore[method-assign]
            Home.write(model, tokens, n, mask)[:1].expand(len(tokens), -1)
        )
    )
    return model


# ---------------------------------------------------------------------------------------------------- speculation


@bug("speculation")
def one_guess_too_many() -> Home:
    model = Home()
    model.accepted = lambda guess, own: min(Home.accepted(model, guess, own) + 1, len(guess))  # type: ignore[method-assign]
    return model


@bug("speculation")
def guesses_that_are_not_corrected() -> Home:
    """All guesses are kept, whatever the model says itself."""
    model = Home()
    model.accepted = lambda guess, own: len(guess)  # type: ignore[method-assign]
    return model


# ---------------------------------------------------------------------------------------------------------- modes


def afterwards(what: Any) -> Home:
    """A model to which something is done after it wrote."""
    model = Home(dropout=0.1)

    def write(tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        training = model.training
        model.eval()
        out = Home.write(model, tokens, n, mask)
        what(model, training)
        return out

    model.write = write  # type: ignore[method-assign]
    return model


@bug("mode-restored", also=("eval-repeatable",))
def eval_that_stays() -> Home:
    return afterwards(lambda model, training: None)


@bug("mode-restored", also=("eval-repeatable",))
def train_in_any_case() -> Home:
    return afterwards(lambda model, training: model.train())


@bug("mode-restored")
def weights_that_stay_frozen() -> Home:
    def what(model: Home, training: bool) -> None:
        model.train(training)
        model.head.weight.requires_grad_(False)

    return afterwards(what)


@bug("mode-restored")
def gradients_that_stay_off() -> Home:
    def what(model: Home, training: bool) -> None:
        model.train(training)
        torch.set_grad_enabled(False)

    return afterwards(what)


# ---------------------------------------------------------------------------------------------------------- beams


@bug("beams")
def a_cache_that_is_not_reordered() -> Home:
    """Rows are as many as beams, and not those of their parents."""
    model = Home()
    model.reorder = lambda state, parents: Home.reorder(  # type: ignore[method-assign]
        model, state, torch.arange(len(parents)) % len(state[0][0])
    )
    return model


@bug("beams")
def scores_divided_by_the_length() -> tuple[Home, dict[str, Any]]:
    model = Home()

    def beams(tokens: Tensor, n: int, width: int) -> tuple[Tensor, Tensor]:
        found, sums = model.search(tokens, n, width)
        return found, sums / n

    return model, offers(model) | {"beams": beams}


@bug("beams")
def sums_of_logits() -> tuple[Home, dict[str, Any]]:
    """Logits are added up in place of log-probabilities."""
    model = Home()

    def beams(tokens: Tensor, n: int, width: int) -> tuple[Tensor, Tensor]:
        sums, found = torch.zeros(1), tokens
        for _ in range(n):
            total = sums[:, None] + model(found)[0][:, -1]
            sums, place = total.flatten().topk(width)
            found = torch.cat((found[place // model.vocab], place[:, None] % model.vocab), 1)
        return found[:, tokens.shape[1] :], sums

    return model, offers(model) | {"beams": beams}


@bug("beams")
def beams_that_are_all_the_same() -> tuple[Home, dict[str, Any]]:
    """All beams start from the prompt with a sum of 0, so that each does what the first does."""
    model = Home()

    def beams(tokens: Tensor, n: int, width: int) -> tuple[Tensor, Tensor]:
        found, sums = model.search(tokens, n, width)
        return found[:1].expand(width, -1), sums[:1].expand(width)

    return model, offers(model) | {"beams": beams}


# -------------------------------------------------------------------------------------------------------- sampler


def drawing(draw: Any) -> tuple[Home, dict[str, Any]]:
    model = Home()
    return model, offers(model) | {"sample": draw}


@bug("sampler")
def a_temperature_that_is_ignored() -> tuple[Home, dict[str, Any]]:
    return drawing(lambda logits, n, temperature=1.0: sample(logits, n))


@bug("sampler")
def a_temperature_that_is_applied_twice() -> tuple[Home, dict[str, Any]]:
    return drawing(lambda logits, n, temperature=1.0: sample(logits / temperature, n, temperature))


@bug("sampler")
def top_k_that_keeps_one_more() -> tuple[Home, dict[str, Any]]:
    return drawing(lambda logits, n, top_k=None: sample(logits, n, top_k=None if top_k is None else top_k + 1))


@bug("sampler")
def top_p_without_the_token_that_crosses_it() -> tuple[Home, dict[str, Any]]:
    def draw(logits: Tensor, n: int, top_p: float = 1.0) -> Tensor:
        p, tokens = logits.softmax(-1).sort(descending=True)
        keep = p.cumsum(0) <= top_p + 1e-6
        keep[0] = True
        return tokens[torch.multinomial(torch.where(keep, p, 0.0), n, replacement=True)]

    return drawing(draw)


@bug("sampler")
def sorted_places_taken_for_tokens() -> tuple[Home, dict[str, Any]]:
    def draw(logits: Tensor, n: int) -> Tensor:
        return torch.multinomial(logits.softmax(-1).sort(descending=True).values, n, replacement=True)

    return drawing(draw)
