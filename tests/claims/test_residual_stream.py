"""Claims on norm placement and residual connections. Each test name begins with the id of the claim."""

from itertools import product

import torch
from support.config_strategies import build_randomized_model

import cutaway as ct
from cutaway import config as c
from cutaway.lens import Trace, sites
from cutaway.model.block import Block
from cutaway.model.ffn import build_dense_ffn

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9]])
STEPS = ("resid_pre", "attn.in", "attn.out", "resid_mid", "ffn.in", "ffn.out", "resid_post")


def trace_all(model: ct.Transformer) -> Trace:
    with torch.no_grad(), ct.trace(model, "*") as t:
        model(TOKENS)
    return t


def build_double(name: str) -> ct.Transformer:
    """A tiny preset in fp64, in which every parameter affects the output."""
    return build_randomized_model(ct.config(name), torch.float64)


def decoder_with(placement: c.PreNorm | c.PostNorm | c.OutputNorm, layers: int = 2) -> c.Decoder:
    stack = c.Stack(layers=layers, block=c.Block(attention=c.MultiHead(heads=2)), placement=placement)
    return c.Decoder(vocab_size=10, d_model=16, decoder=stack)


def sum_of_writes(t: Trace) -> torch.Tensor:
    return t["embed"] + sum(t[site] for site in t if site.endswith(".out"))


@torch.no_grad()
def test_c115_equations_of_post_norm_and_pre_norm() -> None:
    for name in ("tiny-bert", "tiny-gpt"):
        model = build_double(name)
        t, block = trace_all(model), next(iter(model.stacks.values())).blocks[1]
        x, attn_in, attn_out, mid, ffn_in, ffn_out, post = (t[f"blocks.1.{step}"] for step in STEPS)
        if name == "tiny-bert":
            assert torch.equal(attn_in, x)
            assert torch.equal(mid, block.norm_after_attn(x + attn_out))
            assert torch.equal(post, block.norm_after_ffn(mid + ffn_out))
        else:
            assert torch.equal(attn_in, block.attn.norm_in(x))
            assert torch.equal(ffn_in, block.ffn.norm_in(mid))
            assert torch.equal(post, mid + ffn_out)
    placements = {
        "transformer-base": "post",
        "bert-base": "post",
        "gpt2": "pre",
        "gpt3-175b": "pre",
        "llama-3-8b": "pre",
    }
    for name, kind in placements.items():
        assert {stack.placement.kind for stack in ct.config(name).stacks.values()} == {kind}


@torch.no_grad()
def test_c116_pre_norm_and_post_norm_equations_differ() -> None:
    """The same weights in both placements give different outputs, so the equations are not interchangeable."""
    pre, post = (
        build_randomized_model(decoder_with(placement(final_norm=True)), torch.float64)
        for placement in (c.PreNorm, c.PostNorm)
    )
    weights = pre.state_dict()
    renamed = {
        name.replace(".attn.norm_in", ".norm_after_attn").replace(".ffn.norm_in", ".norm_after_ffn"): tensor
        for name, tensor in weights.items()
    }
    post.load_state_dict(renamed)
    assert (pre(TOKENS) - post(TOKENS)).abs().max() > 0.1


@torch.no_grad()
def test_c117_pre_norm_stream_is_normalized_by_the_final_norm_alone() -> None:
    def rms(x: torch.Tensor) -> torch.Tensor:
        return x.square().mean(-1).sqrt()

    pre, post = (
        ct.build(decoder_with(placement), seed=0, dtype=torch.float64) for placement in (c.PreNorm(), c.PostNorm())
    )
    t = trace_all(pre)
    assert all((rms(t[site]) - 1).abs().min() > 0.5 for site in t if "resid" in site)
    assert (rms(t["final_norm"]) - 1).abs().max() < 1e-2
    t = trace_all(post)
    assert all((rms(t[f"blocks.{layer}.resid_post"]) - 1).abs().max() < 1e-2 for layer in range(2))
    assert isinstance(post.decoder.final_norm, torch.nn.Identity)


def test_c118_placement_changes_only_the_final_norm() -> None:
    pre, post = (ct.size(decoder_with(placement), context=64) for placement in (c.PreNorm(), c.PostNorm()))
    assert pre.parameters.per_layer == post.parameters.per_layer
    assert pre.forward_flops == post.forward_flops
    assert pre.num_parameters - post.num_parameters == pre.parameters.final_norm == 16


def test_c122_pre_norm_only_adds_to_the_stream_and_post_norm_rescales_it() -> None:
    for placement, only_adds in ((c.PreNorm(), True), (c.OutputNorm(), True), (c.PostNorm(), False)):
        t = trace_all(build_randomized_model(decoder_with(placement), torch.float64))
        difference = (sum_of_writes(t) - t["blocks.1.resid_post"]).abs().max()
        assert difference < 1e-12 if only_adds else difference > 0.1


