"""Claims about parameter counts, FLOPs and memory, on presets of published models and on small built models."""

from typing import Any

import pytest
import torch
from support.flop_and_memory_counters import count_flops
from torch import nn

import cutaway as ct
from cutaway import config as c
from cutaway.errors import InputError
from cutaway.model.ffn import build_dense_ffn
from cutaway.size import count_parameters


def classic_config(layers: int, d_model: int, vocab_size: int, *, heads: int = 32, tied: bool = False) -> c.Decoder:
    """MHA, an FFN of two matrices and width 4·d_model, LayerNorm, no biases of linear layers, no position table."""
    attention = c.MultiHead(heads=heads, position=c.NoPosition())
    block = c.Block(attention=attention, ffn=c.Mlp(bias=False))
    stack = c.Stack(layers=layers, block=block, norm=c.LayerNorm())
    return c.Decoder(vocab_size=vocab_size, d_model=d_model, decoder=stack, head=c.LMHead(tied=tied))


def small_config() -> c.Decoder:
    """Vocabulary 1000, d_model 256, 4 layers, 8 heads, FFN width 2048, 2048 learned positions, biases, dropout 0.1."""
    attention = c.MultiHead(heads=8, position=c.NoPosition(), bias=("q", "k", "v", "o"))
    stack = c.Stack(
        layers=4,
        block=c.Block(attention=attention, ffn=c.Mlp(hidden=2048)),
        embedding=c.Embedding(position=c.LearnedPosition(length=2048)),
        norm=c.LayerNorm(),
        dropout=0.1,
    )
    return c.Decoder(vocab_size=1000, d_model=256, decoder=stack, head=c.LMHead(tied=False))


@torch.no_grad()
def test_c213_forward_flops_per_token_are_2_per_weight() -> None:
    """Of each weight in a matrix product; an embedding lookup has none. 2N is 13.5 GFLOP for Llama-2 7B."""
    model = ct.build("tiny-llama", seed=0).use_kernel("explicit")
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    _, flops = count_flops(lambda: model(torch.zeros(1, 5, dtype=torch.long)))
    assert flops == 5 * 2 * weights + 5**2 * 4 * 4 * 64  # and 4·layers·d_model for the scores and values of each pair
    for name, gflop in (("llama-2-7b", 13.5), ("gpt3-175b", 349.2)):
        size = ct.size(name, context=1)
        assert 2 * size.num_parameters == pytest.approx(gflop * 1e9, rel=2e-3)
        assert size.forward_flops.total == pytest.approx(2 * size.num_parameters, rel=0.02)


def test_c214_flop_rate_of_gpt3_at_100_tokens_per_second() -> None:
    per_second = 100 * ct.size("gpt3-175b", context=1).forward_flops.total
    assert per_second == pytest.approx(34.9e12, rel=1e-3)
    assert 100 * 2 * 175e9 == 35e12


def test_c215_backward_has_twice_the_flops_of_forward() -> None:
    """Of every matrix: 4N for the gradients of inputs and weights, so 6N·tokens in all."""
    size = ct.size("gpt3-175b", mode="train", context=2048)
    forward, step = size.forward_flops.full, size.train_flops["none"].full
    for component in ("projections", "ffn", "head"):
        assert step[component] == 3 * forward[component]
    in_matrices = sum(step[component] for component in ("projections", "ffn", "head"))
    assert in_matrices == pytest.approx(6 * size.num_parameters * 2048, rel=1e-3)


def test_c216_attention_scores_are_left_out_of_2n() -> None:
    """Scores and values add 4·T·d per layer and token; in a classic block they equal the matrices at T = 6d."""
    d_model = 768
    flops = ct.size("gpt2", context=6 * d_model).forward_flops
    attention = flops.full["scores"] + flops.full["values"]
    assert attention == 4 * flops.num_tokens**2 * d_model * 12
    assert attention == flops.full["projections"] + flops.full["ffn"]
    visible = flops.visible["scores"] + flops.visible["values"]  # a causal kernel: half of the pairs
    assert visible == pytest.approx(attention / 2, rel=1e-3)
    llama = ct.size("llama-3-8b", context=1)  # 2N with its untied embedding table is 7 % too much
    assert llama.forward_flops.total / (2 * llama.num_parameters) == pytest.approx(0.935, abs=1e-3)


def test_c218_tokens_per_parameter_of_llama_3_8b() -> None:
    """1,875 and 94 follow from N = 8.0 B; the exact N gives 1,868 and 93.4."""
    budget = ct.size("llama-3-8b", mode="train", train_tokens=15 * 10**12).training_budget
    assert budget.tokens_per_parameter == pytest.approx(1868, abs=0.5)
    assert budget.train_tokens / budget.chinchilla_tokens == pytest.approx(93.4, abs=0.05)
    assert (15e12 / 8e9, 15e12 / 8e9 / 20) == (1875, 93.75)


