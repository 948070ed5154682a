"""Claims on the stages of a forward pass. Each test name begins with the id of the claim."""

import pytest
import torch
from support.config_strategies import build_randomized_model, random_tokens

import cutaway as ct
from cutaway.lens import sites
from cutaway.model.attention import LayerContext
from cutaway.model.masks import number_tokens

SEQ_LEN = 6
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9]])


def build_double(name: str) -> ct.Transformer:
    """A tiny preset in fp64, in which every parameter affects the output."""
    return build_randomized_model(ct.config(name), torch.float64)


def build_contexts(model: ct.Transformer, dtype: torch.dtype = torch.float64) -> list[LayerContext]:
    """Inputs of each block besides the residual stream, for one sequence of SEQ_LEN tokens."""
    positions = number_tokens(1, SEQ_LEN, torch.device("cpu"))
    return model.decoder.build_layer_contexts(positions, dtype, None, {})


@torch.no_grad()
def test_c001_order_of_the_stages_of_a_decoder() -> None:
    model = build_double("tiny-gpt")
    stack = model.decoder
    x = stack.embed.token.weight[TOKENS] + stack.embed.position.table.weight[:SEQ_LEN]
    for block, context in zip(stack.blocks, build_contexts(model), strict=True):
        x = block(x, context)
    logits = stack.final_norm(x) @ model.head.matrix.weight.T
    assert (logits - model(TOKENS)).abs().max() < 1e-12
    assert logits.softmax(-1).shape[-1] == model.config.vocab_size


@torch.no_grad()
def test_c002_pre_norm_block_is_two_residual_additions() -> None:
    model = build_double("tiny-gpt")
    block, context = model.decoder.blocks[0], build_contexts(model)[0]
    with ct.trace(model, "blocks.0.resid_pre", "blocks.0.resid_post") as t:
        model(TOKENS)
    x = t["blocks.0.resid_pre"]
    h = x + block.attn.f(block.attn.norm_in(x), context)
    y = h + block.ffn.f(block.ffn.norm_in(h))
    assert (y - t["blocks.0.resid_post"]).abs().max() < 1e-12


@torch.no_grad()
def test_c003_named_steps_of_a_block() -> None:
    model = build_double("tiny-gpt")
    names = ("resid_pre", "attn.in", "attn.out", "resid_mid", "ffn.in", "ffn.out", "resid_post")
    with ct.trace(model, *(f"blocks.1.{name}" for name in names)) as t:
        model(TOKENS)
    block, (x, x1, a, x2, x3, f, x4) = model.decoder.blocks[1], (t[f"blocks.1.{name}"] for name in names)
    assert torch.equal(x1, block.attn.norm_in(x))
    assert torch.equal(x2, x + a)
    assert torch.equal(x3, block.ffn.norm_in(x2))
    assert torch.equal(f, block.ffn.f(x3))
    assert torch.equal(x4, x2 + f)


@pytest.mark.parametrize(
    ("name", "prefix", "writes"), [("tiny-llama", "", 2), ("tiny-t5", "encoder.", 2), ("tiny-t5", "decoder.", 3)]
)
@torch.no_grad()
def test_c004_number_of_additive_writes_per_block(name: str, prefix: str, writes: int) -> None:
    model = build_double(name)
    block = f"{prefix}blocks.1."
    outputs = [site for site in sites(model) if site.startswith(block) and site.endswith(".out")]
    assert len(outputs) == writes
    with ct.trace(model, f"{block}resid_pre", f"{block}resid_post", *outputs) as t:
        model(*[TOKENS] * len(model.stacks))
    total = t[f"{block}resid_pre"] + sum(t[site] for site in outputs)
    assert (total - t[f"{block}resid_post"]).abs().max() < 1e-12


@torch.no_grad()
def test_c005_shapes_of_one_forward_pass() -> None:
    """The library stores q, k and v as (B, T, h, d_head); transposed, they have the claimed shape (B, h, T, d_head)."""
    model = ct.build("tiny-gpt", seed=0)
    with ct.trace(model, "blocks.0.*", "logits") as t:
        model(random_tokens(model.config, 2, SEQ_LEN, 0))
    batch, d_model, heads, d_head = 2, 32, 4, 8
    for name in ("q", "k", "v"):
        assert t[f"blocks.0.attn.{name}"].transpose(1, 2).shape == (batch, heads, SEQ_LEN, d_head)
    for name in ("resid_pre", "attn.out", "resid_post"):
        assert t[f"blocks.0.{name}"].shape == (batch, SEQ_LEN, d_model)
    assert t["blocks.0.attn.scores"].shape == (batch, heads, SEQ_LEN, SEQ_LEN)
    assert t["logits"].shape == (batch, SEQ_LEN, model.config.vocab_size)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-gemma", "tiny-bert"])
@torch.no_grad()
def test_c006_blocks_keep_the_shape_of_the_residual_stream(name: str) -> None:
    model = ct.build(name, seed=0)
    with ct.trace(model, "resid_pre", "resid_post") as t:
        model(TOKENS)
    assert {t[site].shape for site in t} == {(1, SEQ_LEN, model.config.d_model)}
    num_layers = len(next(iter(model.stacks.values())).blocks)
    for layer in range(1, num_layers):
        assert torch.equal(t[f"blocks.{layer - 1}.resid_post"], t[f"blocks.{layer}.resid_pre"])


