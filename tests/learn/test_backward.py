"""The backward pass by hand equals autograd in fp64, for every parameter and for the input."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutaway as ct
from cutaway.errors import InputError
from cutaway.learn import backward
from cutaway.learn.backward import Gradients, block_backward, build_layer_contexts, model_backward
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.transformer import Transformer

pytestmark = pytest.mark.unchecked
TOLERANCE = 1e-10
D_MODEL, HEADS, VOCAB_SIZE = 8, 4, 11
KV_HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}
ROPE, NO_POSITION = {"kind": "rope"}, {"kind": "none"}
RMS_NORM: dict[str, Any] = {"kind": "rmsnorm"}


def build_model(
    *,
    layers: int = 1,
    ffn: dict[str, Any] | None = None,
    norm: dict[str, Any] = RMS_NORM,
    bias: bool = False,
    kv_heads: int = HEADS,
    placement: dict[str, Any] | None = None,
    position: dict[str, Any] = ROPE,
    form: str = "decoder",
    attention: dict[str, Any] | None = None,
    head: dict[str, Any] | None = None,
    **stack: Any,
) -> Transformer:
    """Build a small fp64 model and set every parameter, including gains and biases, to random values."""
    projections = ["q", "k", "v", "o"] if bias else []
    attention = {"heads": HEADS, "kv_heads": kv_heads, "bias": projections, "position": position} | (attention or {})
    block = {"attention": attention, "ffn": {"hidden": 12, "bias": bias} | (ffn or {})}
    stack = {"layers": layers, "block": block, "norm": norm, "placement": placement or {"kind": "pre"}} | stack
    config = {"form": form, "vocab_size": VOCAB_SIZE, "d_model": D_MODEL, "head": head or {"kind": "lm"}, form: stack}
    model = ct.build(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.7, generator=generator)
    return model


def random_tokens(seq_len: int = 5) -> Tensor:
    return torch.randint(VOCAB_SIZE, (2, seq_len), generator=torch.Generator().manual_seed(2))


def block_gradients(model: Transformer) -> tuple[Gradients, Gradients]:
    """Gradients of the first block for a random input and output gradient: by hand and by autograd."""
    [stack] = model.stacks.values()
    block, context = stack.blocks[0], build_layer_contexts(stack, random_tokens())[0]
    generator = torch.Generator().manual_seed(3)
    x, grad = torch.randn(2, 2, 5, D_MODEL, dtype=torch.float64, generator=generator)
    x.requires_grad_()
    names = [name for name, _ in block.named_parameters()]
    expected = torch.autograd.grad(block(x, context), [x, *block.parameters()], grad)
    grad_x, grads = block_backward(grad, x, block, context)
    return {"x": grad_x} | grads, dict(zip(["x", *names], expected, strict=True))


def model_gradients(model: Transformer) -> tuple[Gradients, Gradients]:
    """Gradients of the mean cross-entropy: by hand and by autograd."""
    tokens = random_tokens(6)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    by_hand = model_backward(model, inputs, targets)
    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    return by_hand, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(by_hand: Gradients, expected: Gradients, zero: tuple[str, ...] = ()) -> None:
    """All gradients agree, and none is zero by accident: only those whose name contains a string in `zero`."""
    assert by_hand.keys() == expected.keys()
    for name, gradient in expected.items():
        assert not by_hand[name].requires_grad
        assert (by_hand[name] - gradient).abs().max() <= TOLERANCE, name
        assert (gradient.abs().max() > 1e-3) != any(part in name for part in zero), name


@cache
def build_cached_model(kind: str, norm: str, placement: str, kv_heads: int, bias: bool) -> Transformer:
    norm_config = {"kind": norm} | ({"bias": bias} if norm == "layernorm" else {})
    return build_model(
        ffn={"kind": kind}, norm=norm_config, bias=bias, kv_heads=kv_heads, placement={"kind": placement}
    )


@pytest.mark.sample(20)
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("kind", ["mlp", "gated"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_block_gradients_equal_autograd(activation: str, kind: str, norm: str, placement: str) -> None:
    """Every parameter and the input, each with MHA, GQA and MQA, with and without biases."""
    for kv_heads, bias in product(KV_HEADS.values(), (False, True)):
        model = build_cached_model(kind, norm, placement, kv_heads, bias)
        model.stacks["decoder"].blocks[0].ffn.f.act = ACTIVATIONS[activation]
        by_hand, expected = block_gradients(model)
        num_layers = 4 + {"mlp": 2, "gated": 3}[kind]
        num_norm_parameters = 2 * (1 + (bias and norm == "layernorm"))
        assert len(by_hand) == 1 + num_layers * (1 + bias) + num_norm_parameters
        assert_equal_gradients(by_hand, expected)


@pytest.mark.parametrize("kind", ["mlp", "gated"])
def test_built_ffn_has_the_configured_activation(kind: str) -> None:
    for name, activation in ACTIVATIONS.items():
        model = build_model(ffn={"kind": kind, "activation": name})
        assert model.stacks["decoder"].blocks[0].ffn.f.act is activation


@pytest.mark.parametrize("form", ["decoder", "encoder"])
@pytest.mark.parametrize(
    ("position", "zero"),
    [
        # Without RoPE, a bias on the keys adds the same number to all scores of a query, which softmax ignores.
        (NO_POSITION, ("k.bias",)),
        ({"kind": "alibi"}, ("k.bias",)),
        (ROPE, ()),
        ({"kind": "rope", "layout": "interleaved"}, ()),
        ({"kind": "rope", "scaling": {"kind": "yarn", "factor": 4.0, "original_length": 8}}, ()),
    ],
    ids=["none", "alibi", "rope", "interleaved", "yarn"],
)
@pytest.mark.parametrize("kernel", ["sdpa", "explicit"])
def test_masks_positions_and_kernels(form: str, position: dict[str, Any], zero: tuple[str, ...], kernel: str) -> None:
    model = build_model(form=form, position=position, bias=True, kv_heads=2).use_kernel(kernel)
    assert_equal_gradients(*block_gradients(model), zero)


@pytest.mark.parametrize(
    "options",
    [
        {"placement": {"kind": "sandwich"}},
        {"placement": {"kind": "output"}},
        {"placement": {"kind": "parallel", "norms": "one"}},
        {"placement": {"kind": "parallel", "norms": "two"}},
        {"placement": {"kind": "post", "skip_scale": 1.5}},
        {"norm": {"kind": "rmsnorm", "unit_offset": True}},
        {"norm": {"kind": "layernorm", "gain": False}},
        {"norm": {"kind": "none"}},
        {"residual_scale": 0.3},
        {"attention": {"window": 2}},
        {"attention": {"d_head": 6, "scale": 0.2}},
        {"attention": {"bias": ["q", "v"]}},
    ],
    ids=str,
)
def test_other_options_of_a_block(options: dict[str, Any]) -> None:
    assert_equal_gradients(*block_gradients(build_model(kv_heads=2, **options)))


def test_padded_rows_have_no_gradient() -> None:
    model = build_model()
    [stack] = model.stacks.values()
    mask = torch.tensor([[False, False, True, True, True], [True] * 5])
    positions = ct.model.masks.number_tokens(2, 5, torch.device("cpu"), mask)
    [context] = stack.build_layer_contexts(positions, torch.float64, None, {})
    attention = stack.blocks[0].attn.f
    x = torch.randn(2, 5, D_MODEL, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    expected = torch.autograd.grad(attention(x, context), [x, *attention.parameters()], grad)
    grad_x, grads = backward.attention_backward(grad, x, attention, context)
    assert (grad_x - expected[0]).abs().max() <= TOLERANCE
    assert grad_x[0, :2].abs().max() == 0
    for (name, _), gradient in zip(attention.named_parameters(), expected[1:], strict=True):
        assert (grads[name] - gradient).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize("form", ["decoder", "encoder"])
@pytest.mark.parametrize(
    "options",
    [
        {"head": {"kind": "lm", "tied": True}},
        {"head": {"kind": "lm", "tied": False}},
        {"head": {"kind": "lm", "bias": "learned", "scale": 0.5}},
        {"embedding": {"scale": "sqrt_d_model", "position": {"kind": "learned", "length": 9}}, "position": NO_POSITION},
        {"embedding": {"position": {"kind": "sinusoidal"}}, "position": NO_POSITION, "placement": {"kind": "post"}},
        {"layer_groups": 1},
        {"norm": {"kind": "layernorm"}, "bias": True, "ffn": {"kind": "mlp"}},
    ],
    ids=["tied", "untied", "bias and scale", "learned", "sinusoidal", "shared blocks", "gpt"],
)
def test_model_gradients_equal_autograd(form: str, options: dict[str, Any]) -> None:
    model = build_model(form=form, layers=2, kv_heads=2, **options)
    assert_equal_gradients(*model_gradients(model))


def test_tied_matrix_has_the_sum_of_two_gradients() -> None:
    tied = build_model(layers=2, head={"kind": "lm", "tied": True})
    untied = build_model(layers=2, head={"kind": "lm", "tied": False})
    state = tied.state_dict()
    untied.load_state_dict(state | {"head.matrix.weight": state["decoder.embed.token.weight"]})
    tokens = random_tokens()
    both, separate = (model_backward(model, tokens, tokens.roll(1, 1)) for model in (tied, untied))
    table, matrix = separate["decoder.embed.token.weight"], separate["head.matrix.weight"]
    assert (both["decoder.embed.token.weight"] - (table + matrix)).abs().max() <= TOLERANCE
    unused = [row for row in range(VOCAB_SIZE) if row not in tokens]
    assert unused
    assert table[unused].abs().max() == 0
    assert matrix.abs().amax(1).min() > 1e-6


def test_grouped_query_gradient_is_the_sum_over_the_group() -> None:
    """A GQA model equals an MHA model whose key and value heads are repeated; their gradients add up."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 5, 4, 3, dtype=torch.float64, generator=generator)
    k, v = k[:, :, :2], v[:, :, :2]
    repeated_k, repeated_v = (x.repeat_interleave(2, 2) for x in (k, v))
    pattern = torch.einsum("bthd,bshd->bhts", q, repeated_k).softmax(-1)
    grads = backward.scaled_dot_product_attention_backward(grad, q, k, v, pattern, 1.0)
    separate = backward.scaled_dot_product_attention_backward(grad, q, repeated_k, repeated_v, pattern, 1.0)
    assert torch.equal(grads[0], separate[0])
    for grouped, repeated in zip(grads[1:], separate[1:], strict=True):
        assert grouped.shape == (1, 5, 2, 3)
        assert torch.equal(grouped, repeated[:, :, 0::2] + repeated[:, :, 1::2])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_slopes_equal_autograd(name: str) -> None:
    """On a grid with kinks, thresholds and tails."""
    x = torch.cat([torch.linspace(-30, 30, 6001, dtype=torch.float64), torch.tensor([-3.0, 0.0, 3.0, 6.0, 10.0, 20.0])])
    x.requires_grad_()
    [expected] = torch.autograd.grad(ACTIVATIONS[name](x).sum(), x)
    assert (backward.activation_slope(ACTIVATIONS[name], x) - expected).abs().max() <= TOLERANCE


