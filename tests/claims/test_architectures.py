"""Claims about encoder-only, decoder-only and encoder-decoder models, and about recurrent networks."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from support.config_strategies import build_randomized_model, random_tokens
from torch import Tensor, nn

import cutaway as ct
from cutaway.errors import InputError
from cutaway.model import Transformer


def build_model(name: str) -> tuple[Transformer, Tensor]:
    """A model in fp64 with random weights, and eight tokens."""
    config = ct.config(name)
    return build_randomized_model(config, torch.float64), random_tokens(config, 1, 8, 0)


def change_token(tokens: Tensor, position: int) -> Tensor:
    changed = tokens.clone()
    changed[0, position] = (changed[0, position] + 1) % 256
    return changed


def changed_positions(before: Tensor, after: Tensor) -> list[bool]:
    return ((before - after).abs().amax(-1)[0] > 1e-9).tolist()


def graph_depth(out: Tensor) -> int:
    """Number of operations on the longest path of the autograd graph: steps that have to run one after another."""

    @cache
    def depth(node: torch.autograd.graph.Node | None) -> int:
        return 0 if node is None else 1 + max((depth(parent) for parent, _ in node.next_functions), default=0)

    return depth(out.grad_fn)


@torch.no_grad()
def test_c256_encoder_is_bidirectional_and_does_not_generate() -> None:
    model, tokens = build_model("tiny-bert")
    assert model.stacks.keys() == {"encoder"}
    hidden = model.encode(tokens)
    assert hidden.shape == (1, 8, model.config.d_model)  # one contextual vector per token
    for position in (0, 7):
        assert all(changed_positions(hidden, model.encode(change_token(tokens, position))))
    with pytest.raises(InputError):
        ct.generate(model, tokens[0].tolist(), max_new_tokens=1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-gemma"])
def test_c257_decoder_is_causal_and_has_no_encoder_and_no_cross_attention(name: str) -> None:
    model, tokens = build_model(name)
    assert model.stacks.keys() == {"decoder"}
    assert all(block.cross is None for block in model.decoder.blocks)
    changed = changed_positions(model(tokens), model(change_token(tokens, 4)))
    assert changed == [False] * 4 + [True] * 4
    (completion,) = ct.generate(model, tokens[0].tolist(), max_new_tokens=1, compile=False)
    assert completion.tokens == model(tokens)[:, -1].argmax(-1).tolist()


@torch.no_grad()
def test_c258_encoder_decoder_has_a_bidirectional_source_and_a_causal_target() -> None:
    """The decoder reads the encoder output through cross-attention in every layer; the 2017 model has 6 + 6 layers."""
    model, target = build_model("tiny-bart")
    source = random_tokens(model.config, 1, 5, 1, "source")
    assert all(changed_positions(model.encode(source), model.encode(change_token(source, 4))))
    assert changed_positions(model(source, target), model(source, change_token(target, 3))) == [False] * 3 + [True] * 5
    assert all(changed_positions(model(source, target), model(change_token(source, 4), target)))
    assert all(block.cross is not None for block in model.decoder.blocks)
    assert [stack.layers for stack in ct.config("transformer-base").stacks.values()] == [6, 6]


@torch.no_grad()
def test_c259_every_2017_sublayer_is_a_residual_add_followed_by_layernorm() -> None:
    config = ct.config("transformer-base").replace({"vocab_size": 20, "encoder.layers": 1, "decoder.layers": 1})
    model = build_randomized_model(config, torch.float64)
    with ct.trace(model, "resid_pre", "resid_mid", "cross.resid_pre", "resid_post", "*.out") as t:
        model(random_tokens(config, 1, 4, 0), random_tokens(config, 1, 5, 1))
    paths = {
        "encoder.blocks.0.": (("resid_pre", "attn", "resid_mid"), ("resid_mid", "ffn", "resid_post")),
        "decoder.blocks.0.": (
            ("resid_pre", "attn", "cross.resid_pre"),
            ("cross.resid_pre", "cross", "resid_mid"),
            ("resid_mid", "ffn", "resid_post"),
        ),
    }
    for prefix, sublayers in paths.items():
        for before, name, after in sublayers:
            norm = model.get_submodule(f"{prefix}norm_after_{name}")
            total = t[f"{prefix}{before}"] + t[f"{prefix}{name}.out"]
            expected = F.layer_norm(total, (512,), norm.weight, norm.bias, eps=1e-6)
            assert (expected - t[f"{prefix}{after}"]).abs().max() < 1e-12


def run_rnn(cell: nn.RNNCell, x: Tensor) -> Tensor:
    state = torch.zeros(1, 8)
    for step in x:
        state = cell(step[None], state)
    return state


def test_c263_rnn_needs_as_many_steps_as_tokens_and_attention_a_constant_number() -> None:
    """Sequential operations grow linearly in T for an RNN; those of a Transformer do not depend on T."""
    cell, model = nn.RNNCell(4, 8), ct.build("tiny-gpt", seed=0)
    lengths = (8, 16, 32)
    rnn = [graph_depth(run_rnn(cell, torch.randn(length, 4))) for length in lengths]
    assert rnn[2] - rnn[1] == 2 * (rnn[1] - rnn[0]) >= 2 * 8
    attention = [graph_depth(model(torch.zeros(1, length, dtype=torch.long))) for length in lengths]
    assert len(set(attention)) == 1
    one_layer = ct.build(ct.config("tiny-gpt").replace({"decoder.layers": 1}), seed=0)  # path length 1
    with ct.trace(one_layer, "embed", gradients=True) as t:
        one_layer(torch.arange(32)[None])[0, -1].square().sum().backward()
    assert (t.gradient("embed")[0].norm(dim=-1) > 0).all()


@torch.no_grad()
def test_c268_one_parallel_pass_computes_all_pairs() -> None:
    """A pass over T tokens has the same number of sequential operations, and T² scores per head; decoding is C195."""
    model, depths, num_scores = ct.build("tiny-gpt", seed=0), [], []
    for length in (8, 16, 64):
        tokens = torch.zeros(1, length, dtype=torch.long)
        with torch.enable_grad(), ct.trace(model, "blocks.0.attn.scores", heads=[0]) as t:
            depths.append(graph_depth(model(tokens)))
        num_scores.append(t["blocks.0.attn.scores"].numel())
    assert len(set(depths)) == 1
    assert num_scores == [8**2, 16**2, 64**2]
