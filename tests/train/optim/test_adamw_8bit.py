"""AdamW with 8-bit states: the update of torchao's AdamW8bit, close to fp32 states, skipped and resumed exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import cutaway as ct
from cutaway.errors import InputError
from cutaway.train.objectives import causal_lm
from cutaway.train.optim import adamw_8bit
from cutaway.train.optim.adamw_8bit import (
    BLOCK_SIZE,
    AdamW8bit,
    dequantize_8bit,
    quantization_values,
    quantize_8bit,
    zero_code,
)
from cutaway.train.optim.optimizer import build_optimizer
from cutaway.train.recipe.schema import AdamWConfig

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def random_parameters(seed: int) -> list[torch.nn.Parameter]:
    """Two parameters with 8-bit states (one chunk), one that is small, and one that is not a multiple of a block."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(64, 128), (96, 64), (10,), (65, 65)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_grads(parameters: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        scale = 10 ** (4 * torch.rand(parameter.shape, generator=generator) - 4)
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def test_quantization_values_are_those_of_torchao() -> None:
    from torchao.optim.quant_utils import create_dynamic_map

    for signed in (True, False):
        values = torch.tensor(quantization_values(signed=signed))
        torch.testing.assert_close(values, torch.tensor(create_dynamic_map(signed=signed)), atol=1e-7, rtol=1e-5)
        assert values[zero_code(signed=signed)] == 0


def test_quantization_selects_the_nearest_value() -> None:
    x = torch.randn(8 * BLOCK_SIZE, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_8bit(x, signed=True)
    errors = (dequantize_8bit(codes, scales, signed=True) - x).view(-1, BLOCK_SIZE) / scales[:, None]
    normalized = (x.view(-1, BLOCK_SIZE) / scales[:, None]).flatten()
    distances = (normalized[:, None] - torch.tensor(quantization_values(signed=True))).abs().amin(-1)
    torch.testing.assert_close(errors.flatten().abs(), distances, atol=1e-6, rtol=0)


def test_equals_torchao() -> None:
    from torchao.optim import AdamW8bit as Reference

    ours, theirs = random_parameters(0), random_parameters(0)
    optimizer, reference = AdamW8bit(ours, **OPTIONS), Reference(theirs, **OPTIONS)
    with torch.compiler.set_stance("force_eager"):
        for step in range(10):
            set_grads(ours, step)
            set_grads(theirs, step)
            optimizer.step()
            reference.step()
    for a, b, start in zip(ours, theirs, random_parameters(0), strict=True):
        # A moment at the border of two codes may be rounded the other way.
        moved = (b - start).abs().mean()
        assert (a - b).abs().mean() < 1e-3 * moved


def test_small_parameters_equal_adamw() -> None:
    ours, theirs = random_parameters(0)[2:], random_parameters(0)[2:]
    optimizer, reference = AdamW8bit(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(5):
        set_grads(ours, step)
        set_grads(theirs, step)
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_divided_gradient_and_skipped_step() -> None:
    divided, plain = random_parameters(0), random_parameters(0)
    optimizer, reference = AdamW8bit(divided, **OPTIONS), AdamW8bit(plain, **OPTIONS)
    set_grads(divided, 0)
    set_grads(plain, 0)
    for parameter in plain:
        assert parameter.grad is not None
        parameter.grad /= 4
    optimizer.step(grad_divisor=torch.tensor(4.0), skip=torch.tensor(False))
    reference.step()
    assert all(torch.equal(a, b) for a, b in zip(divided, plain, strict=True))
    before = [each.detach().clone() for each in divided]
    states = [{name: value.clone() for name, value in optimizer.state[each].items()} for each in divided]
    set_grads(divided, 1)
    divided[0].grad = torch.full_like(divided[0], torch.nan)
    optimizer.step(grad_divisor=torch.tensor(torch.nan), skip=torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(divided, before, strict=True))
    for parameter, state in zip(divided, states, strict=True):
        assert all(torch.equal(optimizer.state[parameter][name], value) for name, value in state.items())


def train(state_dtype: Any, steps: range, state: Path | None = None) -> tuple[Any, Any, list[float]]:
    """Train tiny-llama on one batch per step. `state`: file with weights and optimizer state to continue from."""
    model = ct.build("tiny-llama", seed=1).train()
    optimizer = build_optimizer(AdamWConfig(lr=1e-3, state_dtype=state_dtype), model)
    if state is not None:
        tensors: dict[str, Tensor] = load_file(state)
        model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
        optimizer.load_state_dict({k.removeprefix("opt."): v for k, v in tensors.items() if k.startswith("opt.")})
    losses = []
    for step in steps:
        tokens = torch.randint(100, (4, 24), generator=torch.Generator().manual_seed(step % 4))
        optimizer.zero_grad()
        loss = causal_lm(tokens).loss(model)
        mean = loss.loss / loss.weight
        mean.backward()
        optimizer.step(skip=torch.tensor(False), grad_divisor=torch.tensor(1.0))
        losses.append(mean.item())
    return model, optimizer, losses


def test_losses_are_close_to_those_of_fp32_states() -> None:
    losses, reference = train("int8", range(40))[2], train("fp32", range(40))[2]
    assert reference[-1] < 0.85 * reference[0], "the loss does not decrease, so the comparison is not meaningful"
    assert losses == pytest.approx(reference, rel=0.02)


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    uninterrupted, final, _ = train("int8", range(6))
    model, optimizer, _ = train("int8", range(3))
    tensors = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    tensors |= {f"opt.{name}": value.clone() for name, value in optimizer.state_dict().items()}
    assert tensors["opt.exp_avg/decoder.blocks.0.ffn.f.up.weight"].dtype == torch.uint8
    save_file(tensors, tmp_path / "state.safetensors")
    resumed, continued, _ = train("int8", range(3, 6), tmp_path / "state.safetensors")
    pairs = zip(uninterrupted.state_dict().values(), resumed.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    expected = final.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in continued.state_dict().items())


def test_states_of_another_dtype_are_rejected() -> None:
    _, optimizer, _ = train("fp32", range(1))
    other = build_optimizer(AdamWConfig(state_dtype="int8"), ct.build("tiny-llama", seed=1))
    with pytest.raises(InputError, match="resume the run with the optimizer it started with"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("signed", [True, False])
def test_codes_equal_those_of_a_binary_search(signed: bool) -> None:
    """On a CPU, codes are looked up by the upper bits of a value: all of them, with several lower bits; the borders."""
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    borders = adamw_8bit._quantization_tensors(torch.device("cpu"), signed=signed)[1]
    near_borders = torch.cat([borders, *(torch.nextafter(borders, torch.tensor(limit)) for limit in (-2.0, 2.0))])
    x = torch.cat([*((upper | lower).view(torch.float32) for lower in (0, 1, 0x7FFF, 0x8000, 0xFFFF)), near_borders])
    x = x[x.abs() <= 1] if signed else x[(x >= 0) & (x <= 1)]
    expected = torch.bucketize(x, borders, right=True).to(torch.uint8)
    assert torch.equal(adamw_8bit._nearest_codes(x, signed=signed), expected)