def test_every_activation_has_a_slope() -> None:
    assert backward.ACTIVATION_SLOPES.keys() == ACTIVATIONS.keys()


def jacobian_product(function: Callable[..., Tensor], grad: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the arguments by autograd."""
    args = tuple(arg.detach().requires_grad_() for arg in args)
    return torch.autograd.grad(function(*args), args, grad)


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)], ids=str)
def test_operations_on_any_number_of_leading_axes(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
    gain, bias = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    weight, grad_out = torch.randn(4, 6, dtype=torch.float64), torch.randn(*shape[:-1], 4, dtype=torch.float64)
    pairs = [
        ((backward.softmax_backward(grad, x.softmax(-1)),), jacobian_product(lambda x: x.softmax(-1), grad, x)),
        (
            backward.linear_backward(grad_out, x, weight),
            jacobian_product(F.linear, grad_out, x, weight, torch.zeros(4, dtype=torch.float64)),
        ),
        (
            backward.layernorm_backward(grad, x, gain, 0.1),
            jacobian_product(lambda *args: F.layer_norm(args[0], (6,), *args[1:], eps=0.1), grad, x, gain, bias),
        ),
        (
            backward.rmsnorm_backward(grad, x, gain, 0.1),
            jacobian_product(lambda x, gain: F.rms_norm(x, (6,), gain, eps=0.1), grad, x, gain),
        ),
    ]
    for by_hand, expected in pairs:
        for one, other in zip(by_hand, expected, strict=True):
            assert one.shape == other.shape
            assert (one - other).abs().max() <= TOLERANCE


def test_repeated_tokens_add_up_in_the_embedding_gradient() -> None:
    grad = torch.tensor([[1.0, 2], [10, 20], [100, 200]])
    table = backward.embedding_backward(grad, torch.tensor([2, 0, 2]), 4)
    assert table.tolist() == [[10, 20], [0, 0], [101, 202], [0, 0]]


def test_cross_entropy_gradient_sums_to_zero_and_is_bounded() -> None:
    logits = torch.randn(2, 3, 7, dtype=torch.float64) * 4
    targets = torch.randint(7, (2, 3))
    grad = backward.cross_entropy_backward(logits, targets)
    [expected] = jacobian_product(
        lambda x: F.cross_entropy(x.flatten(0, 1), targets.flatten()), torch.tensor(1), logits
    )
    assert (grad - expected).abs().max() <= TOLERANCE
    assert grad.sum(-1).abs().max() <= TOLERANCE
    assert grad.norm(dim=-1).max() < 2**0.5 / 6


def test_block_without_sublayer_outputs_passes_the_gradient_unchanged() -> None:
    """With W_o = 0 and W_down = 0 the Jacobian of a pre-norm block is the identity."""
    model = build_model()
    block = model.stacks["decoder"].blocks[0]
    with torch.no_grad():
        block.attn.f.o.weight.zero_()
        block.ffn.f.down.weight.zero_()
    by_hand, expected = block_gradients(model)
    grad = torch.randn(2, 2, 5, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(3))[1]
    assert torch.equal(by_hand["x"], grad)
    assert torch.equal(expected["x"], grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": {"qk_norm": {}}}, "qk_norm"),
        ({"attention": {"softcap": 5.0}}, "softcap on scores"),
        ({"attention": {"sink": True}}, "an attention sink"),
        ({"attention": {"clip_qkv": 1.0}}, "clip_qkv"),
        ({"position": {"kind": "relative-bias"}}, "a relative position bias"),
        ({"ffn": {"kind": "clamped-swiglu"}}, "the clamped SwiGLU"),
        ({"head": {"kind": "lm", "softcap": 3.0}}, "softcap on logits"),
        ({"head": {"kind": "lm", "transform": {}}}, "a head with a transform"),
        ({"embedding": {"norm": RMS_NORM}}, "a norm on embeddings"),
        ({"embedding": {"token_types": 2}}, "token types"),
        ({"embedding": {"factorization": {"width": 4}}, "head": {"tied": False}}, "a factorized embedding"),
    ],
    ids=str,
)
def test_unsupported_parts_are_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"does not cover {message}; use autograd"):
        model_backward(build_model(**options), random_tokens(), random_tokens())


def test_unsupported_modules_are_an_error() -> None:
    model = build_model()
    with pytest.raises(InputError, match="training mode"):
        model_backward(model.train(), random_tokens(), random_tokens())
    headless = build_model(form="encoder", head={"kind": "none"})
    with pytest.raises(InputError, match="does not cover a model that is not decoder-only"):
        model_backward(headless, random_tokens(), random_tokens())
    branch = model.eval().stacks["decoder"].blocks[0].ffn
    branch.f = nn.Tanh()
    x = torch.zeros(1, 2, D_MODEL, dtype=torch.float64)
    with pytest.raises(InputError, match="does not cover Tanh"):
        backward.branch_backward(x, x, branch)
