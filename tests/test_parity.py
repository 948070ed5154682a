"""Ours ≡ transformers', where one part can be held against one part, and for two whole models mapped by hand."""

import copy
import math

import pytest
import torch
from strategies import bound, lively
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from cutaway import config as c
from cutaway.model import Transformer
from cutaway.model.masks import Places
from cutaway.model.positions import Alibi, RelativeBias
from cutaway.model.rope import Rope

THETA, WIDTH, ORIGINAL = 50000.0, 16, 32
LONG = [1.0 + i / 4 for i in range(8)]
SCALINGS = {
    "linear": (c.LinearScaling(factor=3.0), {"factor": 3.0}),
    "dynamic": (c.DynamicNTK(factor=2.0, original_length=ORIGINAL), {"factor": 2.0}),
    "yarn": (
        c.Yarn(factor=4.0, original_length=ORIGINAL),
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "longrope": (
        c.LongRope(
            short_factors=LONG,
            long_factors=LONG[::-1],
            original_length=ORIGINAL,
            attention_factor=math.sqrt(1 + math.log(4) / math.log(ORIGINAL)),
        ),
        {"short_factor": LONG, "long_factor": LONG[::-1], "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "llama3": (
        c.Llama3Scaling(original_length=ORIGINAL),
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    ),
}


def their_config(kind: str, fields: dict) -> LlamaConfig:
    rope = {"rope_type": kind, "rope_theta": THETA} | fields
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    return LlamaConfig(
        vocab_size=61,
        num_hidden_layers=2,
        max_position_embeddings=ORIGINAL,
        rope_parameters=rope,
        head_dim=WIDTH,
        **sizes,
    )


@pytest.mark.parametrize("length", [20, 90])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_frequencies(kind: str, length: int) -> None:
    """On both sides of the original length."""
    ours, fields = SCALINGS[kind]
    rope = Rope(c.Rope(theta=THETA, scaling=ours), WIDTH)
    theirs, magnitude = ROPE_INIT_FUNCTIONS[kind](their_config(kind, fields), "cpu", seq_len=length)
    got = rope.frequencies(Places(torch.arange(length).unsqueeze(0))).flatten()
    assert torch.allclose(got, theirs, rtol=2e-6, atol=0)
    assert rope.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize("causal", [False, True])
def test_t5_buckets(causal: bool) -> None:
    ours = RelativeBias(c.RelativeBias(), 2, causal=causal)
    relative = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(relative, bidirectional=not causal, num_buckets=32, max_distance=128)
    assert torch.equal(ours.bucket(relative), theirs)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 32])
def test_alibi_slopes(heads: int) -> None:
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(Alibi(c.Alibi(), heads).slope, theirs)


def logits_agree(ours: Transformer, theirs: torch.nn.Module, length: int) -> None:
    """Plain, padded on the right and on the left."""
    tokens = torch.randint(0, 61, (2, length))
    for short in (None, slice(0, 5), slice(length - 5, None)):
        mask = torch.ones_like(tokens, dtype=torch.bool)
        if short is not None:
            mask[:, short] = False
        place = (mask.cumsum(-1) - 1).clamp(min=0)
        fresh = copy.deepcopy(theirs)  # its dynamic RoPE remembers the longest text it has seen
        expected = fresh(tokens, attention_mask=mask.long(), position_ids=place).logits
        got = ours(tokens, mask)
        assert (got - expected)[mask].abs().max() <= bound(torch.float32, expected)


def stir(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.mark.parametrize("length", [20, 90])
@pytest.mark.parametrize("kind", ["default", *SCALINGS])
@torch.no_grad()
def test_llama(kind: str, length: int) -> None:
    scaling, fields = SCALINGS.get(kind, (c.NoScaling(), {}))
    theirs = stir(LlamaForCausalLM(their_config(kind, fields)))
    attention = c.MultiHead(heads=2, kv_heads=1, d_head=WIDTH, position=c.Rope(theta=THETA, scaling=scaling))
    stack = c.Stack(layers=2, block=c.Block(attention=attention, ffn=c.Gated(hidden=24)))
    ours = lively(c.Decoder(vocab_size=61, d_model=32, decoder=stack, head=c.Head(tied=False)))
    weights = {
        "decoder.embed.token": "model.embed_tokens",
        "decoder.final_norm": "model.norm",
        "head.matrix": "lm_head",
    }
    for i in range(2):
        here, there = f"decoder.blocks.{i}", f"model.layers.{i}"
        weights |= {f"{here}.attn.f.{x}": f"{there}.self_attn.{x}_proj" for x in "qkvo"}
        weights |= {f"{here}.ffn.f.{x}": f"{there}.mlp.{x}_proj" for x in ("gate", "up", "down")}
        weights |= {
            f"{here}.attn.norm_in": f"{there}.input_layernorm",
            f"{here}.ffn.norm_in": f"{there}.post_attention_layernorm",
        }
    state = theirs.state_dict()
    ours.load_weights({f"{mine}.weight": state[f"{other}.weight"] for mine, other in weights.items()})
    logits_agree(ours, theirs, length)


@torch.no_grad()
def test_gpt2() -> None:
    theirs = stir(GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4)))
    config = c.config("tiny-gpt").replace(vocab_size=61)
    ours, state = lively(config), theirs.state_dict()
    weights = {
        "decoder.embed.token.weight": state["transformer.wte.weight"],
        "head.matrix.weight": state["transformer.wte.weight"],
        "decoder.embed.position.table.weight": state["transformer.wpe.weight"],
        "decoder.final_norm.weight": state["transformer.ln_f.weight"],
        "decoder.final_norm.bias": state["transformer.ln_f.bias"],
    }
    for i in range(2):
        here, there = f"decoder.blocks.{i}", f"transformer.h.{i}"
        for leaf in ("weight", "bias"):
            three = state[f"{there}.attn.c_attn.{leaf}"].T.chunk(3, 0)
            weights |= {f"{here}.attn.f.{x}.{leaf}": part for x, part in zip("qkv", three, strict=True)}
            weights[f"{here}.attn.f.o.{leaf}"] = state[f"{there}.attn.c_proj.{leaf}"].T
            weights[f"{here}.ffn.f.up.{leaf}"] = state[f"{there}.mlp.c_fc.{leaf}"].T
            weights[f"{here}.ffn.f.down.{leaf}"] = state[f"{there}.mlp.c_proj.{leaf}"].T
            weights[f"{here}.attn.norm_in.{leaf}"] = state[f"{there}.ln_1.{leaf}"]
            weights[f"{here}.ffn.norm_in.{leaf}"] = state[f"{there}.ln_2.{leaf}"]
    ours.load_weights(weights)
    logits_agree(ours, theirs, 20)
