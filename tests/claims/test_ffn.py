"""Claims on the feed-forward network. Each test name begins with the id of the claim."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.config_strategies import build_randomized_model
from torch import nn

import cutaway as ct
from cutaway import config as c
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.ffn import build_dense_ffn
from cutaway.model.masks import number_tokens


def build_ffn(config: c.DenseFFN, d_model: int = 6) -> nn.Module:
    """An FFN in fp64 with random weights and biases."""
    ffn = build_dense_ffn(config, d_model).double()
    for parameter in ffn.parameters():
        nn.init.normal_(parameter)
    return ffn


def ffn_to_attention(name: str) -> float:
    """Ratio of the FFN's parameters to those of attention in the first layer, without biases."""
    block = ct.build(name, device="meta").decoder.blocks[0]
    ffn, attention = (
        sum(p.numel() for p in branch.f.parameters() if p.ndim == 2) for branch in (block.ffn, block.attn)
    )
    return ffn / attention


@torch.no_grad()
def test_c081_ffn_equation_with_the_same_weights_at_every_position() -> None:
    ffn = build_ffn(c.Mlp(hidden=10, activation="relu"))
    x, order = torch.randn(5, 6, dtype=torch.float64), torch.tensor([3, 1, 4, 0, 2])
    for row, out in zip(x, ffn(x), strict=True):
        hidden = torch.relu(ffn.up.weight @ row + ffn.up.bias)
        assert (ffn.down.weight @ hidden + ffn.down.bias - out).abs().max() < 1e-12
    assert (ffn(x[order]) - ffn(x)[order]).abs().max() < 1e-12


def test_c082_classic_hidden_width_is_4_d() -> None:
    for name in ("encoder", "decoder"):
        ffn = ct.build("transformer-base", device="meta").stacks[name].blocks[0].ffn.f
        assert ffn.up.weight.shape == (2048, 512)
        assert ffn.down.weight.shape == (512, 2048)
    assert c.Mlp().hidden_dim(512) == 4 * 512


def test_c083_values_and_slopes_of_the_activations() -> None:
    x = (torch.arange(-6000, 6001, dtype=torch.float64) / 1000).requires_grad_()
    cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    formulas = {"relu": x.clamp(min=0), "gelu": x * cdf, "silu": x * torch.sigmoid(x)}
    for name, expected in formulas.items():
        assert (ACTIVATIONS[name](x) - expected).abs().max() < 1e-12
    slopes = {name: torch.autograd.grad(ACTIVATIONS[name](x).sum(), x)[0] for name in formulas}
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    assert (slopes["gelu"] - (cdf + x * density)).abs().max() < 1e-12
    assert (slopes["silu"] - torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x)))).abs().max() < 1e-12
    assert slopes["gelu"][6000] == slopes["silu"][6000] == 0.5  # at x = 0
    assert set(slopes["relu"].tolist()) == {0.0, 1.0}
    error = (ACTIVATIONS["gelu_tanh"](x) - ACTIVATIONS["gelu"](x)).abs().max()
    assert error.item() == pytest.approx(4.73e-4, abs=1e-6)


@torch.no_grad()
def test_c084_swiglu_equation_with_three_matrices_and_no_biases() -> None:
    ffn = build_ffn(c.Gated(hidden=10))
    x = torch.randn(5, 6, dtype=torch.float64)
    gate, up = x @ ffn.gate.weight.T, x @ ffn.up.weight.T
    assert (ffn(x) - (gate * torch.sigmoid(gate) * up) @ ffn.down.weight.T).abs().max() < 1e-12
    assert {name for name, _ in ffn.named_parameters()} == {"gate.weight", "up.weight", "down.weight"}


def test_c085_swiglu_of_width_8_d_over_3_has_the_parameters_of_an_mlp() -> None:
    """3·d·(8/3)·d = 8·d². At the same width 4·d, SwiGLU has 1.5 times the parameters."""

    def count(ffn: c.DenseFFN) -> int:
        return sum(p.numel() for p in build_dense_ffn(ffn, 768).parameters())

    mlp = count(c.Mlp(bias=False))
    assert count(c.Gated()) == mlp == 8 * 768**2
    assert count(c.Gated(hidden=4 * 768)) == 1.5 * mlp


def test_c086_swiglu_widths_of_published_models() -> None:
    """8/3·d rounded up to a multiple of 256 is 11008 at d = 4096; Llama 3 uses 3.5·d."""
    ratio = {}
    for name in ("llama-2-7b", "llama-2-13b", "llama-3-8b", "llama-3-70b", "mistral-7b-v0.1"):
        config = ct.config(name)
        ratio[name] = config.decoder.block[0].ffn.hidden_dim(config.d_model) / config.d_model
    assert ratio["llama-2-7b"] == 11008 / 4096 == 2.6875
    assert math.ceil(8 / 3 * 4096 / 256) * 256 == 11008
    assert ratio["llama-2-13b"] == 2.7
    assert ratio["llama-3-8b"] == ratio["llama-3-70b"] == ratio["mistral-7b-v0.1"] == 14336 / 4096 == 3.5


def test_c088_gemma_gates_with_gelu_and_llama_with_silu() -> None:
    presets = {
        name: ct.config(name).decoder.block[0].ffn for name in ct.presets() if name.startswith(("gemma", "llama"))
    }
    assert len(presets) > 15
    for name, ffn in presets.items():
        assert isinstance(ffn, c.Gated)
        assert ffn.activation == ("gelu_tanh" if name.startswith("gemma") else "silu")


