"""Attention and blocks against nn.MultiheadAttention, nn.TransformerEncoderLayer and nn.TransformerDecoderLayer."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from support.flop_and_memory_counters import build_model, compute_loss, count_flops, count_saved_bytes
from torch import Tensor, nn

import cutaway as ct
from cutaway import config as c
from cutaway.model.attention import CrossAttention, LayerContext, MultiHead
from cutaway.model.block import Block
from cutaway.model.masks import TokenPositions, cross_attention_mask, number_tokens, self_attention_mask

D_MODEL, HEADS, HIDDEN = 24, 4, 40
BATCH, LENGTH, SOURCE_LENGTH = 2, 7, 5
TOLERANCE = 1e-12
PADDINGS = {
    "no padding": None,
    "padding right": torch.arange(LENGTH) < torch.tensor([[LENGTH], [4]]),
    "padding left": torch.arange(LENGTH) >= torch.tensor([[0], [3]]),
}
"""Which tokens are real. A left-padded causal query attends to no key, which PyTorch's modules answer with NaN."""
CASES = [
    (causal, padding) for causal, padding in product((False, True), PADDINGS) if not (causal and "left" in padding)
]
Get = Callable[[nn.Parameter], Tensor]


def randomize(module: Any) -> Any:
    """The module in fp64 with random weights, including biases and gains."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=D_MODEL**-0.5, generator=generator)
    return module


def random_inputs(length: int) -> Tensor:
    x = torch.randn(BATCH, length, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    return x.requires_grad_()


def positions(padding: str) -> TokenPositions:
    return number_tokens(BATCH, LENGTH, torch.device("cpu"), PADDINGS[padding])


def build_context(attention: MultiHead, causal: bool, padding: str) -> LayerContext:
    tokens = positions(padding)
    mask = self_attention_mask(tokens, tokens, is_causal=causal)
    return LayerContext(attention.kernel.prepare_mask(mask, None, torch.float64), None)


def builtin_masks(causal: bool, padding: str) -> dict[str, Tensor | None]:
    """Masks of nn.MultiheadAttention, in which True hides a key."""
    real = PADDINGS[padding]
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return {"attn_mask": future if causal else None, "key_padding_mask": None if real is None else ~real}


def select_real(y: Tensor, padding: str) -> Tensor:
    """Outputs at real tokens. Outputs at padding have no defined value."""
    real = PADDINGS[padding]
    return y if real is None else y[real]


def attention_tensors(attention: MultiHead, get: Get, prefix: str = "") -> dict[str, Tensor]:
    """Weights or gradients under the names of nn.MultiheadAttention, which stacks q, k and v."""
    tensors = {}
    for kind in ("weight", "bias"):
        if getattr(attention.o, kind) is not None:
            stacked = [get(getattr(projection, kind)) for projection in (attention.q, attention.k, attention.v)]
            tensors[f"{prefix}in_proj_{kind}"] = torch.cat(stacked)
            tensors[f"{prefix}out_proj.{kind}"] = get(getattr(attention.o, kind))
    return tensors


def block_tensors(block: Block, get: Get) -> dict[str, Tensor]:
    """Weights or gradients under the names of nn.TransformerEncoderLayer or nn.TransformerDecoderLayer."""
    tensors = attention_tensors(block.attn.f, get, "self_attn.")
    branches = [(block.attn, block.norm_after_attn), (block.ffn, block.norm_after_ffn)]
    if block.cross is not None:
        tensors |= attention_tensors(block.cross.f, get, "multihead_attn.")
        branches.insert(1, (block.cross, block.norm_after_cross))
    modules = {"linear1": block.ffn.f.up, "linear2": block.ffn.f.down}
    for number, (branch, norm_after) in enumerate(branches, 1):
        modules[f"norm{number}"] = norm_after if list(norm_after.parameters()) else branch.norm_in
    for name, module in modules.items():
        tensors |= {f"{name}.{kind}": get(parameter) for kind, parameter in module.named_parameters()}
    return tensors


def build_block(norm_first: bool, activation: str, bias: bool, cross: bool = False) -> Block:
    attention_bias = ("q", "k", "v", "o") if bias else ()
    attention = c.MultiHead(heads=HEADS, bias=attention_bias, position=c.NoPosition())
    ffn = c.Mlp(hidden=HIDDEN, activation=activation, bias=bias)
    options = {"layers": 1, "norm": c.LayerNorm(bias=bias), "placement": c.PreNorm() if norm_first else c.PostNorm()}
    if cross:
        block = c.CrossBlock(attention=attention, cross=c.Cross(heads=HEADS, bias=attention_bias), ffn=ffn)
        stack: c.Stack = c.CrossStack(block=block, **options)
    else:
        stack = c.Stack(block=c.Block(attention=attention, ffn=ffn), **options)
    return randomize(Block(stack.blocks[0], stack, D_MODEL))


def assert_equal(ours: Tensor, builtin: Tensor, name: str = "output") -> None:
    assert ours.shape == builtin.shape, name
    assert (ours - builtin).abs().max() < TOLERANCE, name


def assert_equal_with_gradients(ours: Tensor, builtin: Tensor, inputs: list[Tensor], module: nn.Module) -> None:
    """Compare outputs and, of one random linear function of them, the gradients of the inputs.

    The gradients of the weights are left in `module` and in the module that computed `ours`.
    """
    assert_equal(ours, builtin)
    direction = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((builtin * direction).sum(), [*inputs, *module.parameters()])
    for parameter, gradient in zip(module.parameters(), expected[len(inputs) :], strict=True):
        parameter.grad = gradient
    (ours * direction).sum().backward()
    for x, gradient in zip(inputs, expected, strict=False):
        assert gradient.abs().max() > 0.01
        assert_equal(x.grad, gradient, "gradient of an input")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("causal", "padding"), CASES)
def test_attention_equals_multihead_attention(causal: bool, padding: str, bias: bool) -> None:
    config = c.MultiHead(heads=HEADS, bias=("q", "k", "v", "o") if bias else (), position=c.NoPosition())
    attention = randomize(MultiHead(config, D_MODEL))
    builtin = nn.MultiheadAttention(D_MODEL, HEADS, bias=bias, batch_first=True, dtype=torch.float64)
    builtin.load_state_dict(attention_tensors(attention, lambda parameter: parameter.detach()))
    x = random_inputs(LENGTH)
    ours = select_real(attention(x, build_context(attention, causal, padding)), padding)
    for need_weights in (False, True):
        expected = builtin(x, x, x, need_weights=need_weights, **builtin_masks(causal, padding))[0]
        assert_equal(ours, select_real(expected, padding))
    assert_equal_with_gradients(ours, select_real(expected, padding), [x], builtin)
    gradients = attention_tensors(attention, lambda parameter: parameter.grad)
    assert gradients.keys() == dict(builtin.named_parameters()).keys()
    for name, parameter in builtin.named_parameters():
        assert_equal(gradients[name], parameter.grad, name)


def test_cross_attention_equals_multihead_attention() -> None:
    attention = randomize(CrossAttention(c.Cross(heads=HEADS, bias=("q", "k", "v", "o")), D_MODEL))
    builtin = nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True, dtype=torch.float64)
    builtin.load_state_dict(attention_tensors(attention, lambda parameter: parameter.detach()))
    x, memory = random_inputs(SOURCE_LENGTH), random_inputs(LENGTH)
    target = number_tokens(BATCH, SOURCE_LENGTH, torch.device("cpu"))
    mask = cross_attention_mask(target, positions("padding left"))
    context = LayerContext(None, None, memory=memory)
    context.prepared_cross_mask = attention.kernel.prepare_mask(mask, None, torch.float64)
    expected = builtin(x, memory, memory, key_padding_mask=~PADDINGS["padding left"])[0]
    assert_equal_with_gradients(attention(x, context), expected, [x, memory], builtin)
    for name, gradient in attention_tensors(attention, lambda parameter: parameter.grad).items():
        assert_equal(gradient, builtin.get_parameter(name).grad, name)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(("causal", "padding"), CASES)
def test_block_equals_transformer_encoder_layer(
    causal: bool, padding: str, norm_first: bool, activation: str, bias: bool
) -> None:
    block = build_block(norm_first, activation, bias)
    builtin = nn.TransformerEncoderLayer(
        D_MODEL, HEADS, HIDDEN, 0.0, activation, 1e-5, True, norm_first, bias, dtype=torch.float64
    )
    builtin.load_state_dict(block_tensors(block, lambda parameter: parameter.detach()))
    x, masks = random_inputs(LENGTH), builtin_masks(causal, padding)
    ours = select_real(block(x, build_context(block.attn.f, causal, padding)), padding)
    expected = builtin(x, src_mask=masks["attn_mask"], src_key_padding_mask=masks["key_padding_mask"])
    assert_equal_with_gradients(ours, select_real(expected, padding), [x], builtin)
    gradients = block_tensors(block, lambda parameter: parameter.grad)
    assert gradients.keys() == dict(builtin.named_parameters()).keys()
    for name, parameter in builtin.named_parameters():
        assert_equal(gradients[name], parameter.grad, name)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
@torch.no_grad()
def test_block_equals_fused_transformer_encoder_layer(
    norm_first: bool, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In evaluation without gradients, nn.TransformerEncoderLayer runs one fused operation."""
    block = build_block(norm_first, activation, bias=True)
    builtin = nn.TransformerEncoderLayer(
        D_MODEL, HEADS, HIDDEN, 0.0, activation, 1e-5, True, norm_first, dtype=torch.float64
    ).eval()
    builtin.load_state_dict(block_tensors(block, lambda parameter: parameter.detach()))
    fused, calls = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *inputs: calls.append(len(inputs)) or fused(*inputs)
    )
    x = random_inputs(LENGTH)
    assert_equal(block(x, build_context(block.attn.f, False, "no padding")), builtin(x))
    assert len(calls) == 1


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padding", ["no padding", "padding right", "padding left"])
def test_block_equals_transformer_decoder_layer(padding: str, norm_first: bool, activation: str) -> None:
    """Causal self-attention without padding, and cross-attention to a padded source."""
    block = build_block(norm_first, activation, bias=True, cross=True)
    builtin = nn.TransformerDecoderLayer(
        D_MODEL, HEADS, HIDDEN, 0.0, activation, 1e-5, True, norm_first, dtype=torch.float64
    )
    builtin.load_state_dict(block_tensors(block, lambda parameter: parameter.detach()))
    x, memory = random_inputs(SOURCE_LENGTH), random_inputs(LENGTH)
    target = number_tokens(BATCH, SOURCE_LENGTH, torch.device("cpu"))
    prepare = block.attn.f.kernel.prepare_mask
    context = LayerContext(
        prepare(self_attention_mask(target, target, is_causal=True), None, torch.float64),
        None,
        memory=memory,
        prepared_cross_mask=prepare(cross_attention_mask(target, positions(padding)), None, torch.float64),
    )
    future = torch.ones(SOURCE_LENGTH, SOURCE_LENGTH, dtype=torch.bool).triu(1)
    hidden = builtin_masks(False, padding)["key_padding_mask"]
    expected = builtin(x, memory, tgt_mask=future, memory_key_padding_mask=hidden)
    assert_equal_with_gradients(block(x, context), expected, [x, memory], builtin)
    gradients = block_tensors(block, lambda parameter: parameter.grad)
    assert gradients.keys() == dict(builtin.named_parameters()).keys()
    for name, parameter in builtin.named_parameters():
        assert_equal(gradients[name], parameter.grad, name)