@pytest.mark.parametrize("d_model", [64, 512])
def test_c220_classic_parameter_count(d_model: int) -> None:
    """Per layer 12d² + 4d, in all 12Nd² + 2Vd and the norms, (4N + 2)·d, which the total leaves out."""
    layers, vocab_size = 3, 101
    config = classic_config(layers, d_model, vocab_size)
    assert {layer.total for layer in count_parameters(config).per_layer} == {12 * d_model**2 + 4 * d_model}
    total = sum(parameter.numel() for parameter in ct.build(config, device="meta").parameters())
    assert total == 12 * layers * d_model**2 + 2 * vocab_size * d_model + (4 * layers + 2) * d_model


def test_c221_embedding_parameters_are_2vd_untied_and_vd_tied() -> None:
    untied, tied = (count_parameters(classic_config(3, 64, 101, tied=tied)) for tied in (False, True))
    assert untied.embedding + untied.head == 2 * 101 * 64
    assert tied.embedding + tied.head == 101 * 64
    gpt2 = count_parameters(ct.config("gpt2"))  # left out of the formula: biases, positions, final norm
    left_out = gpt2.total - 12 * 12 * 768**2 - 50257 * 768
    assert left_out == 12 * (4 + 4 + 1) * 768 + 12 * 2 * 2 * 768 + 1024 * 768 + 2 * 768


def test_c222_gpt3_parameters() -> None:
    in_layers, table = 12 * 96 * 12288**2, 50257 * 12288
    assert [in_layers, in_layers + 2 * table, in_layers + table] == pytest.approx([173.9e9, 175.2e9, 174.6e9], rel=5e-4)
    assert ct.size("gpt3-175b").num_parameters == 174_604_259_328  # tied, with biases, norms and positions


def test_c223_6_4_billion_is_without_embeddings() -> None:
    counts = count_parameters(classic_config(32, 4096, 50_000))
    assert sum(layer.total for layer in counts.per_layer) == pytest.approx(6.44e9, rel=1e-3)
    assert counts.total == pytest.approx(6.85e9, rel=1e-3)


def test_c224_12_6_billion_is_without_embeddings_and_does_not_fit_16_gb() -> None:
    counts = count_parameters(classic_config(40, 5120, 50_000))
    assert sum(layer.total for layer in counts.per_layer) == pytest.approx(12.58e9, rel=1e-3)
    assert counts.total == pytest.approx(13.09e9, rel=1e-3)
    assert 2 * counts.total > 26e9


def test_c225_8_billion_fp16_parameters_fill_16_gb() -> None:
    """Nothing is left for the cache and activations; Llama-3 8B exceeds 16 GB by its weights alone."""
    memory = ct.size("llama-3-8b", context=8192).memory
    assert memory.bytes_by_component["weights"] == 16_060_522_496 > 16e9
    assert memory.bytes_by_component["kv cache"] == 2**30
    assert memory.total_bytes > 18e9


def test_c226_ffn_parameters_at_width_4096() -> None:
    ffn = build_dense_ffn(c.Mlp(bias=False), 4096)
    assert sum(parameter.numel() for parameter in ffn.parameters()) == 2 * 4096 * 16384 == 134_217_728


def test_c228_gqa_attention_has_2_5_d_squared_parameters() -> None:
    (attention,) = {layer.attention for layer in count_parameters(ct.config("llama-3-8b")).per_layer}
    assert attention == 5 * 4096**2 // 2 == 41_943_040
    assert 4 * 4096**2 == 67_108_864  # the count for MHA


