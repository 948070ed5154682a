"""Claims about published models, on their presets. Parameter counts of all presets: tests/config/test_presets.py."""

import pytest

import cutaway as ct
from cutaway import config as c


def shape_of(name: str) -> tuple[int, int, int]:
    """(layers, d_model, heads) of a decoder."""
    config = ct.config(name)
    return config.decoder.layers, config.d_model, config.decoder.block[0].attention.heads


def test_c169_models_of_100_layers_and_more() -> None:
    """The usual examples have 96 and 80 layers; Llama-3.1 405B is a pre-norm model of 126."""
    layers = {name: shape_of(name)[0] for name in ("gpt3-175b", "llama-3-70b", "llama-3.1-405b")}
    assert layers == {"gpt3-175b": 96, "llama-3-70b": 80, "llama-3.1-405b": 126}
    assert all(isinstance(ct.config(name).decoder.placement, c.PreNorm) for name in layers)


def test_c354_transformer_of_2017() -> None:
    config = ct.config("transformer-base")
    assert (config.d_model, config.vocab_size) == (512, 37_000)
    for stack in config.stacks.values():
        (block,) = stack.block
        assert (stack.layers, block.attention.heads, block.attention.head_dim(512)) == (6, 8, 64)
        assert (block.ffn.hidden_dim(512), block.ffn.activation) == (2048, "relu")
        assert isinstance(stack.placement, c.PostNorm)
        assert isinstance(stack.embedding.position, c.SinusoidalPosition)


def test_c355_gpt2() -> None:
    """Up to 1.56 B parameters, published as 1.5 B; output projections start at 0.02/√(2·layers)."""
    assert [shape_of(name)[0] for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")] == [12, 24, 36, 48]
    assert ct.size("gpt2-xl").num_parameters == 1_557_611_200
    config = ct.config("gpt2")
    assert isinstance(config.decoder.embedding.position, c.LearnedPosition)
    assert isinstance(config.decoder.placement, c.PreNorm)
    block = ct.build(config.replace(vocab_size=100), seed=0).decoder.blocks[3]
    for module, std in ((block.attn.f.q, 0.02), (block.attn.f.o, 0.02 / 24**0.5), (block.ffn.f.down, 0.02 / 24**0.5)):
        assert module.weight.std().item() == pytest.approx(std, rel=0.01)


def test_c356_gpt3() -> None:
    assert shape_of("gpt3-175b") == (96, 12288, 96)
    assert ct.config("gpt3-175b").vocab_size == 50_257
    assert ct.size("gpt3-175b").num_parameters == 174_604_259_328  # published as 175 B


def test_c357_llama_2_and_llama_3() -> None:
    assert shape_of("llama-2-7b")[0] == 32
    assert shape_of("llama-2-70b") == (80, 8192, 64)
    assert shape_of("llama-3-70b") == (80, 8192, 64)


def test_c358_llama_3_8b() -> None:
    config = ct.config("llama-3-8b")
    (block,) = config.decoder.block
    assert shape_of("llama-3-8b") == (32, 4096, 32)
    assert (block.attention.num_kv_heads, block.ffn.hidden_dim(4096), config.vocab_size) == (8, 14_336, 128_256)


def test_c360_positions_by_model() -> None:
    """RoPE in Llama, Gemma, Mistral, Phi and the large Falcons; ALiBi in MPT, BLOOM and Falcon-RW."""
    rope = ("llama-3-8b", "gemma-7b", "mistral-7b-v0.1", "phi-2", "phi-3-mini-4k", "falcon-7b", "falcon-40b")
    alibi = ("mpt-7b", "mpt-30b", "bloom-7b1", "bloom-176b", "falcon-rw-1b")
    positions = {name: type(ct.config(name).decoder.block[0].attention.position) for name in rope + alibi}
    assert positions == dict.fromkeys(rope, c.Rope) | dict.fromkeys(alibi, c.Alibi)


def test_c361_norms_by_model() -> None:
    rms = ("llama-2-7b", "llama-3-8b", "mistral-7b-v0.1", "gemma-7b", "qwen2.5-7b", "qwen3-8b")
    layer = ("transformer-base", "bert-base", "gpt2", "gpt3-175b")
    norms = {name: {type(stack.norm) for stack in ct.config(name).stacks.values()} for name in rms + layer}
    assert norms == {name: {c.RMSNorm} for name in rms} | {name: {c.LayerNorm} for name in layer}


def test_c364_rope_pre_norm_and_swiglu_are_common_but_not_universal_in_open_models() -> None:
    def differences(name: str) -> set[str]:
        stack = ct.config(name).decoder
        (attention, ffn), placement = (stack.block[0].attention, stack.block[0].ffn), stack.placement
        parts = {
            "positions": isinstance(attention.position, c.Rope),
            "placement": isinstance(placement, c.PreNorm),
            "ffn": isinstance(ffn, c.Gated) and ffn.activation == "silu",
        }
        return {part for part, is_standard in parts.items() if not is_standard}

    standard = ("llama-3-8b", "mistral-7b-v0.3", "qwen3-8b", "phi-3-mini-4k", "smollm2-1.7b")
    assert not any(differences(name) for name in standard)
    assert differences("gemma-2-9b") == {"placement", "ffn"}  # norms on both sides, GeGLU
    assert differences("olmo-2-7b") == {"placement"}  # norm on the output of a sublayer
    assert differences("starcoder2-7b") == {"ffn"}  # two matrices with GELU
    assert differences("command-r") == {"placement"}  # parallel residual
    assert differences("bloom-7b1") == {"positions", "ffn"}
