"""Claims about gradients and Jacobians of norms, sublayers, blocks and stacks, in fp64 against autograd."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from support.config_strategies import build_randomized_model
from torch import Tensor, nn

import cutaway as ct
from cutaway import config as c
from cutaway.model import Transformer
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.attention import LayerContext
from cutaway.model.ffn import build_dense_ffn
from cutaway.model.masks import number_tokens
from cutaway.model.norms import build_norm

SEQ_LEN, D = 3, 6
LAYER_NORM, RMS_NORM = c.LayerNorm(eps=1e-20), c.RMSNorm(eps=1e-20)
PRE, POST = c.PreNorm(), c.PostNorm()


def build_decoder(
    norm: c.Norm = RMS_NORM,
    placement: c.PreNorm | c.PostNorm = PRE,
    layers: int = 1,
    d_model: int = D,
    activation: str = "gelu",
) -> Transformer:
    """Decoder in fp64 with random weights of order 1, gains near 1, two heads and no bias."""
    attention = c.MultiHead(heads=2, position=c.NoPosition())
    block = c.Block(attention=attention, ffn=c.Mlp(hidden=2 * d_model, activation=activation, bias=False))
    stack = c.Stack(layers=layers, block=block, norm=norm, placement=placement)
    return build_randomized_model(c.Decoder(vocab_size=7, d_model=d_model, decoder=stack), torch.float64)


@torch.no_grad()
def build_linear_decoder(norm: c.Norm, placement: c.PreNorm | c.PostNorm, ffn_weights: list[Tensor]) -> Transformer:
    """Decoder whose attention is 0, whose gains are 1 and whose layer l has the FFN x ↦ ffn_weights[l]·x."""
    d_model = len(ffn_weights[0])
    attention = c.MultiHead(heads=1, position=c.NoPosition())
    block = c.Block(attention=attention, ffn=c.Mlp(hidden=d_model, activation="identity", bias=False))
    stack = c.Stack(layers=len(ffn_weights), block=block, norm=norm, placement=placement)
    model = ct.build(c.Decoder(vocab_size=2, d_model=d_model, decoder=stack), dtype=torch.float64, seed=0)
    for layer, weight in zip(model.decoder.blocks, ffn_weights, strict=True):
        layer.attn.f.o.weight.zero_()
        layer.ffn.f.up.weight.copy_(torch.eye(d_model))
        layer.ffn.f.down.weight.copy_(weight)
    return model


def layer_context(model: Transformer, seq_len: int = SEQ_LEN) -> LayerContext:
    positions = number_tokens(1, seq_len, torch.device("cpu"))
    return model.decoder.build_layer_contexts(positions, torch.float64, None, {})[0]


def run_blocks(model: Transformer, x: Tensor) -> Tensor:
    """The residual stream after all blocks, before the final norm."""
    context = layer_context(model, x.shape[1])
    for block in model.decoder.blocks:
        x = block(x, context)
    return x


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Jacobian of the flattened output with respect to the flattened input."""
    return torch.autograd.functional.jacobian(function, x).reshape(-1, x.numel())


def random_stream(d_model: int = D) -> Tensor:
    return torch.randn(1, SEQ_LEN, d_model, dtype=torch.float64)


def identity(x: Tensor) -> Tensor:
    return torch.eye(x.numel(), dtype=x.dtype)


def spectral_norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def layer_norm_of(x: Tensor) -> nn.Module:
    return build_norm(LAYER_NORM, x.shape[-1]).double()


def test_c137_pre_norm_block_jacobian_is_product_of_identity_plus_sublayer() -> None:
    model, x = build_decoder(), random_stream()
    block, context = model.decoder.blocks[0], layer_context(model)
    x2 = x + block.attn(x, context)
    attention = jacobian(lambda h: block.attn.f(h, context), block.attn.norm_in(x)) @ jacobian(block.attn.norm_in, x)
    ffn = jacobian(block.ffn.f, block.ffn.norm_in(x2)) @ jacobian(block.ffn.norm_in, x2)
    expected = (identity(x) + ffn) @ (identity(x) + attention)
    torch.testing.assert_close(jacobian(lambda x: block(x, context), x), expected)