def test_c090_ratio_of_ffn_to_attention_parameters_depends_on_the_model() -> None:
    assert ffn_to_attention("gpt2") == ffn_to_attention("gpt3-175b") == 2.0
    assert ffn_to_attention("llama-2-7b") == 2.015625
    assert ffn_to_attention("llama-3-8b") == 176_160_768 / 41_943_040 == 4.2
    assert ffn_to_attention("gemma-2b") > 10


@pytest.mark.parametrize("d_model", [32, 128])
def test_c091_attention_over_all_pairs_overtakes_the_ffn_at_4_d_tokens(d_model: int) -> None:
    """FFN 16·T·d² is linear in T, scores and values 4·T²·d are quadratic. A causal kernel needs half: T = 8·d − 1."""
    block = c.Block(attention=c.MultiHead(heads=4), ffn=c.Mlp())
    config = c.Decoder(vocab_size=8, d_model=d_model, decoder=c.Stack(layers=1, block=block))
    flops = {
        length: ct.size(config, context=length).forward_flops for length in (2 * d_model, 4 * d_model, 8 * d_model - 1)
    }
    for length, counts in flops.items():
        assert counts.full["ffn"] == 16 * length * d_model**2
        assert counts.full["scores"] + counts.full["values"] == 4 * length**2 * d_model
    middle, long = flops[4 * d_model], flops[8 * d_model - 1]
    assert middle.full["scores"] + middle.full["values"] == middle.full["ffn"]
    assert long.visible["scores"] + long.visible["values"] == long.full["ffn"]


@torch.no_grad()
def test_c092_attention_is_nonlinear_and_linear_in_x_only_for_a_fixed_pattern() -> None:
    """A model without norms and activations is still nonlinear; with the pattern fixed it becomes linear."""
    attention = c.MultiHead(heads=2, position=c.NoPosition())
    block = c.Block(attention=attention, ffn=c.Mlp(activation="identity", bias=False))
    config = c.Decoder(vocab_size=9, d_model=8, decoder=c.Stack(layers=1, block=block, norm=c.NoNorm()))
    model, tokens = build_randomized_model(config, torch.float64), torch.tensor([[3, 1, 4, 1, 5]])
    with ct.trace(model, "attn.pattern") as t:
        logits = model(tokens)
    doubled: dict[str, object] = {"embed": {"do": "scale", "value": 2.0}}
    with ct.edit(model, doubled):
        assert (model(tokens) - 2 * logits).abs().max() > 0.1
    with ct.edit(model, doubled | {"blocks.0.attn.pattern": t["blocks.0.attn.pattern"]}):
        assert (model(tokens) - 2 * logits).abs().max() < 1e-12


@torch.no_grad()
def test_c093_ffn_without_activation_is_one_linear_map() -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    ffn = build_ffn(c.Mlp(hidden=10, activation="identity"))
    matrix, bias = ffn.down.weight @ ffn.up.weight, ffn.down.weight @ ffn.up.bias + ffn.down.bias
    assert (F.linear(x, matrix, bias) - ffn(x)).abs().max() < 1e-12
    gelu = build_ffn(c.Mlp(hidden=10, activation="gelu", bias=False))
    assert (gelu(2 * x) - 2 * gelu(x)).abs().max() > 0.1


@torch.no_grad()
def test_c095_a_neuron_is_a_row_of_up_and_a_column_of_down() -> None:
    """In the layout (d_out, d_in) of nn.Linear. With matrices for x @ W, it is a column of W1 and a row of W2."""
    ffn, x = build_ffn(c.Mlp(hidden=10, bias=False)), torch.randn(6, dtype=torch.float64)
    neurons = [F.gelu(ffn.up.weight[i] @ x) * ffn.down.weight[:, i] for i in range(10)]
    assert (sum(neurons) - ffn(x)).abs().max() < 1e-12
    w1, w2 = ffn.up.weight.T, ffn.down.weight.T
    transposed = [F.gelu(x @ w1[:, i]) * w2[i] for i in range(10)]
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(neurons, transposed, strict=True))


def test_c097_ffn_has_no_jacobian_between_tokens_and_attention_has() -> None:
    model = build_randomized_model(ct.config("tiny-gpt"), torch.float64)
    stack, x = model.decoder, torch.randn(1, 4, 32, dtype=torch.float64)
    context = stack.build_layer_contexts(number_tokens(1, 4, torch.device("cpu")), x.dtype, None, {})[0]

    def token_jacobian(f: nn.Module, *args: object) -> torch.Tensor:
        jacobian = torch.autograd.functional.jacobian(lambda y: f(y, *args)[0], x)  # (T, d, 1, T, d)
        return jacobian.abs().amax((1, 2, 4))

    ffn, attention = token_jacobian(stack.blocks[0].ffn), token_jacobian(stack.blocks[0].attn, context)
    assert torch.equal(ffn > 0, torch.eye(4, dtype=torch.bool))
    assert torch.equal(attention > 0, torch.ones(4, 4, dtype=torch.bool).tril())


def test_c099_dropout_of_the_2017_transformer_is_on_sublayer_outputs_and_of_t5_also_on_hidden_activations() -> None:
    placements = {}
    for name in ("transformer-base", "gpt2", "t5-small"):
        stack = ct.config(name).decoder
        placements[name] = (stack.block[0].ffn.dropout, stack.dropout)  # hidden activations, sublayer output
    assert placements == {"transformer-base": (0.0, 0.1), "gpt2": (0.0, 0.1), "t5-small": (0.1, 0.1)}
    ffn = build_ffn(c.Mlp(activation="relu", dropout=0.5)).train()
    x = torch.randn(6, dtype=torch.float64)
    assert not torch.equal(ffn(x), ffn(x))
    assert torch.equal(ffn.eval()(x), ffn(x))
