"""Fused LoRA layers: outputs and gradients equal those of the layers one by one."""

import copy
from itertools import product
from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.model import Transformer
from cutaway.model.adapters.quantized_linear import quantize_linears
from cutaway.train.kernels.compile import _find_fusible_modules, compile_for_training
from cutaway.train.kernels.lora import FusedLoRALinear

TOKENS = torch.arange(24).view(2, 12)


def build_adapted(preset: str, quantization: str | None = None, **config: Any) -> Transformer:
    model = ct.build(preset, seed=0).train()
    if quantization is not None:
        quantize_linears(model, quantization)  # type: ignore[arg-type]  # a literal
    model.add_adapter({"rank": 6, **config}, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("preset", "config"),
    [
        *product(["tiny-llama", "tiny-gemma", "tiny-moe"], [{}, {"quantization": "nf4"}, {"quantization": "int8"}]),
        ("tiny-llama", {"rank_pattern": {"attn.q": 3}}),
        ("tiny-llama", {"rank_pattern": {"attn.q": 3}, "quantization": "nf4"}),
    ],
)
def test_fused_layers_equal_single_layers(preset: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = build_adapted(preset, **config)
    fused = copy.deepcopy(model)
    context = compile_for_training(fused, True)
    assert any("fused_lora" in methods for methods in _find_fusible_modules(copy.deepcopy(model)).values())
    for _ in range(2):  # the second time with changed weights
        model.zero_grad()
        fused.zero_grad()
        expected = model(TOKENS)
        expected.square().mean().backward()
        with context():
            logits = fused(TOKENS)
            logits.square().mean().backward()
            with fused.disable_adapters(), model.disable_adapters():
                torch.testing.assert_close(fused(TOKENS), model(TOKENS), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(fused(TOKENS), expected, atol=1e-5, rtol=1e-5)  # outside of the context
        reference = dict(model.named_parameters())
        for name, parameter in fused.named_parameters():
            if parameter.requires_grad:
                grad, other = parameter.grad, reference[name].grad
                assert grad is not None
                assert other is not None
                assert float((grad - other).abs().max()) <= 1e-5 * float(other.abs().max())
        with torch.no_grad():
            for each in (model, fused):
                for parameter in each.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(1.1)


@pytest.mark.parametrize("config", [{"dropout": 0.1}, {"use_dora": True}, {"targets": ["attn.q"]}])
def test_layers_that_cannot_be_fused(config: dict[str, Any]) -> None:
    methods = _find_fusible_modules(build_adapted("tiny-llama", **config))
    attention = [each for module, each in methods.items() if "project_qkv" in each]
    assert not any("fused_lora" in each for each in attention)


def test_frozen_weights_are_stored_once() -> None:
    model = build_adapted("tiny-llama")
    block = model.stacks["decoder"].blocks[0]
    attention = block.attn.f  # type: ignore[union-attr]
    fused = FusedLoRALinear(attention.q, attention.k, attention.v, concat=True)  # type: ignore[union-attr, arg-type]
    storages = {layer.weight.untyped_storage().data_ptr() for layer in (attention.q, attention.k, attention.v)}  # type: ignore[union-attr]
    assert storages == {fused.matrices[0].untyped_storage().data_ptr()}
