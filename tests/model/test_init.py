"""Fresh weights are what the table says, the same for the same seed, on whatever road they were made."""

import math

import pytest
import torch

from cutaway import config as c
from cutaway.model import build


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
def test_spread(init: dict, token: float, q: float, o: float, up: float, down: float) -> None:
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


def test_every_parameter_and_buffer_is_set() -> None:
    """Memory that was only allocated would differ between two builds, or hold NaN."""
    for name in (name for name in c.presets() if name.startswith("tiny-")):
        junk = [torch.full((50_000,), float("nan")) for _ in range(40)]
        del junk
        first, second = (build(name, seed=7).state_dict() for _ in range(2))
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert all(torch.isfinite(value).all() for value in first.values())


def test_a_seed_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    build("tiny-gpt", seed=5)
    assert torch.equal(torch.rand(1), before)
    a, b = (build("tiny-gpt", seed=seed).decoder.embed.token.weight for seed in (1, 2))
    assert not torch.equal(a, b)


@torch.no_grad()
def test_constants_survive_every_move() -> None:
    """RoPE's frequencies stay fp32 and right through dtype casts, to_empty and the meta device."""
    model = build("tiny-llama", seed=0)
    rope = model.decoder.positions["0"]
    right = rope.frequency.clone()
    model.to(torch.bfloat16)
    assert rope.frequency.dtype == torch.float32
    model.to(torch.float32)
    assert torch.equal(rope.frequency, right)
    empty = build("tiny-llama", device="meta").to_empty(device="cpu")
    assert torch.equal(empty.decoder.positions["0"].frequency, right)
    assert "decoder.positions.0.frequency" not in model.state_dict()


def test_ties_survive_every_move() -> None:
    model = build("tiny-gpt", device="meta").to_empty(device="cpu").to(torch.float64)
    assert model.head.matrix.weight is model.decoder.embed.token.weight
    seq2seq = build("tiny-t5", seed=0)
    assert seq2seq.encoder.embed.token is seq2seq.decoder.embed.token


def test_marians_frozen_sinusoids() -> None:
    config = c.config("opus-mt-en-fr")
    small = config.replace(
        vocab_size=50, encoder=config.encoder.replace(layers=1), decoder=config.decoder.replace(layers=1)
    )
    position = build(small, seed=0).encoder.embed.position
    assert not position.table.requires_grad
    assert torch.allclose(position.table[3, :2], torch.tensor([math.sin(3.0), math.sin(3.0 * 10000 ** (-2 / 512))]))
    assert torch.allclose(position.table[3, 256], torch.tensor(math.cos(3.0)))


def test_what_is_loaded_is_kept_through_moves() -> None:
    """A loaded sinusoid table, and a selection bias in bf16."""
    position = {"kind": "sinusoidal", "table_length": 16}
    stack = {"layers": 1, "block": {"attention": {"heads": 2}}, "embedding": {"position": position}}
    model = build({"form": "decoder", "vocab_size": 5, "d_model": 8, "decoder": stack}, seed=0)
    model.decoder.embed.position.table.data.add_(1.0)
    kept = model.decoder.embed.position.table.clone()
    assert torch.equal(model.double().float().decoder.embed.position.table, kept)
    moe = build("tiny-mla", seed=0)
    router = moe.decoder.blocks[1].ffn.f.router
    router.selection_bias.copy_(torch.linspace(4.0, 4.001, 8))
    kept = router.selection_bias.clone()
    moe.to(torch.bfloat16)
    assert torch.equal(router.selection_bias, kept)
    assert torch.isfinite(moe(torch.zeros(1, 3, dtype=torch.long))).all()
