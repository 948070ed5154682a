"""Worked examples with known results, and closed forms of Jacobians."""

import math

import pytest
import torch
from torch import nn

from cutaway import config as c
from cutaway.model import build
from cutaway.model.ffn import build_dense_ffn
from cutaway.model.norms import build_norm
from cutaway.model.positions import SinusoidalPosition

X = torch.tensor([1.0, 2.0, 3.0, 4.0])


def close(a: torch.Tensor, b: list, tolerance: float = 5e-4) -> bool:
    return bool((a - torch.tensor(b, dtype=a.dtype)).abs().max() < tolerance)


def test_layernorm_and_rmsnorm_of_1_2_3_4() -> None:
    assert close(build_norm(c.LayerNorm(), 4)(X), [-1.342, -0.447, 0.447, 1.342])
    assert close(build_norm(c.RMSNorm(), 4)(X), [0.365, 0.730, 1.095, 1.461])


@torch.no_grad()
def test_rmsnorm_unit_offset() -> None:
    norm = build_norm(c.RMSNorm(unit_offset=True), 4)
    assert close(norm(X), [0.365, 0.730, 1.095, 1.461])
    norm.weight.fill_(1.0)
    assert close(norm(X), [0.730, 1.461, 2.191, 2.921], 1e-3)


@torch.no_grad()
def test_ffn_hidden() -> None:
    ffn = build_dense_ffn(c.Mlp(hidden=4, activation="relu", bias=False), 3)
    ffn.up.weight.copy_(torch.tensor([[1, 0, -1, 0.5], [0, 1, 0, -1], [0.5, -0.5, 1, 0]]).T)
    hidden = []
    ffn.down.register_forward_pre_hook(lambda m, i: hidden.append(i[0]))
    ffn.down.weight.zero_()
    ffn(torch.tensor([0.5, -1.0, 0.8]))
    assert close(hidden[0], [0.9, 0, 0.3, 1.25])


@pytest.mark.parametrize(
    "ffn", [c.Mlp(), c.Gated(), c.Moe(experts=4, router=c.Router(top_k=2))], ids=lambda ffn: ffn.kind
)
def test_ffn_is_applied_per_token(ffn: c.FFN) -> None:
    block = c.Block(attention=c.MultiHead(heads=2), ffn=ffn)
    model = build(c.Decoder(vocab_size=2, d_model=8, decoder=c.Stack(layers=1, block=block)), seed=0)
    x = torch.randn(1, 5, 8)
    separate = torch.cat([model.decoder.blocks[0].ffn(x[:, i : i + 1]) for i in range(5)], 1)
    assert torch.allclose(model.decoder.blocks[0].ffn(x), separate, atol=1e-6)


@torch.no_grad()
def test_pre_norm_block_with_attention_off() -> None:
    config = c.Decoder(
        vocab_size=2,
        d_model=2,
        decoder=c.Stack(
            layers=1,
            block=c.Block(
                attention=c.MultiHead(heads=1, position=c.NoPosition()),
                ffn=c.Mlp(hidden=2, activation="relu", bias=False),
            ),
        ),
    )
    block = build(config).decoder.blocks[0]
    block.attn.f.o.weight.zero_()
    block.ffn.f.up.weight.copy_(torch.eye(2))
    block.ffn.f.down.weight.copy_(torch.eye(2))
    model = build(config)
    model.decoder.blocks[0] = block
    model.decoder.embed.token.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    outputs = []
    block.register_forward_hook(lambda m, i, o: outputs.append(o))
    model(torch.tensor([[0, 1]]))
    assert close(outputs[0][0], [[1.632, 3.265], [3.849, 5.131]], 1e-3)


@pytest.mark.parametrize("offset", [False, True])
def test_rmsnorm_jacobian(offset: bool) -> None:
    """(γ/rms)(I − x̂x̂ᵀ/d)."""
    norm = build_norm(c.RMSNorm(eps=1e-12, unit_offset=offset), 5).double()
    nn.init.normal_(norm.weight)
    x = torch.randn(5, dtype=torch.float64)
    rms = x.square().mean().sqrt()
    normalized = x / rms
    gain = norm.weight + 1 if offset else norm.weight
    expected = (gain / rms).unsqueeze(-1) * (torch.eye(5, dtype=x.dtype) - torch.outer(normalized, normalized) / 5)
    assert (torch.autograd.functional.jacobian(norm, x) - expected).abs().max() < 1e-9