def config_with_heads(heads: int) -> c.Config:
    return ct.config("tiny-gpt").replace({"d_model": 64, "decoder.block.attention.heads": heads})


@pytest.mark.parametrize("heads", [2, 4, 16])
def test_number_of_heads_changes_no_weight_and_no_flops(heads: int) -> None:
    """At equal d_model, counted by PyTorch in a forward and a backward pass."""
    models = [build_model(config_with_heads(number), kernel="explicit") for number in (1, heads)]
    shapes = [{name: parameter.shape for name, parameter in model.named_parameters()} for model in models]
    assert shapes[0] == shapes[1]
    flops = [count_flops(lambda model=model: compute_loss(model, BATCH, 32, 0).backward())[1] for model in models]
    assert flops[0] == flops[1] > 0


def test_score_memory_is_proportional_to_the_number_of_heads() -> None:
    """With explicit scores. SDPA saves one number per query and head instead."""

    def saved_bytes(kernel: str) -> list[int]:
        models = (build_model(config_with_heads(heads), kernel=kernel) for heads in (1, 2, 4, 16))
        return [count_saved_bytes(model, BATCH, 32, 0) for model in models]

    one, two, four, sixteen = saved_bytes("explicit")
    score_matrices = ct.config("tiny-gpt").decoder.layers * BATCH * 32 * 32 * 4  # bytes of one head, all layers
    per_head = two - one
    assert per_head % score_matrices == 0
    assert per_head >= score_matrices
    assert [four - one, sixteen - one] == [3 * per_head, 15 * per_head]
    one, two, four, sixteen = saved_bytes("sdpa")
    assert [two - one, four - one, sixteen - one] == [score_matrices // 32 * extra for extra in (1, 3, 15)]
