"""Claims on tokens and embeddings. Each test name begins with the id of the claim."""

import pytest
import torch
import torch.nn.functional as F
from support.config_strategies import build_randomized_model

import cutaway as ct
from cutaway import config as c
from cutaway.model.positions import SinusoidalPosition


@torch.no_grad()
def test_c015_embedding_is_a_row_lookup_and_equals_one_hot_times_matrix() -> None:
    model = ct.build("tiny-llama", seed=0, dtype=torch.float64)
    table, tokens = model.decoder.embed.token.weight, torch.tensor([[7, 0, 255, 7]])
    with ct.trace(model, "embed") as t:
        model(tokens)
    assert table.shape == (256, 64)
    assert torch.equal(t["embed"], table[tokens])
    assert torch.equal(t["embed"], F.one_hot(tokens, 256).double() @ table)


def test_c016_embedding_of_the_2017_transformer() -> None:
    config = ct.config("transformer-base")
    assert (config.d_model, config.vocab_size) == (512, 37_000)
    for stack in config.stacks.values():
        assert stack.embedding.resolve_scale(config.d_model) == pytest.approx(22.627, abs=1e-3)


@pytest.mark.parametrize(("std", "rms"), [(512**-0.5, 1.0), (1.0, 22.627), (0.02, 0.4525)])
@torch.no_grad()
def test_c017_scaled_embedding_matches_the_sinusoids_only_for_std_1_over_sqrt_d(std: float, rms: float) -> None:
    """Sinusoids have rms 0.707 exactly, because sin² + cos² = 1 in each pair."""
    encoding = SinusoidalPosition(c.SinusoidalPosition(), 512).encode(100).double()
    assert (encoding.square().mean(-1).sqrt() - 0.5**0.5).abs().max() < 1e-7
    stack = c.Stack(
        layers=1, block=c.Block(attention=c.MultiHead(heads=8)), embedding=c.Embedding(scale="sqrt_d_model")
    )
    model = ct.build(c.Decoder(vocab_size=200, d_model=512, decoder=stack, init=c.NormalInit(std=std)), seed=0)
    with ct.trace(model, "embed") as t:
        model(torch.arange(200).view(2, 100))
    assert t["embed"].square().mean().sqrt().item() == pytest.approx(rms, rel=0.01)


@torch.no_grad()
def test_c018_tied_head_is_the_transposed_embedding_and_saves_v_times_d() -> None:
    model, tokens = build_randomized_model(ct.config("tiny-gpt"), torch.float64), torch.tensor([[3, 1, 4]])
    assert (model(tokens) - model.hidden_states(tokens) @ model.decoder.embed.token.weight.T).abs().max() < 1e-12
    gpt2 = ct.config("gpt2")
    untied = gpt2.replace({"head.tied": False})
    assert ct.size(untied).num_parameters - ct.size(gpt2).num_parameters == 50_257 * 768 == 38_597_376


def test_c020_ids_depend_on_tokenizer_and_leading_space() -> None:
    tokenizer = ct.load("tiny-english").tokenizer
    assert tokenizer.encode("cat") == [66, 288]
    assert tokenizer.encode(" cat") == [478]
    assert [tokenizer.decode([token]) for token in (66, 288, 478)] == ["c", "at", " cat"]


def test_c021_vocabulary_sizes_and_the_table_of_llama_3() -> None:
    """Decoder presets have 32,000 to 262,208 tokens: Gemma, BLOOM, Command R and Aya are above 200K."""
    sizes = {name: ct.config(name).vocab_size for name in ct.presets() if not name.startswith("tiny-")}
    decoders = {name: size for name, size in sizes.items() if ct.config(name).form == "decoder"}
    assert (min(decoders.values()), max(decoders.values())) == (32_000, 262_208)
    assert {name.split("-")[0] for name, size in decoders.items() if size > 202_000} == {
        "bloom", "command", "aya", "gemma"
    }  # fmt: skip
    assert min(sizes.values()) == sizes["albert-base-v2"] == 30_000
    assert ct.size("llama-3-8b").parameters.embedding == 128_256 * 4096 == 525_336_576