def test_c138_post_norm_jacobian_multiplies_the_skip_path_too() -> None:
    model, x = build_decoder(LAYER_NORM, POST), random_stream()
    block, context = model.decoder.blocks[0], layer_context(model)
    attention, total = jacobian(lambda x: block.attn.f(x, context), x), x + block.attn.f(x, context)
    x2 = block.norm_after_attn(total)
    of_attention = jacobian(block.norm_after_attn, total) @ (identity(x) + attention)
    of_ffn = jacobian(block.norm_after_ffn, x2 + block.ffn.f(x2)) @ (identity(x) + jacobian(block.ffn.f, x2))
    torch.testing.assert_close(jacobian(lambda x: block(x, context), x), of_ffn @ of_attention)


def test_c139_stack_jacobian_expands_to_identity_plus_sum_plus_products() -> None:
    model, x = build_decoder(layers=3), random_stream()
    context, terms, stream = layer_context(model), [], x
    for block in model.decoder.blocks:
        terms.append(jacobian(lambda x, block=block: block(x, context), stream) - identity(x))
        stream = block(stream, context)
    expansion = identity(x) + sum(terms)
    for size in (2, 3):
        for subset in itertools.combinations(terms, size):
            expansion = expansion + torch.linalg.multi_dot(subset[::-1])
    torch.testing.assert_close(jacobian(lambda x: run_blocks(model, x), x), expansion)


def test_c140_layernorm_jacobian_kills_the_mean_and_the_normalized_input() -> None:
    """The formula itself: tests/model/test_worked_examples.py::test_layernorm_jacobian."""
    x, norm = torch.randn(D, dtype=torch.float64), layer_norm_of(torch.empty(D))
    nn.init.normal_(norm.weight)
    of_norm = jacobian(norm, x)
    normalized = (x - x.mean()) / x.std(correction=0)
    assert (of_norm @ torch.ones_like(x)).abs().max() < 1e-14
    assert (of_norm @ normalized).abs().max() < 1e-14
    assert torch.linalg.matrix_rank(of_norm) == D - 2


def test_c141_rmsnorm_jacobian_kills_the_input_only() -> None:
    """The formula itself: tests/model/test_worked_examples.py::test_rmsnorm_jacobian."""
    x, norm = torch.randn(D, dtype=torch.float64), build_norm(RMS_NORM, D).double()
    nn.init.normal_(norm.weight)
    of_norm = jacobian(norm, x)
    assert (of_norm @ x).abs().max() < 1e-14
    assert torch.linalg.matrix_rank(of_norm) == D - 1


def test_c142_layernorm_jacobian_eigenvalues() -> None:
    x, norm = torch.randn(D, dtype=torch.float64), layer_norm_of(torch.empty(D))
    nn.init.constant_(norm.weight, 1.7)
    expected = torch.cat((torch.zeros(2), torch.full((D - 2,), 1.7 / float(x.std(correction=0))))).double()
    torch.testing.assert_close(torch.linalg.eigvalsh(jacobian(norm, x)), expected)
    with_scalar_gain = jacobian(norm, x) / 1.7
    nn.init.normal_(norm.weight)
    torch.testing.assert_close(jacobian(norm, x), norm.weight.diag() @ with_scalar_gain)


@torch.no_grad()
def test_c143_constant_sublayers_give_the_identity_jacobian() -> None:
    config = ct.config("tiny-gpt")
    model = build_randomized_model(config, torch.float64)
    for block in model.decoder.blocks:  # the biases stay, so F is a constant that is not 0
        block.attn.f.o.weight.zero_()
        block.ffn.f.down.weight.zero_()
    x = random_stream(config.d_model)
    assert not torch.equal(run_blocks(model, x), x)
    with torch.enable_grad():
        assert torch.equal(jacobian(lambda x: run_blocks(model, x), x), identity(x))


