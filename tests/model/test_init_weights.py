"""Initialization: standard deviations by scheme, seeds, buffers, tied weights, dtype and device moves."""

import math

import pytest
import torch

from cutaway import config as c
from cutaway.model import build
from cutaway.model.positions import SinusoidalPosition


def config_with(init: dict, **stack: object) -> c.Config:
    block = {"attention": {"heads": 4, "bias": ["q", "o"]}, "ffn": {"kind": "mlp", "hidden": 256}}
    return c.config(
        {
            "form": "decoder",
            "vocab_size": 500,
            "d_model": 64,
            "decoder": {"layers": 8, "block": block, "norm": {"kind": "layernorm"}} | stack,
            "head": {"tied": False},
            "init": init,
        }
    )


@pytest.mark.parametrize(
    ("init", "token", "q", "o", "up", "down"),
    [
        ({"kind": "normal"}, 0.02, 0.02, 0.02 / 4, 0.02, 0.02 / 4),
        ({"kind": "normal", "std": 0.1, "depth_scaled": False}, 0.1, 0.1, 0.1, 0.1, 0.1),
        ({"kind": "xavier"}, 1 / 8, math.sqrt(2 / 128), math.sqrt(2 / 128), math.sqrt(2 / 320), math.sqrt(2 / 320)),
        ({"kind": "small"}, math.sqrt(2 / 320), math.sqrt(2 / 320), 2 / 64, math.sqrt(2 / 320), 2 / 64),
        ({"kind": "t5"}, 1.0, (64 * 16) ** -0.5, 1 / 8, 1 / 8, 1 / 16),
    ],
)
def test_init_standard_deviations(init: dict, token: float, q: float, o: float, up: float, down: float) -> None:
    model = build(config_with(init), seed=1)
    block = model.decoder.blocks[3]
    measured = {
        "token": (model.decoder.embed.token.weight, token),
        "head": (model.head.matrix.weight, token),
        "q": (block.attn.f.q.weight, q),
        "o": (block.attn.f.o.weight, o),
        "up": (block.ffn.f.up.weight, up),
        "down": (block.ffn.f.down.weight, down),
    }
    for name, (weight, std) in measured.items():
        assert weight.std().item() == pytest.approx(std, rel=0.06), name
        assert abs(weight.mean().item()) < 0.1 * std, name
    assert (block.attn.f.q.bias == 0).all()
    assert (block.attn.norm_in.weight == 1).all()


def test_every_parameter_and_buffer_is_initialized() -> None:
    """Uninitialized memory would differ between two builds, or hold NaN."""
    for name in (name for name in c.presets() if name.startswith("tiny-")):
        nan_tensors = [torch.full((50_000,), float("nan")) for _ in range(40)]
        del nan_tensors
        first, second = (build(name, seed=7).state_dict() for _ in range(2))
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert all(torch.isfinite(value).all() for value in first.values())


def test_seed_does_not_change_the_global_generator() -> None:
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    build("tiny-gpt", seed=5)
    assert torch.equal(torch.rand(1), before)
    a, b = (build("tiny-gpt", seed=seed).decoder.embed.token.weight for seed in (1, 2))
    assert not torch.equal(a, b)


@torch.no_grad()
def test_buffers_survive_dtype_and_device_moves() -> None:
    """RoPE frequencies stay in fp32 and correct after dtype casts, to_empty and the meta device."""
    model = build("tiny-llama", seed=0)
    rope = model.decoder.positions["0"]
    expected = rope.frequency.clone()
    model.to(torch.bfloat16)
    assert rope.frequency.dtype == torch.float32
    model.to(torch.float32)
    assert torch.equal(rope.frequency, expected)
    empty = build("tiny-llama", device="meta").to_empty(device="cpu")
    assert torch.equal(empty.decoder.positions["0"].frequency, expected)
    assert "decoder.positions.0.frequency" not in model.state_dict()


@torch.no_grad()
def test_sinusoidal_positions_are_fp32_and_unbounded() -> None:
    """The buffer is fp32 (some devices have no float64) and equals the fp64 formula rounded, at any position."""
    encoding = SinusoidalPosition(c.SinusoidalPosition(), 16)
    for position in (0, 1, 511, 512, 100_000):
        angle = position * 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
        expected = torch.stack((angle.sin(), angle.cos()), -1).flatten().float()
        assert torch.equal(encoding(torch.tensor([[position]]))[0, 0], expected)
    assert all(buffer.dtype == torch.float32 for buffer in encoding.buffers())
    assert all(buffer.dtype == torch.float32 for buffer in encoding.to(torch.bfloat16).buffers())


def test_tied_weights_survive_moves() -> None:
    model = build("tiny-gpt", device="meta").to_empty(device="cpu").to(torch.float64)
    assert model.head.matrix.weight is model.decoder.embed.token.weight
    seq2seq = build("tiny-t5", seed=0)
    assert seq2seq.encoder.embed.token is seq2seq.decoder.embed.token


def test_marian_sinusoids_are_frozen() -> None:
    config = c.config("opus-mt-en-fr")
    small = config.replace(
        vocab_size=50, encoder=config.encoder.replace(layers=1), decoder=config.decoder.replace(layers=1)
    )
    position = build(small, seed=0).encoder.embed.position
    assert not position.table.requires_grad
    assert torch.allclose(position.table[3, :2], torch.tensor([math.sin(3.0), math.sin(3.0 * 10000 ** (-2 / 512))]))
    assert torch.allclose(position.table[3, 256], torch.tensor(math.cos(3.0)))


def test_loaded_values_survive_moves() -> None:
    """A sinusoid table, and a selection bias of a bf16 model."""
    position = {"kind": "sinusoidal", "table_length": 16}
    stack = {"layers": 1, "block": {"attention": {"heads": 2}}, "embedding": {"position": position}}
    model = build({"form": "decoder", "vocab_size": 5, "d_model": 8, "decoder": stack}, seed=0)
    model.decoder.embed.position.table.data.add_(1.0)
    expected = model.decoder.embed.position.table.clone()
    assert torch.equal(model.double().float().decoder.embed.position.table, expected)
    moe = build("tiny-mla", seed=0)
    router = moe.decoder.blocks[1].ffn.f.router
    router.selection_bias.copy_(torch.linspace(4.0, 4.001, 8))
    expected = router.selection_bias.clone()
    moe.to(torch.bfloat16)
    assert torch.equal(router.selection_bias, expected)
    assert torch.isfinite(moe(torch.zeros(1, 3, dtype=torch.long))).all()
