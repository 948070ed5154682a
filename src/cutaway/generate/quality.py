"""What fewer bits cost: how far a model's predictions move when its matrices are rounded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.generate.engine import Engine
from cutaway.generate.fast.weights import GROUP, to_steps
from cutaway.generate.plan import Plan
from cutaway.generate.runner import at_rest
from cutaway.generate.settings import Settings
from cutaway.model import Transformer

TEXTS, LENGTH = 4, 64


@dataclass(frozen=True)
class Loss:
    """The mean over the tokens of some texts."""

    bits: int
    tokens: int
    divergence: float
    """Nats from the whole model's distribution to the rounded one's."""
    agreement: float
    """Share of tokens at which both find the same one likeliest."""

    def __str__(self) -> str:
        return (
            f"{self.bits}-bit weights: {self.divergence:.2g} nats a token from the whole ones,"
            f" {self.agreement:.1%} the same likeliest token ({self.tokens} tokens of the model's own)"
        )


@torch.no_grad()
def loss_of_bits(model: Transformer, bits: int, *, seed: int = 0) -> Loss:
    """On texts that the model itself draws, from random first tokens, since these are what it will be asked about."""
    length = min(LENGTH, Plan(model).slots - 2)
    asked = Settings(max_new_tokens=length, temperature=1.0, ignore_eos=True)
    engine = Engine(Plan(model, rows=TEXTS, context=length + 2, kind="full", compiled=False))
    dice = torch.Generator().manual_seed(seed)
    first = torch.randint(model.config.vocab_size, (TEXTS,), generator=dice).tolist()
    tickets = [engine.submit([token], asked, seed=seed + row) for row, token in enumerate(first)]
    engine.run()
    texts = [[token, *ticket.result().tokens] for token, ticket in zip(first, tickets, strict=True)]
    tokens = torch.tensor(texts, device=model.device)
    with at_rest(model):
        whole = model(tokens).float().log_softmax(-1)
        with rounded(model, bits):
            other = model(tokens).float().log_softmax(-1)
    divergence = (whole.exp() * (whole - other)).sum(-1)
    same = whole.argmax(-1) == other.argmax(-1)
    return Loss(bits, tokens.numel(), float(divergence.mean()), float(same.float().mean()))


@contextmanager
def rounded(model: Transformer, bits: int) -> Iterator[None]:
    """The model with the matrices of its decoder and head as steps with these bits see them; then as it was."""
    head: Any = model.head
    matrices = [module for module in model.stacks["decoder"].modules() if isinstance(module, nn.Linear)]
    kept = [matrix.weight.data for matrix in matrices]
    output = head.matrix
    try:
        for matrix in matrices:
            matrix.weight.data = as_seen(matrix.weight.data, bits)
        head.matrix = nn.Linear(
            1, 1, bias=False, device="meta"
        )  # a table that is tied stays whole where it is looked up
        head.matrix.weight = nn.Parameter(as_seen(output.weight.data, bits), requires_grad=False)
        yield
    finally:
        head.matrix = output
        for matrix, weight in zip(matrices, kept, strict=True):
            matrix.weight.data = weight


def as_seen(weight: Tensor, bits: int) -> Tensor:
    """A matrix after rounding and back."""
    if bits == 16:
        return weight.bfloat16().to(weight.dtype)
    if bits == 4 and weight.shape[-1] % GROUP:
        return weight  # too narrow to be packed
    scale, numbers = to_steps(weight, bits)
    if scale.ndim == 1:
        return (numbers * scale.unsqueeze(-1)).to(weight.dtype)
    groups = numbers.view(*scale.shape, GROUP) * scale.float().unsqueeze(-1)
    return groups.flatten(-2).to(weight.dtype)