@pytest.mark.parametrize("cosine", [0.32, 0.0])
def test_c144_two_rmsnorm_blocks_can_have_a_jacobian_norm_below_1(cosine: float) -> None:
    """Block 1 moves x to y and removes the direction orthogonal to x, block 2 that orthogonal to y: |J| = cos(x, y)."""
    x, orthogonal = torch.tensor([[math.sqrt(2), 0.0], [0.0, math.sqrt(2)]], dtype=torch.float64)  # rms 1
    y = cosine * x + math.sqrt(1 - cosine**2) * orthogonal
    y_orthogonal = math.sqrt(1 - cosine**2) * x - cosine * orthogonal
    # J = I + W·(I − x̂x̂ᵀ/2): W maps x to y − x, and the orthogonal direction to its negative.
    first = (torch.outer(y - x, x) - torch.outer(orthogonal, orthogonal)) / 2
    second = -torch.outer(y_orthogonal, y_orthogonal) / 2
    model = build_linear_decoder(RMS_NORM, PRE, [first, second])
    of_stack = jacobian(lambda x: run_blocks(model, x), x.view(1, 1, 2))
    torch.testing.assert_close(run_blocks(model, x.view(1, 1, 2)).view(2), y)
    assert spectral_norm(of_stack) == pytest.approx(cosine, abs=1e-14)
    assert float(torch.linalg.svdvals(of_stack)[-1]) == pytest.approx(0, abs=1e-14)


def test_c145_layernorm_stack_passes_a_shift_unchanged_until_the_final_norm() -> None:
    model, x = build_decoder(LAYER_NORM, layers=3), random_stream()
    shift = torch.randn(1, SEQ_LEN, 1, dtype=torch.float64).expand_as(x)  # c·1, with another c for each token
    out = run_blocks(model, x)
    torch.testing.assert_close(run_blocks(model, x + shift), out + shift)
    of_stack = jacobian(lambda x: run_blocks(model, x), x)
    torch.testing.assert_close(of_stack @ shift.flatten(), shift.flatten())
    assert spectral_norm(of_stack) >= 1
    torch.testing.assert_close(model.decoder.final_norm(out + shift), model.decoder.final_norm(out))


def test_c146_rmsnorm_sublayer_maps_its_input_to_itself() -> None:
    model, x = build_decoder(), random_stream()
    context, block = layer_context(model), model.decoder.blocks[0]
    for sublayer in (lambda x: x + block.attn(x, context), lambda x: x + block.ffn(x)):
        of_sublayer = jacobian(sublayer, x)
        torch.testing.assert_close(of_sublayer @ x.flatten(), x.flatten())
        assert spectral_norm(of_sublayer) >= 1
    of_block = jacobian(lambda x: block(x, context), x)
    assert (of_block @ x.flatten() - x.flatten()).abs().max() > 0.1  # two sublayers do not keep it


def test_c147_layernorm_derivative_is_the_inverse_of_sigma() -> None:
    x = torch.randn(D, dtype=torch.float64)
    x = (x - x.mean()) / x.std(correction=0)
    for sigma in (0.5, 1.0, 4.0):
        assert spectral_norm(jacobian(layer_norm_of(x), sigma * x)) == pytest.approx(1 / sigma)
    # Eight post-norm blocks with F = 0: the norm of the product is 1, so post-norm alone does not make it decay.
    model = build_linear_decoder(LAYER_NORM, POST, [torch.zeros(D, D)] * 8)
    assert spectral_norm(jacobian(lambda x: run_blocks(model, x), x.view(1, 1, D))) == pytest.approx(1)


