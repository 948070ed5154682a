"""Claims about checks of shapes, masks and attention entropy, and about typical bugs."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.config_strategies import build_randomized_model, random_tokens
from torch import Tensor

import cutaway as ct
from cutaway.lens.analysis.attention_heads import pattern_entropy_by_query
from cutaway.model import Transformer
from cutaway.model.masks import number_tokens


def build_decoder(name: str = "tiny-llama") -> tuple[Transformer, Tensor]:
    """A decoder in fp64 with random weights, and two rows of seven tokens."""
    config = ct.config(name)
    return build_randomized_model(config, torch.float64), random_tokens(config, 2, 7, 0)


@torch.no_grad()
def test_c277_shapes_by_axis() -> None:
    """Batch 2, tokens 7, heads 4, KV heads 2, d_head 16, d_model 64, FFN 128, vocabulary 256."""
    model, tokens = build_decoder()
    with ct.trace(model, "*", layers=[0]) as t:
        model(tokens)
    shapes = {name.removeprefix("blocks.0."): tuple(t[name].shape) for name in t}
    stream, by_head, scores = (2, 7, 64), (2, 7, 4, 16), (2, 4, 7, 7)
    assert shapes == {
        **dict.fromkeys(("embed", "resid_pre", "resid_mid", "resid_post", "final_norm"), stream),
        **dict.fromkeys(("attn.in", "attn.out", "ffn.in", "ffn.out"), stream),
        **{"attn.q": by_head, "attn.k": (2, 7, 2, 16), "attn.v": (2, 7, 2, 16), "attn.z": by_head},
        **{"attn.scores": scores, "attn.pattern": scores, "ffn.hidden": (2, 7, 128), "logits": (2, 7, 256)},
    }


@torch.no_grad()
def test_c278_patterns_are_0_for_later_tokens_and_for_padding() -> None:
    """No leakage into the logits: tests/model/test_causality.py."""
    model, tokens = build_decoder()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :2] = mask[1, 5:] = False
    with ct.trace(model, "attn.pattern") as t:
        model(tokens, mask)
    for pattern in (t[name] for name in t):
        assert (pattern.triu(1) == 0).all()
        assert (pattern[0, ..., :2] == 0).all()
        assert (pattern[1, ..., 5:] == 0).all()
        assert (pattern.sum(-1).transpose(1, 2)[mask] - 1).abs().max() < 1e-12


@torch.no_grad()
def test_c279_attention_entropy_is_between_0_and_ln_t() -> None:
    """The bounds are attained: ln(t + 1) by row t with equal scores, 0 by a row with one much larger score."""
    entropies, upper = {}, torch.arange(1, 8, dtype=torch.float64).log()
    for scale in (0.0, 1.0, 1e4):
        model, tokens = build_decoder()
        model.decoder.blocks[0].attn.f.q.weight.mul_(scale)
        with ct.trace(model, "blocks.0.attn.pattern") as t:
            model(tokens)
        entropies[scale] = pattern_entropy_by_query(t["blocks.0.attn.pattern"]) * math.log(2)
        assert (entropies[scale] >= 0).all()
        assert (entropies[scale] <= upper + 1e-12).all()
    torch.testing.assert_close(entropies[0.0], upper.expand_as(entropies[0.0]))
    assert float(entropies[1e4].median()) < 1e-6


def attention_with_bug(q: Tensor, k: Tensor, v: Tensor, bug: str | None) -> tuple[Tensor, Tensor]:
    """Pattern (H, T, T) and output (T, H·D) of causal attention with one bug, of queries, keys and values (T, H, D)."""
    seq_len, heads, d_head = q.shape
    if bug == "no transpose":
        q, k, v = (x.reshape(heads, seq_len, d_head) for x in (q, k, v))
    else:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    scores = q @ k.mT * (1.0 if bug == "no scale" else d_head**-0.5)
    diagonal = {"no mask": seq_len, "mask off by one": 2}.get(bug or "", 1)
    scores = scores.masked_fill(torch.ones(seq_len, seq_len, dtype=torch.bool).triu(diagonal), -torch.inf)
    pattern = scores.softmax(-2 if bug == "softmax axis" else -1)
    return pattern, (pattern @ v).transpose(0, 1).flatten(1)


@pytest.mark.parametrize(
    ("bug", "failed"),
    [
        (None, set()),
        ("no mask", {"pattern", "causality", "parity"}),
        ("mask off by one", {"pattern", "causality", "parity"}),
        ("softmax axis", {"rows", "causality", "parity"}),
        ("no scale", {"parity"}),
        ("no transpose", {"causality", "parity"}),
    ],
)
def test_c284_bug_fails_a_check(bug: str | None, failed: set[str]) -> None:
    """Whole models with these bugs: tests/check/test_seeded_bugs.py."""
    qkv = torch.randn(3, 6, 4, 8, dtype=torch.float64)
    changed = qkv.clone()
    changed[:, -1] += 1
    pattern, z = attention_with_bug(*qkv, bug)
    reference = F.scaled_dot_product_attention(*qkv.transpose(1, 2), is_causal=True).transpose(0, 1).flatten(1)
    differences = {
        "pattern": pattern.triu(1),
        "rows": pattern.sum(-1) - 1,
        "causality": z[:-1] - attention_with_bug(*changed, bug)[1][:-1],
        "parity": z - reference,
    }
    assert {check for check, difference in differences.items() if difference.abs().max() > 1e-9} == failed


@torch.no_grad()
def test_c284_missing_final_norm_changes_the_scale_of_the_logits() -> None:
    model, tokens = build_decoder()
    with_norm = model(tokens)
    with ct.edit(model, {"final_norm": "drop"}), ct.trace(model, "blocks.3.resid_post") as t:
        without = model(tokens)
    stream, gain = t["blocks.3.resid_post"], model.decoder.final_norm.weight
    rms = (stream.square().mean(-1, keepdim=True) + model.config.decoder.norm.eps).sqrt()
    assert (with_norm - model.head(stream / rms * gain)).abs().max() < 1e-12
    assert (without - model.head(stream)).abs().max() < 1e-12
    assert without.std() > 2 * with_norm.std()


@torch.no_grad()
def test_c285_only_attention_mixes_tokens() -> None:
    model, _ = build_decoder()
    block, x = model.decoder.blocks[0], torch.randn(1, 5, 64, dtype=torch.float64)
    context = model.decoder.build_layer_contexts(number_tokens(1, 5, torch.device("cpu")), x.dtype, None, {})[0]
    changed = x.clone()
    changed[:, 2] += torch.randn(64, dtype=torch.float64)
    attention = block.attn.f
    operations = {
        **{"norm": block.attn.norm_in, "q": attention.q, "k": attention.k, "v": attention.v, "o": attention.o},
        **{
            "attention": lambda x: attention(x, context),
            "ffn": block.ffn.f,
            "add": lambda x: x + x,
            "head": model.head,
        },
    }
    for name, operation in operations.items():
        rows = (operation(x) - operation(changed)).abs().amax((0, 2)) > 1e-9
        assert rows.tolist() == [False, False, True, name == "attention", name == "attention"], name
