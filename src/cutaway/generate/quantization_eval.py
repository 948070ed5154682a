"""Quality loss of weight quantization: KL divergence and top-1 agreement with the unquantized model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cutaway.eval_mode import eval_mode
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.engine import Engine
from cutaway.generate.fast.quantized_weights import GROUP_SIZE, quantize
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.model import Transformer

_NUM_SEQUENCES, _SEQ_LEN = 4, 64


@dataclass(frozen=True)
class QuantizationReport:
    """Quality loss of weight quantization, as means over the tokens of the evaluated sequences."""

    bits: int
    num_tokens: int
    kl_divergence: float
    """KL(original ‖ quantized) in nats per token."""
    top1_agreement: float
    """Fraction of positions at which the original and the quantized model have the same most likely next token."""

    def __str__(self) -> str:
        return (
            f"{self.bits}-bit weights: KL divergence {self.kl_divergence:.2g} nats per token,"
            f" top-1 agreement {self.top1_agreement:.1%} ({self.num_tokens} tokens sampled from the model)"
        )


@torch.no_grad()
def evaluate_quantization(model: Transformer, bits: int, *, seed: int = 0) -> QuantizationReport:
    """Compare the model before and after weight quantization, on sequences that it samples after a random token.

    Sampled sequences are used because decode steps process tokens of the same distribution.
    """
    length = min(_SEQ_LEN, EngineConfig(model).num_slots - 2)
    params = SamplingParams(max_new_tokens=length, temperature=1.0, ignore_eos=True)
    engine = Engine(EngineConfig(model, _NUM_SEQUENCES, length + 2, cache_implementation="full", compile=False))
    generator = torch.Generator().manual_seed(seed)
    first_tokens = torch.randint(model.config.vocab_size, (_NUM_SEQUENCES,), generator=generator).tolist()
    requests = [engine.submit([token], params, seed=seed + row) for row, token in enumerate(first_tokens)]
    engine.run()
    sequences = [[token, *request.result().tokens] for token, request in zip(first_tokens, requests, strict=True)]
    tokens = torch.tensor(sequences, device=model.device)
    with eval_mode(model):
        log_p = model(tokens).float().log_softmax(-1)
        with _fake_quantized_weights(model, bits):
            log_q = model(tokens).float().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    agree = log_p.argmax(-1) == log_q.argmax(-1)
    return QuantizationReport(bits, tokens.numel(), float(kl.mean()), float(agree.float().mean()))


@contextmanager
def _fake_quantized_weights(model: Transformer, bits: int) -> Iterator[None]:
    """Context manager that quantizes decoder and head weights as in decode steps, and restores them at the end."""
    head = model.lm_head
    linears = [module for module in model.stacks["decoder"].modules() if isinstance(module, nn.Linear)]
    original = [linear.weight.data for linear in linears]
    output_matrix = head.matrix
    try:
        for linear in linears:
            linear.weight.data = fake_quantize(linear.weight.data, bits)
        matrix = nn.Linear(1, 1, bias=False, device="meta")  # a tied embedding stays unquantized in the lookup
        assert isinstance(output_matrix.weight, Tensor)
        matrix.weight = nn.Parameter(fake_quantize(output_matrix.weight.data, bits), requires_grad=False)
        head.matrix = matrix
        yield
    finally:
        head.matrix = output_matrix
        for linear, weight in zip(linears, original, strict=True):
            linear.weight.data = weight


def fake_quantize(weight: Tensor, bits: int) -> Tensor:
    """Round a matrix to `bits` bits per weight as decode steps do, and return it in its original dtype."""
    if bits == 16:
        return weight.bfloat16().to(weight.dtype)
    if bits == 4 and weight.shape[-1] % GROUP_SIZE:
        return weight  # pack_weight leaves such a matrix unquantized too
    scale, integers = quantize(weight, bits)
    if scale.ndim == 1:
        return (integers * scale.unsqueeze(-1)).to(weight.dtype)
    groups = integers.view(*scale.shape, GROUP_SIZE) * scale.float().unsqueeze(-1)
    return groups.flatten(-2).to(weight.dtype)