def test_layernorm_jacobian() -> None:
    """(γ/σ)(I − 11ᵀ/d − x̂x̂ᵀ/d)."""
    norm = build_norm(c.LayerNorm(eps=1e-12), 5).double()
    nn.init.normal_(norm.weight)
    x = torch.randn(5, dtype=torch.float64)
    sigma = x.var(correction=0).sqrt()
    normalized = (x - x.mean()) / sigma
    expected = (norm.weight / sigma).unsqueeze(-1) * (
        torch.eye(5, dtype=x.dtype) - torch.ones(5, 5, dtype=x.dtype) / 5 - torch.outer(normalized, normalized) / 5
    )
    assert (torch.autograd.functional.jacobian(norm, x) - expected).abs().max() < 1e-9


def test_gpt2_head_dim_and_score_shape() -> None:
    attention = c.config("gpt2").decoder.block[0].attention
    assert attention.head_dim(768) == 64
    model = build("gpt2", seed=0).use_kernel("explicit")
    shapes = []
    model.decoder.blocks[0].attn.f.kernel.softmax.register_forward_hook(lambda m, i, o: shapes.append(o.shape))
    with torch.no_grad():
        model(torch.zeros(1, 128, dtype=torch.long))
    assert shapes[0] == (1, 12, 128, 128)


def test_unscaled_scores_have_standard_deviation_8() -> None:
    q, k = torch.randn(2, 20000, 64)
    assert (q * k).sum(-1).std().item() == pytest.approx(8.0, rel=0.02)


@torch.no_grad()
def test_number_of_keys_recomputed_without_a_cache() -> None:
    """Without a cache, n tokens compute n(n − 1)/2 keys more per layer than with it."""
    model = build("tiny-llama", seed=0)
    key_counts = []
    model.decoder.blocks[0].attn.f.k.register_forward_hook(lambda m, i, o: key_counts.append(o.shape[1]))
    tokens = torch.zeros(1, 50, dtype=torch.long)
    for length in range(1, 51):
        model(tokens[:, :length])
    uncached = sum(key_counts)
    key_counts.clear()
    cache = model.new_cache(1, 50)
    for i in range(50):
        model(tokens[:, i : i + 1], cache=cache)
    assert uncached - sum(key_counts) == 50 * 49 // 2
    assert 1000 * 999 // 2 == 499_500


def test_sinusoidal_positions_shift_by_a_rotation() -> None:
    """PE(pos + k) = M_k·PE(pos), where M_k rotates each pair and does not depend on pos."""
    encode = SinusoidalPosition(c.SinusoidalPosition(), 8)
    table = encode(torch.arange(40).unsqueeze(0))[0].double()
    for shift in (1, 7):
        angle = shift * 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        rotation = torch.block_diag(
            *(torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]]) for a in angle)
        )
        assert (table[:-shift] @ rotation.double().T - table[shift:]).abs().max() < 1e-6


@pytest.mark.parametrize(("layers", "d_model", "fits"), [(32, 4096, True), (40, 5120, False)])
def test_classic_shapes_and_16_gb(layers: int, d_model: int, fits: bool) -> None:
    """12·N·d² + 2·V·d parameters, plus norms, at 2 bytes each."""
    config = c.Decoder(
        vocab_size=50_000,
        d_model=d_model,
        decoder=c.Stack(
            layers=layers,
            block=c.Block(
                attention=c.MultiHead(heads=32, position=c.NoPosition()), ffn=c.Mlp(activation="gelu", bias=False)
            ),
        ),
        head=c.LMHead(tied=False),
    )
    num_parameters = sum(p.numel() for p in build(config, device="meta").parameters())
    estimate = 12 * layers * d_model**2 + 2 * 50_000 * d_model
    assert num_parameters == pytest.approx(estimate, rel=1e-3)
    assert (2 * num_parameters < 16e9) is fits


def test_ffn_has_twice_the_parameters_of_attention() -> None:
    block = build("gpt2", device="meta").decoder.blocks[0]
    num_weights = lambda module: sum(p.numel() for p in module.parameters() if p.ndim == 2)  # noqa: E731
    assert num_weights(block.ffn) == 2 * num_weights(block.attn)
    llama = build("llama-3-8b", device="meta").decoder.blocks[0]
    assert num_weights(llama.ffn) == 176_160_768
    assert 8 * 4096**2 == 134_217_728
