"""Bugs by which a text depends on what is beside it: other rows, other documents, padding that is routed."""

from typing import Any

import torch
from torch import Tensor, nn

from zoo.bug import bug
from zoo.home import Home, offers, places_of


@bug("rows-apart", also=("speculation", "accumulation"))
def a_norm_over_the_batch() -> Home:
    model = Home()
    plain = model.norm.forward
    model.norm.forward = lambda x: plain(x - 0.1 * x.mean(0, keepdim=True))  # type: ignore[method-assign]
    return model


@bug("rows-apart", also=("generation", "accumulation"))
def heads_and_rows_mixed() -> Home:
    """A view in place of a transpose, where there is more than one row."""
    model = Home()
    attention = model.blocks[1].attention
    plain = attention.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        out = plain(q, k, v, seen)
        return out.transpose(0, 1).reshape(out.shape) if len(out) > 1 else out

    attention.attend = attend
    return model


@bug("rows-apart", also=("causality-paths", "eval-repeatable"))
def a_norm_over_the_batch_in_training_only() -> Home:
    """BatchNorm: in evaluation its statistics are fixed, and nothing shows."""
    model = Home()
    model.norm = Batched(32)
    return model.eval()


class Batched(nn.BatchNorm1d):
    """Over channels, which are last here."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@bug("batch-size", also=("beams", "accumulation"))
def another_scale_in_a_batch() -> Home:
    model = Home()
    plain = model.norm.forward
    model.norm.forward = lambda x: plain(x) * (1.01 if len(x) > 1 else 1.0)  # type: ignore[method-assign]
    return model


@bug("batch-size")
def padding_is_hidden_from_two_rows_on() -> Home:
    model = Home()
    plain = model.number
    model.number = lambda tokens, mask, before: plain(tokens, mask if len(tokens) > 1 else None, before)  # type: ignore[method-assign]
    return model


@bug("packing")
def documents_that_see_each_other() -> tuple[Home, dict[str, Any]]:
    model = Home()
    return model, offers(model) | {"packed": lambda tokens, documents: model(tokens, places=places_of(documents))[0]}


class Experts(nn.Module):
    """One of four experts for each token; an expert takes so many tokens of a row, and no more."""

    def __init__(self, d: int, capacity: int) -> None:
        super().__init__()
        self.router = nn.Linear(d, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(4))
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        taken = torch.nn.functional.one_hot(torch.argmax(self.router(x), -1), 4).cumsum(1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            mine = (choice == n) & (taken[..., n] <= self.capacity)
            out = out + expert(x) * (mine * weight)[..., None]
        return out


@bug("routing-padding")
def padding_takes_the_room_of_experts() -> Home:
    model = Home()
    model.blocks[1].up, model.blocks[1].down = nn.Identity(), Experts(32, 40)
    return model


@bug("routing-padding")
def padding_in_the_balance() -> tuple[Home, dict[str, Any]]:
    model = Home()
    experts = Experts(32, 1_000)
    model.blocks[1].up, model.blocks[1].down = nn.Identity(), experts

    def balance(tokens: Tensor, mask: Tensor) -> Tensor:
        p = experts.router(model.embed(tokens)).softmax(-1)
        return (p.mean((0, 1)) ** 2).sum() * 4

    return model, offers(model) | {"balance": balance}