def test_c148_product_of_norm_jacobians_is_no_bound_for_post_norm() -> None:
    """With F(x) = 3x, |J_LN| is 1/4 in each block; the Jacobian attains |J_LN|·(1 + |J_F|) = 1."""
    x, blocks = torch.randn(1, 1, D, dtype=torch.float64), 6
    x = layer_norm_of(x)(x).detach()
    model = build_linear_decoder(LAYER_NORM, POST, [3 * torch.eye(D)] * blocks)
    of_norm = spectral_norm(jacobian(model.decoder.blocks[0].norm_after_ffn, 4 * x))
    of_stack = spectral_norm(jacobian(lambda x: run_blocks(model, x), x))
    assert of_norm**blocks == pytest.approx(4.0**-blocks)
    assert of_stack == pytest.approx((of_norm * (1 + 3)) ** blocks)
    assert of_stack == pytest.approx(1)


def test_c149_gains_start_at_1_and_sigma_of_an_equal_variance_sum_is_sqrt_2() -> None:
    model = ct.build("tiny-bert", seed=0)
    gains = [p for name, p in model.named_parameters() if "norm" in name and name.endswith("weight")]
    assert all((gain == 1).all() for gain in gains)
    x, update = torch.linalg.qr(torch.cat((torch.ones(D, 1), torch.randn(D, 2)), 1).double()).Q.T[1:] * math.sqrt(D)
    assert [float(h.std(correction=0)) for h in (x, update)] == pytest.approx([1, 1])
    assert float((x + update).std(correction=0)) == pytest.approx(math.sqrt(2))
    assert spectral_norm(jacobian(layer_norm_of(x), x + update)) == pytest.approx(1 / math.sqrt(2))


def test_c152_sublayer_jacobian_shrinks_as_the_stream_grows() -> None:
    model, x = build_decoder(), random_stream()
    block, context = model.decoder.blocks[0], layer_context(model)
    for sublayer in (block.attn.norm_in, lambda x: block.attn(x, context), block.ffn):
        torch.testing.assert_close(jacobian(sublayer, 10 * x), jacobian(sublayer, x) / 10)


def test_c153_doubling_in_post_norm_blocks_does_not_compound() -> None:
    """F(x) = x doubles the stream: |J_LN| is 1/2 in each block, not 1/2, 1/4, …; with 1 + J_F = 2 the product is 1."""
    x = layer_norm_of(torch.empty(D))(torch.randn(1, 1, D, dtype=torch.float64)).detach()
    model = build_linear_decoder(LAYER_NORM, POST, [torch.eye(D)] * 10)
    factors, stream, context = [], x, layer_context(model, 1)
    for block in model.decoder.blocks:
        factors.append(spectral_norm(jacobian(block.norm_after_ffn, 2 * stream)))
        stream = block(stream, context)
    assert factors == pytest.approx([1 / 2] * 10)
    assert math.prod(factors) == pytest.approx(2.0**-10)
    assert math.prod(2.0**-block for block in range(1, 11)) == 2.0**-55
    assert spectral_norm(jacobian(lambda x: run_blocks(model, x), x)) == pytest.approx(1)


@pytest.mark.parametrize("layers", [1, 12])
def test_c154_identity_path_has_gain_1(layers: int) -> None:
    """The part of the gradient that passes all sublayers by is the upstream gradient, at any depth."""
    model, x = build_decoder(layers=layers), random_stream().requires_grad_()
    upstream = torch.randn_like(x)
    context, stream = layer_context(model), x
    for block in model.decoder.blocks:
        stream = stream + block.attn(stream.detach(), context)
        stream = stream + block.ffn(stream.detach())
    assert torch.equal(torch.autograd.grad(stream, x, upstream)[0], upstream)


