"""Memory of adapters: frozen layers save nothing for gradients that are not computed; checkpointing is bit-exact."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import cutaway as ct
from cutaway.config import presets
from cutaway.model import Transformer
from cutaway.model.adapters.quantized_linear import quantize_linears

TOKENS = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(0))
DECODERS = [name for name in presets() if name.startswith("tiny-") and ct.config(name).form == "decoder"]


def build(name: str, mode: Any = "none", quantization: str = "none", **adapter: Any) -> Transformer:
    model = ct.build(name, seed=0).train()
    if quantization != "none":
        quantize_linears(model, quantization)  # type: ignore[arg-type]
    model.use_activation_checkpointing(mode).add_adapter({"rank": 2, **adapter}, seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):  # zero at first, so that A would have no gradient
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


def gradients(model: Transformer) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model(TOKENS).logsumexp(-1).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.sample(6)
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("adapter", [{}, {"use_dora": True, "targets": ["attn.*"]}, {"targets": ["blocks.1.*"]}])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_checkpointing_is_bit_equal(mode: str, adapter: dict[str, Any], quantization: str) -> None:
    expected = gradients(build("tiny-llama", "none", quantization, **adapter))
    found = gradients(build("tiny-llama", mode, quantization, **adapter))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(grad.count_nonzero() for grad in expected.values())


@pytest.mark.sample(8)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("name", DECODERS)
def test_blocks_below_the_first_adapter_build_no_graph(name: str, mode: str) -> None:
    model = build(name, mode, targets=["blocks.1.*"])
    outputs: list[Tensor] = []
    for block in dict.fromkeys(model.stacks["decoder"].blocks):
        block.register_forward_hook(lambda module, args, output: outputs.append(output))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    num_saved: list[int] = []
    handle = model.stacks["decoder"].blocks[0].register_forward_hook(lambda *_: num_saved.append(len(saved)))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(TOKENS)
    handle.remove()
    assert [output.requires_grad for output in outputs[:2]] == [False, True]
    assert num_saved[0] == 0, "the embedding or the first block saves tensors"
    assert saved


def test_adapters_of_one_input_save_it_once_under_autocast() -> None:
    model = build("tiny-llama", targets=["attn.q", "attn.k", "attn.v"]).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if ".adapters." in name:
            parameter.data = parameter.data.float()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    attention = model.stacks["decoder"].blocks[0].attn.f  # type: ignore[union-attr, operator]
    x = torch.randn(2, 12, model.config.d_model, dtype=torch.bfloat16)
    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        outputs = [layer(x) for layer in (attention.q, attention.k, attention.v)]  # type: ignore[union-attr]
    assert all(output.requires_grad for output in outputs)
    inputs = [tensor for tensor in saved if tensor.shape[-1] == x.shape[-1] and tensor.numel() == x.numel()]
    assert len(inputs) == 3
    assert {tensor.untyped_storage().data_ptr() for tensor in inputs} == {x.untyped_storage().data_ptr()}


def test_frozen_experts_save_no_inputs() -> None:
    from cutaway.model.moe import grouped_mm

    offsets = torch.tensor([3, 5, 8])
    x = torch.randn(8, 4, requires_grad=True)
    weight = torch.randn(3, 6, 4)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = grouped_mm(x, weight, offsets)
    assert not any(tensor.shape == x.shape for tensor in saved)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected = torch.cat([grad[a:b] @ weight[e] for e, (a, b) in enumerate([(0, 3), (3, 5), (5, 8)])])
    torch.testing.assert_close(x.grad, expected)
