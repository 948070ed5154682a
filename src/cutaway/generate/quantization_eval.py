"""What fewer bits cost: how far a model's predictions move when its matrices are rounded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.engine import Engine
from cutaway.generate.engine.model_runner import eval_mode
from cutaway.generate.fast.packed_weights import GROUP_SIZE, quantize
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.model import Transformer

NUM_SEQUENCES, SEQ_LEN = 4, 64


@dataclass(frozen=True)
class QuantizationReport:
    """The mean over the tokens of some texts."""

    bits: int
    num_tokens: int
    kl_divergence: float
    """Nats from the whole model's distribution to the rounded one's."""
    top1_agreement: float
    """Share of tokens at which both find the same one likeliest."""

    def __str__(self) -> str:
        return (
            f"{self.bits}-bit weights: {self.kl_divergence:.2g} nats a token from the whole ones,"
            f" {self.top1_agreement:.1%} the same likeliest token ({self.num_tokens} tokens of the model's own)"
        )


@torch.no_grad()
def evaluate_quantization(model: Transformer, bits: int, *, seed: int = 0) -> QuantizationReport:
    """On texts that the model itself draws, from random first tokens, since these are what it will be asked about."""
    length = min(SEQ_LEN, EngineConfig(model).num_slots - 2)
    asked = SamplingParams(max_new_tokens=length, temperature=1.0, ignore_eos=True)
    engine = Engine(
        EngineConfig(
            model, max_num_seqs=NUM_SEQUENCES, max_model_len=length + 2, cache_implementation="full", compile=False
        )
    )
    dice = torch.Generator().manual_seed(seed)
    first = torch.randint(model.config.vocab_size, (NUM_SEQUENCES,), generator=dice).tolist()
    tickets = [engine.submit([token], asked, seed=seed + row) for row, token in enumerate(first)]
    engine.run()
    texts = [[token, *ticket.result().tokens] for token, ticket in zip(first, tickets, strict=True)]
    tokens = torch.tensor(texts, device=model.device)
    with eval_mode(model):
        whole = model(tokens).float().log_softmax(-1)
        with _fake_quantized_weights(model, bits):
            other = model(tokens).float().log_softmax(-1)
    divergence = (whole.exp() * (whole - other)).sum(-1)
    same = whole.argmax(-1) == other.argmax(-1)
    return QuantizationReport(bits, tokens.numel(), float(divergence.mean()), float(same.float().mean()))


@contextmanager
def _fake_quantized_weights(model: Transformer, bits: int) -> Iterator[None]:
    """The model with the matrices of its decoder and head as steps with these bits see them; then as it was."""
    head: Any = model.head
    matrices = [module for module in model.stacks["decoder"].modules() if isinstance(module, nn.Linear)]
    kept = [matrix.weight.data for matrix in matrices]
    output = head.matrix
    try:
        for matrix in matrices:
            matrix.weight.data = fake_quantize(matrix.weight.data, bits)
        head.matrix = nn.Linear(
            1, 1, bias=False, device="meta"
        )  # a table that is tied stays whole where it is looked up
        head.matrix.weight = nn.Parameter(fake_quantize(output.weight.data, bits), requires_grad=False)
        yield
    finally:
        head.matrix = output
        for matrix, weight in zip(matrices, kept, strict=True):
            matrix.weight.data = weight


def fake_quantize(weight: Tensor, bits: int) -> Tensor:
    """A matrix after rounding and back."""
    if bits == 16:
        return weight.bfloat16().to(weight.dtype)
    if bits == 4 and weight.shape[-1] % GROUP_SIZE:
        return weight  # too narrow to be packed
    scale, numbers = quantize(weight, bits)
    if scale.ndim == 1:
        return (numbers * scale.unsqueeze(-1)).to(weight.dtype)
    groups = numbers.view(*scale.shape, GROUP_SIZE) * scale.float().unsqueeze(-1)
    return groups.flatten(-2).to(weight.dtype)