def test_c155_skip_path_is_unattenuated_in_pre_norm_only() -> None:
    x, upstream = random_stream().requires_grad_(), random_stream()
    zero = [torch.zeros(D, D)] * 4
    (pre,), (post,) = (
        torch.autograd.grad(run_blocks(build_linear_decoder(LAYER_NORM, placement, zero), x), x, upstream)
        for placement in (PRE, POST)
    )
    assert torch.equal(pre, upstream)
    assert post.sum(-1).abs().max() < 1e-12  # each norm removes the mean and the direction of x
    assert (post * x).sum(-1).abs().max() < 1e-12
    centered = x - x.mean(-1, keepdim=True)
    assert (post.norm(dim=-1) <= upstream.norm(dim=-1) / centered.square().mean(-1).sqrt()).all()


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_c156_ffn_jacobian(activation: str) -> None:
    ffn = build_dense_ffn(c.Mlp(hidden=9, activation=activation), D).double()
    for parameter in ffn.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(D, dtype=torch.float64)
    slope = jacobian(ACTIVATIONS[activation], ffn.up(x)).diag()
    torch.testing.assert_close(jacobian(ffn, x), ffn.down.weight @ slope.diag() @ ffn.up.weight)


def test_c157_activation_slopes() -> None:
    """GELU' is extreme at x = ±√2, where GELU'' = φ(x)·(2 − x²) is 0; SiLU' at x = ±2.3994."""
    x = torch.linspace(-8, 8, 160_001, dtype=torch.float64, requires_grad=True)
    slopes = {name: torch.autograd.grad(ACTIVATIONS[name](x).sum(), x)[0] for name in ("relu", "gelu", "silu")}
    assert set(slopes["relu"].tolist()) == {0.0, 1.0}
    gelu_max = 0.5 * (1 + math.erf(1)) + math.exp(-1) / math.sqrt(math.pi)  # Φ(√2) + √2·φ(√2)
    ranges = {name: (float(slope.min()), float(slope.max())) for name, slope in slopes.items()}
    assert ranges["gelu"] == pytest.approx((1 - gelu_max, gelu_max), abs=1e-8)
    assert ranges["gelu"] == pytest.approx((-0.129, 1.129), abs=5e-4)
    assert ranges["silu"] == pytest.approx((-0.0998, 1.0998), abs=5e-5)


def test_c159_softmax_jacobian_and_query_gradient_vanish_as_a_row_saturates() -> None:
    scores = torch.randn(5, dtype=torch.float64)
    p = scores.softmax(-1)
    torch.testing.assert_close(jacobian(lambda s: s.softmax(-1), scores), p.diag() - torch.outer(p, p))
    model, x, norms = build_decoder(), random_stream(), []
    query, context = model.decoder.blocks[0].attn.f.q.weight, layer_context(model)
    original = query.detach().clone()
    for scale in (1, 10, 100, 1000):
        query.data.copy_(scale * original)
        (grad,) = torch.autograd.grad(model.decoder.blocks[0].attn(x, context).square().sum(), query)
        norms.append(float(grad.norm()))
    assert norms[0] > 1e-2
    assert norms[1] > norms[2] > norms[3]
    assert norms[3] < 1e-9 * norms[0]


def test_c161_gradient_of_a_pre_norm_sublayer_has_two_terms() -> None:
    model, x = build_decoder(), random_stream().requires_grad_()
    block, context = model.decoder.blocks[0], layer_context(model)
    x2 = x + block.attn(x, context)
    loss = (x2 + block.ffn(x2)).square().sum()
    of_x, of_x2 = torch.autograd.grad(loss, (x, x2))
    attention = jacobian(lambda h: block.attn.f(h, context), block.attn.norm_in(x).detach())
    through_attention = of_x2.flatten() @ attention @ jacobian(block.attn.norm_in, x.detach())
    torch.testing.assert_close(of_x, of_x2 + through_attention.view_as(x))


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_c162_ffn_weight_gradients(activation: str) -> None:
    """∂L/∂W₁ = Σ_t (W₂ᵀ·∂L/∂x4 ⊙ act′)·x3ᵀ and ∂L/∂W₂ = Σ_t ∂L/∂x4·hiddenᵀ; the W₂ᵀ step must not be left out."""
    ffn = build_decoder(activation=activation).decoder.blocks[0].ffn.f
    x3, upstream = random_stream()[0], random_stream()[0]  # (T, d): rows are tokens
    of_w1, of_w2 = torch.autograd.grad(ffn(x3), (ffn.up.weight, ffn.down.weight), upstream)
    pre_activation = ffn.up(x3)
    slope = torch.func.vmap(torch.func.vmap(torch.func.grad(ACTIVATIONS[activation])))(pre_activation)
    torch.testing.assert_close(of_w2, upstream.T @ ACTIVATIONS[activation](pre_activation))
    torch.testing.assert_close(of_w1, (upstream @ ffn.down.weight * slope).T @ x3)


