"""Numbers that can be done by hand, and the closed forms of what autograd computes."""

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


def close(a: torch.Tensor, b: list, places: float = 5e-4) -> bool:
    return bool((a - torch.tensor(b, dtype=a.dtype)).abs().max() < places)


def test_norms_of_one_two_three_four() -> None:
    assert close(build_norm(c.LayerNorm(), 4)(X), [-1.342, -0.447, 0.447, 1.342])
    assert close(build_norm(c.RMSNorm(), 4)(X), [0.365, 0.730, 1.095, 1.461])


@torch.no_grad()
def test_unit_offset_multiplies_by_one_plus_gain() -> None:
    norm = build_norm(c.RMSNorm(unit_offset=True), 4)
    assert close(norm(X), [0.365, 0.730, 1.095, 1.461])
    norm.weight.fill_(1.0)
    assert close(norm(X), [0.730, 1.461, 2.191, 2.921], 1e-3)


@torch.no_grad()
def test_ffn_hidden() -> None:
    ffn = build_dense_ffn(c.Mlp(hidden=4, activation="relu", bias=False), 3)
    ffn.up.weight.copy_(torch.tensor([[1, 0, -1, 0.5], [0, 1, 0, -1], [0.5, -0.5, 1, 0]]).T)
    seen = []
    ffn.down.register_forward_pre_hook(lambda m, i: seen.append(i[0]))
    ffn.down.weight.zero_()
    ffn(torch.tensor([0.5, -1.0, 0.8]))
    assert close(seen[0], [0.9, 0, 0.3, 1.25])


@pytest.mark.parametrize(
    "ffn", [c.Mlp(), c.Gated(), c.Moe(experts=4, router=c.Router(top_k=2))], ids=lambda ffn: ffn.kind
)
def test_an_ffn_works_on_each_token_alone(ffn: c.FFN) -> None:
    block = c.Block(attention=c.MultiHead(heads=2), ffn=ffn)
    model = build(c.Decoder(vocab_size=2, d_model=8, decoder=c.Stack(layers=1, block=block)), seed=0)
    x = torch.randn(1, 5, 8)
    alone = torch.cat([model.decoder.blocks[0].ffn(x[:, i : i + 1]) for i in range(5)], 1)
    assert torch.allclose(model.decoder.blocks[0].ffn(x), alone, atol=1e-6)


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
    seen = []
    block.register_forward_hook(lambda m, i, o: seen.append(o))
    model(torch.tensor([[0, 1]]))
    assert close(seen[0][0], [[1.632, 3.265], [3.849, 5.131]], 1e-3)


@pytest.mark.parametrize("offset", [False, True])
def test_rmsnorm_jacobian(offset: bool) -> None:
    """(γ/rms)(I − x̂x̂ᵀ/d)."""
    norm = build_norm(c.RMSNorm(eps=1e-12, unit_offset=offset), 5).double()
    nn.init.normal_(norm.weight)
    x = torch.randn(5, dtype=torch.float64)
    rms = x.square().mean().sqrt()
    unit = x / rms
    gain = norm.weight + 1 if offset else norm.weight
    closed = (gain / rms).unsqueeze(-1) * (torch.eye(5, dtype=x.dtype) - torch.outer(unit, unit) / 5)
    assert (torch.autograd.functional.jacobian(norm, x) - closed).abs().max() < 1e-9


def test_layernorm_jacobian() -> None:
    """(γ/σ)(I − 11ᵀ/d − x̂x̂ᵀ/d)."""
    norm = build_norm(c.LayerNorm(eps=1e-12), 5).double()
    nn.init.normal_(norm.weight)
    x = torch.randn(5, dtype=torch.float64)
    sigma = x.var(correction=0).sqrt()
    unit = (x - x.mean()) / sigma
    closed = (norm.weight / sigma).unsqueeze(-1) * (
        torch.eye(5, dtype=x.dtype) - torch.ones(5, 5, dtype=x.dtype) / 5 - torch.outer(unit, unit) / 5
    )
    assert (torch.autograd.functional.jacobian(norm, x) - closed).abs().max() < 1e-9


def test_heads_of_768_and_their_scores() -> None:
    attention = c.config("gpt2").decoder.block[0].attention
    assert attention.head_dim(768) == 64
    model = build("gpt2", seed=0).use_kernel("explicit")
    shapes = []
    model.decoder.blocks[0].attn.f.kernel.softmax.register_forward_hook(lambda m, i, o: shapes.append(o.shape))
    with torch.no_grad():
        model(torch.zeros(1, 128, dtype=torch.long))
    assert shapes[0] == (1, 12, 128, 128)


def test_unscaled_scores_have_deviation_eight() -> None:
    q, k = torch.randn(2, 20000, 64)
    assert (q * k).sum(-1).std().item() == pytest.approx(8.0, rel=0.02)


@torch.no_grad()
def test_a_thousand_tokens_without_a_cache_recompute_half_a_million_pairs() -> None:
    """Keys that a layer computes for n tokens, counted with and without a cache: n(n − 1)/2 too many without."""
    model = build("tiny-llama", seed=0)
    counted = []
    model.decoder.blocks[0].attn.f.k.register_forward_hook(lambda m, i, o: counted.append(o.shape[1]))
    tokens = torch.zeros(1, 50, dtype=torch.long)
    for length in range(1, 51):
        model(tokens[:, :length])
    without = sum(counted)
    counted.clear()
    cache = model.new_cache(1, 50)
    for i in range(50):
        model(tokens[:, i : i + 1], cache=cache)
    assert without - sum(counted) == 50 * 49 // 2
    assert 1000 * 999 // 2 == 499_500


def test_sinusoid_of_a_shift_is_a_linear_map() -> None:
    """PE(pos + k) = M_k·PE(pos), with M_k a rotation of each pair, the same for every pos."""
    encode = SinusoidalPosition(c.SinusoidalPosition(), 8)
    table = encode(torch.arange(40).unsqueeze(0))[0].double()
    for shift in (1, 7):
        angle = shift * encode.frequency
        turn = torch.block_diag(
            *(torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]]) for a in angle)
        )
        assert (table[:-shift] @ turn.double().T - table[shift:]).abs().max() < 1e-6


@pytest.mark.parametrize(("layers", "d_model", "fits"), [(32, 4096, True), (40, 5120, False)])
def test_classic_shape_against_sixteen_gigabytes(layers: int, d_model: int, fits: bool) -> None:
    """12·N·d² + 2·V·d: with biases and norms on top, 2 bytes each."""
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
    count = sum(p.numel() for p in build(config, device="meta").parameters())
    rule = 12 * layers * d_model**2 + 2 * 50_000 * d_model
    assert count == pytest.approx(rule, rel=1e-3)
    assert (2 * count < 16e9) is fits


def test_ffn_has_twice_the_parameters_of_attention() -> None:
    block = build("gpt2", device="meta").decoder.blocks[0]
    weights = lambda module: sum(p.numel() for p in module.parameters() if p.ndim == 2)  # noqa: E731
    assert weights(block.ffn) == 2 * weights(block.attn)
    llama = build("llama-3-8b", device="meta").decoder.blocks[0]
    assert weights(llama.ffn) == 176_160_768
    assert 8 * 4096**2 == 134_217_728