@torch.no_grad()
def test_c123_pre_norm_block_whose_sublayers_return_0_is_the_identity() -> None:
    model = build_double("tiny-llama")
    attention, ffn = model.decoder.blocks[1].attn.f, model.decoder.blocks[1].ffn.f
    attention.o.weight.zero_()
    ffn.down.weight.zero_()
    t = trace_all(model)
    assert torch.equal(t["blocks.1.resid_post"], t["blocks.1.resid_pre"])
    assert not torch.equal(t["blocks.2.resid_post"], t["blocks.2.resid_pre"])


def test_c125_n_blocks_have_2_to_the_2n_paths() -> None:
    """A product of 2N factors I + J has 2^(2N) terms. A parallel block, I + J_attn + J_ffn, has 3 instead of 4."""
    num_sublayers = sum(site.endswith(".out") for site in sites(ct.build("tiny-gpt", device="meta")))
    assert num_sublayers == 2 * ct.config("tiny-gpt").decoder.layers == 4
    identity, jacobians = torch.eye(3, dtype=torch.float64), torch.randn(num_sublayers, 3, 3, dtype=torch.float64)
    stack = torch.linalg.multi_dot([identity + jacobian for jacobian in jacobians])
    choices = list(product((False, True), repeat=num_sublayers))  # skip or take each sublayer
    terms = [
        torch.linalg.multi_dot(
            [jacobian if taken else identity for jacobian, taken in zip(jacobians, choice, strict=True)]
        )
        for choice in choices
    ]
    assert len(terms) == 2 ** (2 * 2)
    assert (sum(terms) - stack).abs().max() < 1e-12


@torch.no_grad()
def test_c126_expansion_into_paths_is_exact_for_linear_sublayers_only() -> None:
    x = torch.randn(20, 8, dtype=torch.float64)
    errors = {}
    for activation in ("identity", "gelu"):
        first, second = (build_dense_ffn(c.Mlp(activation=activation, bias=False), 8).double() for _ in range(2))
        for parameter in (*first.parameters(), *second.parameters()):
            torch.nn.init.normal_(parameter, std=0.3)
        h = x + first(x)
        paths = x + first(x) + second(x) + second(first(x))
        errors[activation] = ((h + second(h) - paths).norm() / paths.norm()).item()
    assert errors["identity"] < 1e-12
    assert errors["gelu"] > 0.1


@torch.no_grad()
def test_c130_a_later_write_can_cancel_the_input() -> None:
    """The skip keeps the input as a summand, but an FFN with W2·W1 = −I removes it exactly."""
    ffn = c.Mlp(hidden=16, activation="identity", bias=False)
    block = c.Block(attention=c.MultiHead(heads=2), ffn=ffn)
    config = c.Decoder(vocab_size=10, d_model=16, decoder=c.Stack(layers=1, block=block, norm=c.NoNorm()))
    model = build_randomized_model(config, torch.float64)
    layer: Block = model.decoder.blocks[0]
    layer.ffn.f.up.weight.copy_(torch.eye(16))
    layer.ffn.f.down.weight.copy_(-torch.eye(16))
    t = trace_all(model)
    assert t["blocks.0.resid_mid"].abs().max() > 0.1
    assert not t["blocks.0.resid_post"].any()


def test_c132_variance_of_the_stream_grows_with_the_number_of_writes() -> None:
    """Exact, over all combinations of 2N independent writes ±1 with unit variance. Correlated writes grow faster."""
    for layers in (1, 2, 4):
        writes = torch.tensor(list(product((-1.0, 1.0), repeat=2 * layers)), dtype=torch.float64)
        assert writes.sum(-1).var(correction=0) == 2 * layers
        scaled = writes / (2 * layers) ** 0.5
        assert abs(scaled.sum(-1).var(correction=0).item() - 1) < 1e-12
    equal_writes = writes[:, :1].expand(-1, 8)
    assert equal_writes.sum(-1).var(correction=0) == 8**2


def test_c134_placements_of_recent_models() -> None:
    expected = {
        "llama-3-8b": "pre", "qwen3-8b": "pre", "gemma-7b": "pre", "deepseek-v3": "pre", "olmo-2-7b": "output",
        "gemma-2-9b": "sandwich", "gemma-3-27b": "sandwich", "gpt-neox-20b": "parallel", "command-r": "parallel",
    }  # fmt: skip
    assert {name: ct.config(name).decoder.placement.kind for name in expected} == expected
