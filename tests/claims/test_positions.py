"""Claims on position methods. Each test name begins with the id of the claim."""

import torch
from support.config_strategies import build_randomized_model

import cutaway as ct
from cutaway import config as c
from cutaway.model.masks import number_tokens
from cutaway.model.positions import Alibi, RelativeBias, SinusoidalPosition
from cutaway.model.rope import Rope

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
ORDER = torch.tensor([5, 2, 0, 7, 4, 1, 3, 6])


def build_without_positions(form: str, layers: int = 2) -> ct.Transformer:
    """An encoder or decoder without positions, in fp64."""
    attention = c.MultiHead(heads=2, position=c.NoPosition())
    stack = c.Stack(layers=layers, block=c.Block(attention=attention))
    kind = c.Encoder if form == "encoder" else c.Decoder
    return build_randomized_model(kind(vocab_size=10, d_model=16, **{form: stack}), torch.float64)


def build_with_position(position: c.Rope | c.Alibi) -> ct.Transformer:
    """A decoder of one layer with a position method inside attention, in fp64."""
    stack = c.Stack(layers=1, block=c.Block(attention=c.MultiHead(heads=4, position=position)))
    return build_randomized_model(c.Decoder(vocab_size=10, d_model=32, decoder=stack), torch.float64)


def sinusoids(num_positions: int, d_model: int) -> torch.Tensor:
    return SinusoidalPosition(c.SinusoidalPosition(), d_model).encode(num_positions).double()


@torch.no_grad()
def test_c023_encoder_without_positions_is_equivariant_and_only_its_mean_invariant() -> None:
    model = build_without_positions("encoder")
    out, permuted = model.encode(TOKENS), model.encode(TOKENS[:, ORDER])
    assert (permuted - out[:, ORDER]).abs().max() < 1e-12
    assert (permuted - out).abs().max() > 0.1
    assert (permuted.mean(1) - out.mean(1)).abs().max() < 1e-12


@torch.no_grad()
def test_c024_causal_mask_breaks_permutation_equivariance() -> None:
    """After one causal layer the last position still ignores the order before it; after two layers it does not."""
    swapped = torch.tensor([2, 0, 1, 3, 4, 5, 6, 7])
    last_change = {}
    for layers in (1, 2):
        model = build_without_positions("decoder", layers)
        logits, permuted = model(TOKENS), model(TOKENS[:, swapped])
        assert (permuted - logits[:, swapped]).abs().max() > 0.1
        last_change[layers] = (permuted - logits)[0, -1].abs().max()
    assert last_change[1] < 1e-12
    assert last_change[2] > 1e-3


@torch.no_grad()
def test_c025_reversed_sentence_gives_the_same_set_of_vectors() -> None:
    model = build_without_positions("encoder")
    out, reverse = model.encode(TOKENS)[0], model.encode(TOKENS.flip(-1))[0]
    assert (reverse.flip(0) - out).abs().max() < 1e-12
    with_mask = build_without_positions("decoder").hidden_states
    assert torch.cdist(with_mask(TOKENS)[0], with_mask(TOKENS.flip(-1))[0]).amin(-1).max() > 0.01


def test_c028_sinusoids_have_one_frequency_per_pair() -> None:
    d_model = 64
    table = sinusoids(200, d_model)
    sin, cos = table[:, 0::2], table[:, 1::2]
    assert (sin.square() + cos.square() - 1).abs().max() < 1e-6
    frequency = torch.atan2(sin[1], cos[1])  # the angle of a pair at position 1
    assert (torch.sin(torch.arange(200.0).double()[:, None] * frequency) - sin).abs().max() < 1e-4
    assert len(frequency.unique()) == d_model // 2
    assert (frequency - 10000.0 ** (-torch.arange(0, d_model, 2).double() / d_model)).abs().max() < 1e-6


def test_c029_sinusoidal_vectors_of_5000_positions_are_unique() -> None:
    """The distance of two positions depends on their offset alone; it is smallest between neighbors."""
    table = sinusoids(5000, 512)
    distance = (table - table[0]).norm(dim=-1)
    for start in (1, 17, 2500):
        assert ((table[start:] - table[start]).norm(dim=-1) - distance[: 5000 - start]).abs().max() < 1e-5
    assert distance[1:].argmin() == 0
    assert abs(distance[1:].min().item() - 3.714) < 1e-3


def test_c030_product_of_sinusoids_depends_on_the_offset_alone() -> None:
    """Sinusoids carry relative positions: PE(p)·PE(p + k) = Σ cos(k·frequency), for every p."""
    table = sinusoids(100, 64)
    gram = table @ table.T
    frequency = 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    for offset in range(100):
        expected = torch.cos(offset * frequency).sum()
        assert (gram.diagonal(offset) - expected).abs().max() < 1e-5


@torch.no_grad()
def test_c036_rope_scores_depend_on_the_distance_and_norms_are_kept() -> None:
    rope = Rope(c.Rope(), rotary_dim=16)
    rotate = rope(number_tokens(1, 50, torch.device("cpu")), torch.float64)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).expand(2, 1, 50, 1, 16)
    rotated_q, rotated_k = rotate(q)[0, :, 0], rotate(k)[0, :, 0]
    scores = rotated_q @ rotated_k.T
    for offset in range(-49, 50):
        diagonal = scores.diagonal(offset)
        assert (diagonal - diagonal[0]).abs().max() < 1e-12
    assert scores.std() > 0.1
    assert (rotated_q.norm(dim=-1) - q.norm(dim=-1).view(-1)).abs().max() < 1e-12


@torch.no_grad()
def test_c037_rope_acts_on_q_and_k_only_and_has_no_parameters() -> None:
    model = build_with_position(c.Rope())
    with ct.trace(model, "embed", "attn.*") as t:
        model(TOKENS)
    assert torch.equal(t["embed"], model.decoder.embed.token.weight[TOKENS])
    attention, x = model.decoder.blocks[0].attn.f, t["blocks.0.attn.in"]
    projected = {name: getattr(attention, name)(x).unflatten(-1, (4, 8)) for name in "qkv"}
    rotated = {name for name in "qkv" if (t[f"blocks.0.attn.{name}"] - projected[name]).abs().max() > 1e-6}
    assert rotated == {"q", "k"}
    assert not list(model.decoder.positions["0"].parameters())


@torch.no_grad()
def test_c040_alibi_subtracts_a_fixed_slope_times_the_distance() -> None:
    model = build_with_position(c.Alibi())
    with ct.trace(model, "attn.*") as t:
        model(TOKENS)
    q, k = (t[f"blocks.0.attn.{name}"].transpose(1, 2) for name in "qk")
    place = torch.arange(8.0, dtype=torch.float64)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64).view(4, 1, 1)
    scores = q @ k.mT / 8**0.5 - slopes * (place[:, None] - place).abs()
    visible = torch.ones(8, 8, dtype=torch.bool).tril()
    assert (t["blocks.0.attn.scores"] - scores)[..., visible].abs().max() < 1e-12
    assert not list(Alibi(c.Alibi(), heads=4).parameters())


@torch.no_grad()
def test_c043_relative_bias_is_equal_along_diagonals() -> None:
    for causal in (False, True):
        bias = RelativeBias(c.RelativeBias(), heads=2, causal=causal)
        bias.table.weight.normal_()
        position = torch.arange(200).unsqueeze(0)
        matrix = bias.dense_bias(position, position)[0]
        for offset in range(-199, 200):
            diagonal = matrix.diagonal(offset, 1, 2)
            assert torch.equal(diagonal, diagonal[:, :1].expand_as(diagonal))
        assert len(matrix[0].unique()) > 10