def test_c163_gain_gradient_sums_over_batch_and_positions() -> None:
    x, upstream = torch.randn(2, 4, 5, D, dtype=torch.float64)[:, :, :3]
    for norm, normalized in (
        (build_norm(RMS_NORM, D).double(), x / x.square().mean(-1, keepdim=True).sqrt()),
        (layer_norm_of(x), (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)),
    ):
        (of_gain,) = torch.autograd.grad(norm(x), norm.weight, upstream)
        torch.testing.assert_close(of_gain, (upstream * normalized).sum((0, 1)))


def rms_backward(grad: Tensor, x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm with respect to its input and its gain."""
    rms = x.square().mean(-1, keepdim=True).sqrt()
    of_normalized = grad * gain
    of_x = (of_normalized - x * (of_normalized * x).mean(-1, keepdim=True) / rms.square()) / rms
    return of_x, (grad * x / rms).sum(0)


def test_c164_all_weight_gradients_of_a_block_by_hand() -> None:
    model = build_decoder(activation="relu")
    block, context, (x, upstream) = model.decoder.blocks[0], layer_context(model), torch.randn(2, SEQ_LEN, D).double()
    attn, ffn, gain1, gain2 = block.attn.f, block.ffn.f, block.attn.norm_in.weight, block.ffn.norm_in.weight
    weights = [attn.q.weight, attn.k.weight, attn.v.weight, attn.o.weight, ffn.up.weight, ffn.down.weight, gain1, gain2]
    by_autograd = torch.autograd.grad(block(x[None], context)[0], weights, upstream)
    wq, wk, wv, wo, w1, w2, _, _ = weights

    def split(h: Tensor) -> Tensor:
        return h.view(SEQ_LEN, 2, D // 2).transpose(0, 1)  # (heads, T, d_head)

    def merge(h: Tensor) -> Tensor:
        return h.transpose(0, 1).reshape(SEQ_LEN, D)

    x1, scale = block.attn.norm_in(x), (D // 2) ** -0.5
    q, k, v = (split(x1 @ w.T) for w in (wq, wk, wv))
    future = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu(1)
    pattern = (q @ k.mT * scale).masked_fill(future, -torch.inf).softmax(-1)
    z = merge(pattern @ v)
    x2 = x + z @ wo.T
    x3 = block.ffn.norm_in(x2)
    hidden = (x3 @ w1.T).relu()
    d_hidden = (upstream @ w2) * (hidden > 0)
    d_x2, d_gain2 = rms_backward(d_hidden @ w1, x2, gain2)
    d_x2 = upstream + d_x2
    d_z = split(d_x2 @ wo)
    d_pattern = d_z @ v.mT
    d_scores = pattern * (d_pattern - (d_pattern * pattern).sum(-1, keepdim=True)) * scale
    d_q, d_k, d_v = merge(d_scores @ k), merge(d_scores.mT @ q), merge(pattern.mT @ d_z)
    _, d_gain1 = rms_backward(d_q @ wq + d_k @ wk + d_v @ wv, x, gain1)
    by_hand = [d_q.T @ x1, d_k.T @ x1, d_v.T @ x1, d_x2.T @ z, d_hidden.T @ x3, upstream.T @ hidden, d_gain1, d_gain2]
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(by_autograd, by_hand, strict=True))
