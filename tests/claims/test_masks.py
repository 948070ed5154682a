"""Claims on attention masks. Each test name begins with the id of the claim."""

import math

import torch
import torch.nn.functional as F
from support.config_strategies import build_randomized_model
from torch import nn

import cutaway as ct
from cutaway.lens import Trace
from cutaway.model.masks import number_tokens, self_attention_mask

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9]])
FUTURE = torch.ones(6, 6, dtype=torch.bool).triu(1)


def trace_attention(name: str, *patterns: str, mask: torch.Tensor | None = None) -> Trace:
    """Trace a tiny preset in fp64, in which every parameter affects the output."""
    model = build_randomized_model(ct.config(name), torch.float64).use_kernel("explicit")
    with torch.no_grad(), ct.trace(model, *patterns) as t:
        if len(model.stacks) == 2:
            model(TOKENS, TOKENS[:, :4], mask)
        else:
            model(TOKENS, mask)
    return t


def test_c070_blocked_scores_are_minus_infinity_and_get_weight_0() -> None:
    t = trace_attention("tiny-gpt", "attn.scores", "attn.pattern")
    for layer in range(2):
        scores, pattern = t[f"blocks.{layer}.attn.scores"], t[f"blocks.{layer}.attn.pattern"]
        assert (scores[..., FUTURE] == -math.inf).all()
        assert (pattern[..., FUTURE] == 0).all()
        assert (pattern[..., ~FUTURE] > 0).all()
        assert (pattern.sum(-1) - 1).abs().max() < 1e-12


def test_c071_causal_pattern_is_lower_triangular_and_its_first_row_is_1_0_0() -> None:
    t = trace_attention("tiny-llama", "attn.pattern")
    for site in t:
        assert not t[site].triu(1).any()
        assert torch.equal(t[site][0, :, 0], torch.eye(6, dtype=torch.float64)[0].expand(4, 6))


def test_c072_causal_mask_blocks_strictly_above_the_diagonal() -> None:
    """With diagonal=0 a token does not attend to itself and row 0 has no key; with diagonal=2 the next token leaks."""
    positions = number_tokens(1, 6, torch.device("cpu"))
    visible, _ = self_attention_mask(positions, positions, is_causal=True).to_dense()
    assert torch.equal(~visible[0, 0], FUTURE)
    patterns = {
        diagonal: torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(diagonal).bool(), -math.inf).softmax(-1)
        for diagonal in (0, 1, 2)
    }
    assert patterns[0][0].isnan().all()
    assert not patterns[0][1:].diagonal(1).any()
    assert (patterns[1].diagonal() > 0).all()
    assert not patterns[1].diagonal(1).any()
    assert (patterns[2].diagonal(1) > 0).all()


def test_c073_mask_conventions_of_pytorch_differ() -> None:
    """Additive masks hold −inf where blocked. Bool masks are True where allowed in SDPA, and where blocked in MHA."""
    attention = nn.MultiheadAttention(8, 1, bias=False, batch_first=True, dtype=torch.float64)
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    q, k, v = (x @ weight.T for weight in attention.in_proj_weight.chunk(3))
    additive = torch.zeros(6, 6, dtype=torch.float64).masked_fill(FUTURE, -math.inf)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for mask in (additive, ~FUTURE):
        assert (F.scaled_dot_product_attention(q, k, v, attn_mask=mask) - expected).abs().max() < 1e-12
    for mask in (additive, FUTURE):
        out, _ = attention(x, x, x, attn_mask=mask)
        assert (out - attention.out_proj(expected)).abs().max() < 1e-12


def test_c075_masking_after_softmax_leaves_rows_that_do_not_sum_to_1() -> None:
    scores = torch.randn(6, 6, dtype=torch.float64)
    before = scores.masked_fill(FUTURE, -math.inf).softmax(-1)
    after = scores.softmax(-1).masked_fill(FUTURE, 0)
    assert (before.sum(-1) - 1).abs().max() < 1e-12
    assert (after.sum(-1)[:-1] < 0.999).all()
    assert (after / after.sum(-1, keepdim=True) - before).abs().max() < 1e-12


def test_c076_softmax_of_a_fully_masked_row_is_nan_and_the_library_returns_zeros() -> None:
    assert torch.full((6,), -math.inf).softmax(-1).isnan().all()
    mask = torch.tensor([[False, True, True, True, True, True]])  # the query at position 0 is padding
    t = trace_attention("tiny-gpt", "attn.pattern", "attn.z", "logits", mask=mask)
    for layer in range(2):
        assert not t[f"blocks.{layer}.attn.pattern"][0, :, 0].any()
        assert not t[f"blocks.{layer}.attn.z"][0, 0].any()
    assert t["logits"].isfinite().all()


def test_c077_visible_keys_of_encoder_decoder_and_cross_attention() -> None:
    source_mask = torch.tensor([[True, True, True, True, False, False]])
    t = trace_attention("tiny-t5", "attn.pattern", "cross.pattern", mask=source_mask)
    for layer in range(2):
        encoder = t[f"encoder.blocks.{layer}.attn.pattern"][0, :, :4] > 0  # rows 4 and 5 are padding
        assert torch.equal(encoder, source_mask.expand(4, 4, 6))
        decoder = t[f"decoder.blocks.{layer}.attn.pattern"][0] > 0
        assert torch.equal(decoder, torch.ones(4, 4, dtype=torch.bool).tril().expand(4, 4, 4))
        cross = t[f"decoder.blocks.{layer}.cross.pattern"][0] > 0
        assert torch.equal(cross, source_mask.expand(4, 4, 6))
