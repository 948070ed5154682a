"""Claims on attention. Each test name begins with the id of the claim."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.config_strategies import build_randomized_model
from torch import nn

import cutaway as ct
from cutaway import config as c
from cutaway.errors import ConfigError
from cutaway.lens import sites
from cutaway.model.attention import LayerContext, MultiHead
from cutaway.model.masks import number_tokens, self_attention_mask

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])


def build_double(name: str) -> ct.Transformer:
    """A tiny preset in fp64, in which every parameter affects the output."""
    return build_randomized_model(ct.config(name), torch.float64)


def build_attention(heads: int = 4, d_model: int = 32, **options: object) -> tuple[MultiHead, LayerContext]:
    """An attention module in fp64 with random weights, and its context for 9 tokens without mask and positions."""
    attention = MultiHead(c.MultiHead(heads=heads, position=c.NoPosition(), **options), d_model).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=d_model**-0.5)
    positions = number_tokens(1, 9, torch.device("cpu"))
    mask_spec = self_attention_mask(positions, positions, is_causal=False)
    return attention, LayerContext(attention.kernel.prepare_mask(mask_spec, None, torch.float64), None)


@pytest.mark.parametrize("kernel", ["sdpa", "explicit"])
@torch.no_grad()
def test_c048_attention_equation(kernel: str) -> None:
    model = build_double("tiny-gpt").use_kernel(kernel)
    with ct.trace(model, "blocks.0.attn.*") as t:
        model(TOKENS)
    attention, x = model.decoder.blocks[0].attn.f, t["blocks.0.attn.in"][0]
    future = torch.ones(9, 9).triu(1).bool()
    for head in range(4):
        part = slice(8 * head, 8 * head + 8)
        q, k, v = (F.linear(x, w.weight[part], w.bias[part]) for w in (attention.q, attention.k, attention.v))
        scores = (q @ k.T / math.sqrt(8)).masked_fill(future, -math.inf)
        assert (scores.softmax(-1) @ v - t["blocks.0.attn.z"][0, :, head]).abs().max() < 1e-12


@torch.no_grad()
def test_c049_q_and_k_set_the_weights_and_v_the_content() -> None:
    model = build_double("tiny-gpt")

    def run(edits: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
        with ct.edit(model, edits), ct.trace(model, "blocks.0.attn.pattern", "blocks.0.attn.z") as t:
            model(TOKENS)
        return t["blocks.0.attn.pattern"], t["blocks.0.attn.z"]

    doubled = {name: run({f"blocks.0.attn.{name}": {"do": "scale", "value": 2.0}}) for name in "qkv"}
    pattern, z = run({"blocks.0.attn.z": {"do": "scale", "value": 1.0}})
    assert torch.equal(doubled["v"][0], pattern)
    assert (doubled["v"][1] - 2 * z).abs().max() < 1e-12
    assert all((doubled[name][0] - pattern).abs().max() > 0.01 for name in "qk")


@torch.no_grad()
def test_c050_output_rows_are_convex_combinations_of_value_rows() -> None:
    model = build_double("tiny-gpt").use_kernel("explicit")
    with ct.trace(model, "blocks.0.attn.*") as t:
        model(TOKENS)
    pattern, z = t["blocks.0.attn.pattern"], t["blocks.0.attn.z"].transpose(1, 2)
    v = t["blocks.0.attn.v"].transpose(1, 2)
    assert (pattern >= 0).all()
    assert (pattern.sum(-1) - 1).abs().max() < 1e-12
    assert (pattern @ v - z).abs().max() < 1e-12
    assert (z <= v.amax(-2, keepdim=True) + 1e-12).all()
    assert (z >= v.amin(-2, keepdim=True) - 1e-12).all()


@pytest.mark.parametrize("d_head", [1, 2, 4, 8])
def test_c051_dot_product_variance_is_d_head(d_head: int) -> None:
    """Exact, over all vectors with entries ±1, which are independent with mean 0 and variance 1."""
    vectors = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * d_head).view(-1, d_head)
    products = vectors @ vectors.T
    assert products.numel() == 4**d_head
    assert products.mean() == 0
    assert products.var(correction=0) == d_head


def test_c052_dot_product_of_64_terms_has_standard_deviation_8() -> None:
    """The sum of 64 independent terms ±1 has a binomial distribution, so its variance is an exact integer."""
    total = sum(math.comb(64, plus) * (2 * plus - 64) ** 2 for plus in range(65))
    assert total == 64 * 2**64
    assert math.sqrt(total / 2**64) == 8
    scale = ct.build("gpt2", device="meta").decoder.blocks[0].attn.f.kernel.scale
    assert scale * 8 == 1


@torch.no_grad()
def test_c054_scores_of_a_trained_model_do_not_have_unit_variance() -> None:
    """1/sqrt(d_head) gives unit variance for random q and k. In trained heads, scores have a std of up to 3.3."""
    checkpoint = ct.load("tiny-python", dtype=torch.float64)
    model, text = checkpoint.model, "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, i))\n"
    with ct.trace(model, "attn.scores") as t:
        model(torch.tensor([checkpoint.tokenizer.encode(text)]))
    std = torch.stack([t[site][0][:, t[site][0, 0].isfinite()].std(-1) for site in t])
    assert std.shape == (6, 8)
    assert (std[-1] > 1.5).all()
    assert std.max() > 3
    assert std.max() / std.min() > 4


def test_c055_head_width_is_d_model_over_heads() -> None:
    """A number of heads that does not divide d_model needs an explicit d_head, as in Gemma 7B."""
    assert ct.config("gpt2").decoder.block[0].attention.head_dim(768) == 64
    assert ct.config("transformer-base").encoder.block[0].attention.head_dim(512) == 64
    with pytest.raises(ConfigError, match="5 heads do not divide d_model 768"):
        ct.config(ct.config("gpt2").model_dump() | {"decoder": {"layers": 1, "block": {"attention": {"heads": 5}}}})
    gemma = ct.config("gemma-7b")
    attention = gemma.decoder.block[0].attention
    assert attention.heads * attention.head_dim(gemma.d_model) == 4096 != gemma.d_model


@torch.no_grad()
def test_c056_heads_are_split_before_the_transpose() -> None:
    """view(B, T, h, d_k) and transpose gives head h the projection of its own rows; view(B, h, T, d_k) mixes tokens."""
    attention, context = build_attention()
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    q, k, v = (projection(x) for projection in (attention.q, attention.k, attention.v))
    by_head = q.view(1, 9, 4, 8).transpose(1, 2)
    for head in range(4):
        assert (by_head[0, head] - x[0] @ attention.q.weight[8 * head : 8 * head + 8].T).abs().max() < 1e-12
    right, wrong = (
        F.scaled_dot_product_attention(*map(split, (q, k, v))).transpose(1, 2).reshape(1, 9, 32)
        for split in (lambda y: y.view(1, 9, 4, 8).transpose(1, 2), lambda y: y.view(1, 4, 9, 8))
    )
    assert (attention.o(right) - attention(x, context)).abs().max() < 1e-12
    assert (attention.o(wrong) - attention(x, context)).abs().max() > 0.01


@torch.no_grad()
def test_c057_output_projection_is_a_sum_over_heads() -> None:
    model = build_double("tiny-gpt")
    with ct.trace(model, "blocks.0.attn.z", "blocks.0.attn.out") as t:
        model(TOKENS)
    o = model.decoder.blocks[0].attn.f.o
    contributions = [t["blocks.0.attn.z"][:, :, head] @ o.weight[:, 8 * head : 8 * head + 8].T for head in range(4)]
    assert (sum(contributions) + o.bias - t["blocks.0.attn.out"]).abs().max() < 1e-12


def test_c058_heads_have_equal_flops_and_h_score_matrices() -> None:
    gpt2 = ct.config("gpt2")
    one_head = gpt2.replace({"decoder.block.attention.heads": 1})
    assert ct.size(one_head, context=128).forward_flops.full == ct.size(gpt2, context=128).forward_flops.full
    sizes = [
        math.prod(sites(ct.build(config, device="meta"))["blocks.0.attn.scores"].shape(1, 128))
        for config in (one_head, gpt2)
    ]
    assert sizes == [128**2, 12 * 128**2]


def test_c059_one_head_can_split_its_weight_but_averages_the_values() -> None:
    """Swapping the two targets changes nothing in one head with weights (0.5, 0.5), and does in two heads."""
    weights = torch.tensor([3.0, 3.0, -math.inf]).softmax(-1)
    assert weights.tolist() == [0.5, 0.5, 0.0]
    values = torch.randn(3, 4, dtype=torch.float64)
    swapped = values[[1, 0, 2]]
    assert torch.equal(weights.double() @ values, weights.double() @ swapped)
    one_hot = torch.eye(3, dtype=torch.float64)[:2]  # head 0 attends to target 0, head 1 to target 1
    w_v = torch.randn(2, 4, 2, dtype=torch.float64)
    two_heads, after_swap = ((one_hot.unsqueeze(1) @ (x @ w_v)).flatten() for x in (values, swapped))
    assert (two_heads - after_swap).abs().min() > 1e-3


@torch.no_grad()
def test_c060_position_5_attends_to_8_only_without_a_causal_mask() -> None:
    weights = {}
    for name in ("tiny-gpt", "tiny-bert"):
        model = build_double(name)
        with ct.trace(model, "attn.pattern") as t:
            model(TOKENS)
        weights[name] = torch.stack([t[site][0, :, 5, [2, 8]] for site in t])  # (layer, head, key)
    assert (weights["tiny-gpt"][..., 0] > 0).all()
    assert (weights["tiny-gpt"][..., 1] == 0).all()
    assert (weights["tiny-bert"] > 0).all()


@torch.no_grad()
def test_c061_builtin_multi_head_attention_is_equal() -> None:
    attention, context = build_attention(bias=("q", "k", "v", "o"))
    builtin = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    projections = (attention.q, attention.k, attention.v)
    builtin.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
    builtin.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
    builtin.out_proj.load_state_dict(attention.o.state_dict())
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    for need_weights in (False, True):
        assert (builtin(x, x, x, need_weights=need_weights)[0] - attention(x, context)).abs().max() < 1e-12


@torch.no_grad()
def test_c063_gqa_contains_mha_and_mqa() -> None:
    kv_widths = {}
    for kv_heads in (None, 4, 2, 1):
        attention, context = build_attention(kv_heads=kv_heads)
        kv_widths[kv_heads] = attention.k.weight.shape[0]
        x = torch.randn(1, 9, 32, dtype=torch.float64)
        q, k, v = attention.project_qkv(x)
        shared_k, shared_v = (y.repeat_interleave(4 // attention.kv_heads, dim=2).transpose(1, 2) for y in (k, v))
        z = F.scaled_dot_product_attention(q.transpose(1, 2), shared_k, shared_v).transpose(1, 2).flatten(2)
        assert (attention.o(z) - attention(x, context)).abs().max() < 1e-12
    assert kv_widths == {None: 32, 4: 32, 2: 16, 1: 8}


@torch.no_grad()
def test_c064_score_matrix_grows_with_the_square_of_the_length() -> None:
    model = ct.build("tiny-llama", seed=0)
    for length in (64, 128):
        with ct.trace(model, "blocks.0.attn.scores", heads=0) as t:
            model(torch.zeros(1, length, dtype=torch.long))
        assert t["blocks.0.attn.scores"].shape == (1, 1, length, length)
    site = sites(model)["blocks.0.attn.scores"]
    assert math.prod(site.shape(1, 256)) == 4 * math.prod(site.shape(1, 128))


@torch.no_grad()
def test_c065_cross_attention_reads_queries_from_the_decoder_and_keys_from_the_encoder() -> None:
    model = build_double("tiny-t5")

    def run(source: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        with ct.trace(model, "decoder.blocks.0.cross.*") as t:
            model(source, target)
        return {name: t[f"decoder.blocks.0.cross.{name}"] for name in ("q", "k", "v", "scores")}

    source, target = TOKENS, TOKENS[:, :4] + 20
    before, other_source, other_target = run(source, target), run(source + 1, target), run(source, target + 1)
    assert before["scores"].shape[-2:] == (4, 9)
    assert {name for name in "qkv" if not torch.equal(other_source[name], before[name])} == {"k", "v"}
    assert {name for name in "qkv" if not torch.equal(other_target[name], before[name])} == {"q"}


def test_c066_tiled_attention_is_exact_without_the_score_matrix() -> None:
    """Online softmax over tiles of 16 keys, with a running maximum, normalizer and output."""
    q, k, v = torch.randn(3, 64, 8, dtype=torch.float64)
    maximum, normalizer, out = torch.full((64, 1), -math.inf).double(), 0.0, 0.0
    for k_tile, v_tile in zip(k.split(16), v.split(16), strict=True):
        scores = q @ k_tile.T / math.sqrt(8)
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        rescale, weights = (maximum - new_maximum).exp(), (scores - new_maximum).exp()
        normalizer = normalizer * rescale + weights.sum(-1, keepdim=True)
        out, maximum = out * rescale + weights @ v_tile, new_maximum
    expected = (q @ k.T / math.sqrt(8)).softmax(-1) @ v
    assert (out / normalizer - expected).abs().max() < 1e-13
    assert (F.scaled_dot_product_attention(*(x.view(1, 1, 64, 8) for x in (q, k, v))) - expected).abs().max() < 1e-13


@torch.no_grad()
def test_c067_attention_is_linear_in_v_and_not_in_x() -> None:
    attention, context = build_attention()
    x, y = torch.randn(2, 1, 9, 32, dtype=torch.float64)
    q, k, _ = attention.project_qkv(x)
    u, v = torch.randn(2, 1, 9, 4, 8, dtype=torch.float64)
    attend = lambda value: attention.kernel(q, k, value, context.prepared_mask)  # noqa: E731
    assert (attend(2 * u - 3 * v) - (2 * attend(u) - 3 * attend(v))).abs().max() < 1e-12
    assert (attention(x + y, context) - attention(x, context) - attention(y, context)).abs().max() > 0.01