@torch.no_grad()
def test_c007_softmax_of_logits_is_a_distribution_over_the_vocabulary() -> None:
    probabilities = build_double("tiny-gpt")(TOKENS).softmax(-1)
    assert probabilities.shape == (1, SEQ_LEN, 257)
    assert (probabilities > 0).all()
    assert (probabilities.sum(-1) - 1).abs().max() < 1e-12


@torch.no_grad()
def test_c008_only_attention_mixes_positions() -> None:
    model = build_double("tiny-gpt")
    block, context = model.decoder.blocks[0], build_contexts(model)[0]
    x = torch.randn(1, SEQ_LEN, 32, dtype=torch.float64)
    perturbed = x.clone()
    perturbed[0, 2, 0] += 1
    for sublayer in (block.ffn, block.ffn.norm_in, model.decoder.final_norm):
        assert (sublayer(perturbed) != sublayer(x)).any(-1)[0].nonzero().flatten().tolist() == [2]
    changed = (block.attn(perturbed, context) - block.attn(x, context)).abs().amax(-1)[0] > 1e-9
    assert changed.tolist() == [False, False, True, True, True, True]


def test_c009_every_position_predicts_and_generation_uses_the_last_row() -> None:
    model = build_double("tiny-gpt")
    with torch.no_grad():
        logits = model(TOKENS)
        for t in range(SEQ_LEN):
            assert (logits[:, t] - model(TOKENS[:, : t + 1])[:, -1]).abs().max() < 1e-12
    completion = ct.generate(model, TOKENS[0].tolist(), max_new_tokens=1, temperature=0)[0]
    assert list(completion.tokens) == [int(logits[0, -1].argmax())]


@torch.no_grad()
def test_c010_norm_does_not_change_the_skip_path() -> None:
    """With gains of 0 the sublayers read zeros, and the residual stream stays the raw embedding."""
    model = build_double("tiny-llama")
    for block in model.decoder.blocks:
        block.attn.norm_in.weight.zero_()
        block.ffn.norm_in.weight.zero_()
    with ct.trace(model, "embed", "attn.in", "ffn.in", "blocks.3.resid_post") as t:
        model(TOKENS)
    assert not any(t[site].any() for site in t if site.endswith(".in"))
    assert torch.equal(t["blocks.3.resid_post"], t["embed"])


@torch.no_grad()
def test_c011_rope_rotates_q_and_k_in_every_layer_and_adds_nothing() -> None:
    model = build_double("tiny-llama")
    with ct.trace(model, "embed", "attn.in", "attn.q") as t:
        model(TOKENS)
    assert torch.equal(t["embed"], model.decoder.embed.token.weight[TOKENS])
    for layer, block in enumerate(model.decoder.blocks):
        unrotated = block.attn.f.q(t[f"blocks.{layer}.attn.in"]).unflatten(-1, (4, 16))
        difference = (t[f"blocks.{layer}.attn.q"] - unrotated).abs().amax((-1, -2))[0]
        assert difference[0] < 1e-12  # position 0 is rotated by the angle 0
        assert (difference[1:] > 1e-3).all()


@torch.no_grad()
def test_c012_decoder_without_positions_and_mask_is_order_blind_and_leaks() -> None:
    model = build_double("tiny-gpt")
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    changed = TOKENS.clone()
    changed[0, -1] = 7
    with ct.edit(model, {"mask": "drop", "positions": "drop"}):
        logits = model(TOKENS)
        assert (model(TOKENS[:, order]) - logits[:, order]).abs().max() < 1e-12
        assert (model(changed) - logits)[:, :-1].abs().amax(-1).min() > 1e-6
    assert torch.equal(model(changed)[:, :-1], model(TOKENS)[:, :-1])


@pytest.mark.parametrize(("hardware", "milliseconds"), [("h200", 2.9), ("h100", 4.2), ("a100", 6.9)])
def test_c013_time_to_read_14_gb_of_weights(hardware: str, milliseconds: float) -> None:
    """Decoding at batch size 1 is bound by bandwidth. Llama 2 7B reads 13.2 GB: all fp16 weights but the embedding."""
    estimate = ct.size("llama-2-7b", dtype="fp16", hardware=hardware, context=1)
    device, decode = estimate.options.hardware, estimate.decode_time
    assert device is not None
    assert decode is not None
    assert round(14e9 / device.bandwidth * 1e3, 1) == milliseconds
    assert decode.bottleneck == "bandwidth"
    assert decode.min_seconds * device.bandwidth == pytest.approx(13.2e9, rel=2e-3)


def test_c014_embedding_scale_is_sqrt_d_in_gemma_and_1_in_gpt_and_llama() -> None:
    scales = {
        name: ct.config(name).decoder.embedding.resolve_scale(ct.config(name).d_model)
        for name in ("gpt2", "gpt3-175b", "llama-2-7b", "llama-3-8b", "gemma-2b", "gemma-3-27b")
    }
    assert [scales[name] for name in ("gpt2", "gpt3-175b", "llama-2-7b", "llama-3-8b")] == [1.0] * 4
    assert scales["gemma-2b"] == 2048**0.5
    assert scales["gemma-3-27b"] == 5376**0.5