def test_c229_llama_3_8b_exact_count() -> None:
    """MHA and one table give 8.31 B; GQA takes 0.81 B away, the untied head adds 0.53 B."""
    counts, d_model = count_parameters(ct.config("llama-3-8b")), 4096
    with_mha_and_one_table = 32 * (4 * d_model**2 + 3 * d_model * 14336) + 128256 * d_model
    assert with_mha_and_one_table == 8_309_964_800
    gqa, head, norms = 32 * (d_model**2 * 3 // 2), 128256 * d_model, 65 * d_model
    assert counts.total == with_mha_and_one_table - gqa + head + norms == 8_030_261_248


def test_c231_head_count_does_not_change_the_size() -> None:
    config = classic_config(2, 64, 101, heads=4)
    path = "decoder.block.attention"
    total = count_parameters(config).total
    assert [count_parameters(config.replace({f"{path}.heads": h})).total for h in (1, 2, 8, 16)] == [total] * 4
    assert count_parameters(config.replace(vocab_size=102)).total == total + 2 * 64
    assert count_parameters(config.replace({f"{path}.kv_heads": 1})).total == total - 2 * 2 * 64 * 48


def test_c232_small_listing_has_6297088_parameters() -> None:
    model = ct.build(small_config(), seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_297_088
    assert model(torch.zeros(2, 16, dtype=torch.long)).shape == (2, 16, 1000)


def test_c233_small_listing_has_an_ffn_of_8_times_the_width_and_attention() -> None:
    """With the usual width of 4·256, it has 4,195,840 parameters."""
    config = small_config()
    assert config.decoder.block[0].ffn.hidden_dim(256) == 2048 == 8 * 256
    smaller = config.replace({"decoder.block.ffn.hidden": 1024})
    assert count_parameters(smaller).total == 6_297_088 - 4 * (2 * 256 + 1) * 1024 == 4_195_840
    assert {layer.attention for layer in count_parameters(config).per_layer} == {4 * (256**2 + 256)}


@torch.no_grad()
def test_c234_train_mode_has_dropout_and_long_inputs_raise() -> None:
    model, tokens = ct.build(small_config(), seed=0), torch.zeros(2, 16, dtype=torch.long)
    assert torch.equal(model.eval()(tokens), model(tokens))
    assert not torch.equal(model.train()(tokens), model(tokens))
    with pytest.raises(InputError, match="2048"):
        model(torch.zeros(1, 2049, dtype=torch.long))
    with pytest.raises(IndexError):
        nn.Embedding(2048, 4)(torch.tensor([2048]))


@torch.no_grad()
def test_c235_score_flops_and_memory_are_quadratic_and_ffn_flops_linear() -> None:
    config = ct.config("tiny-gpt")  # 2 layers, d_model 32, d_ff 128, 4 heads
    model = ct.build(config, seed=0)
    for length in (8, 16, 32):
        flops = ct.size(config, context=length).forward_flops.full
        assert flops["scores"] == flops["values"] == 2 * 2 * length**2 * 32
        assert flops["ffn"] == 2 * 4 * length * 32 * 128
        with ct.trace(model, "blocks.0.attn.scores") as t:
            model(torch.zeros(3, length, dtype=torch.long))
        assert t["blocks.0.attn.scores"].numel() == 3 * 4 * length**2


@pytest.mark.parametrize(("name", "ratio"), [("gpt2", 2.0), ("llama-2-7b", 2.016), ("llama-3-8b", 4.2)])
def test_c236_ffn_parameters_against_attention_parameters(name: str, ratio: float) -> None:
    block: Any = ct.build(name, device="meta").decoder.blocks[0]
    ffn, attention = (sum(p.numel() for p in x.parameters() if p.ndim == 2) for x in (block.ffn, block.attn))
    assert ffn / attention == pytest.approx(ratio, abs=5e-4)


def shape_of(name: str) -> tuple[int, int, int]:
    config = ct.config(name)
    return config.d_model, config.decoder.layers, config.decoder.block[0].attention.heads


def test_c238_typical_ranges_do_not_contain_gpt3() -> None:
    """d_model 2048–8192, 24–80 layers, 16–64 heads: Llama-3 lies inside; GPT-3, GPT-2 and Llama-3.1 405B outside."""
    ranges = ((2048, 8192), (24, 80), (16, 64))
    inside = {
        name: [low <= value <= high for value, (low, high) in zip(shape_of(name), ranges, strict=True)]
        for name in ("llama-3-8b", "llama-3-70b", "gpt2", "gpt3-175b", "llama-3.1-405b")
    }
    assert inside == {"llama-3-8b": [True] * 3, "llama-3-70b": [True] * 3} | {
        name: [False] * 3 for name in ("gpt2", "gpt3-175b", "llama-3.1-405b")
    }


def test_c239_further_ranges_have_exceptions_among_published_models() -> None:
    """d_head 64–128: Gemma has 256. KV heads from 8: Falcon 7B has 1, Qwen2.5 7B 4. Context from 4K: GPT-2 has 1K."""
    names = ("llama-3-8b", "gemma-7b", "falcon-7b", "qwen2.5-7b", "gpt2")
    configs = {name: ct.config(name) for name in names}
    attentions = {name: config.decoder.block[0].attention for name, config in configs.items()}
    d_heads = {name: attentions[name].head_dim(configs[name].d_model) for name in names}
    assert {name: d for name, d in d_heads.items() if not 64 <= d <= 128} == {"gemma-7b": 256}
    kv_heads = {name: attention.num_kv_heads for name, attention in attentions.items()}
    assert {name: n for name, n in kv_heads.items() if n < 8} == {"falcon-7b": 1, "qwen2.5-7b": 4}
    assert {name for name, config in configs.items() if config.context < 4096} == {"gpt2", "falcon-7b"}
