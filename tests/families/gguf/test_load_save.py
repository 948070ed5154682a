"""GGUF: save and load of every architecture, loading in transformers, quantization types against the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from support.family_configs import random_llama_config
from support.family_parity import randomize_weights, rng

import cutaway as ct
from cutaway.errors import CutawayError, InputError, WeightError
from cutaway.families.config_tree import diff_configs
from cutaway.families.gguf.architectures import GGUF_ARCHITECTURES
from cutaway.families.gguf.file_format import MIXED_TYPES, QUANTIZATIONS, GGUFFile, write_gguf
from cutaway.families.gguf.load_save import save_gguf
from cutaway.families.gguf.rope_fields import llama3_rope_factors
from cutaway.tokenizer import byte_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}


def peer_config(arch: str, seed: int, **overrides: Any) -> Any:
    r = rng(seed)
    sizes = SIZES | {"num_hidden_layers": r.choice([2, 3]), "tie_word_embeddings": r.random() < 0.5}
    if arch == "llama":
        scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
        rope_settings: list[dict[str, Any]] = [DEFAULT_ROPE, {"rope_parameters": scaling}]
        return transformers.LlamaConfig(**sizes | rope_settings[seed % 2])
    if arch in ("qwen2", "qwen3"):
        config_class = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}[arch]
        head_dim = {"head_dim": 12} if arch == "qwen3" else {}
        return config_class(**sizes | DEFAULT_ROPE | head_dim | overrides)
    if arch in ("gemma2", "gemma3"):
        config_class = {"gemma2": transformers.Gemma2Config, "gemma3": transformers.Gemma3TextConfig}[arch]
        extra = {
            "head_dim": 12,
            "sliding_window": 5,
            "num_hidden_layers": r.choice([2, 7]),
            "query_pre_attn_scalar": 12,
        }
        return config_class(**sizes | extra | {"tie_word_embeddings": True} | overrides)
    if arch == "phi3":
        return transformers.Phi3Config(**sizes | DEFAULT_ROPE | {"sliding_window": r.choice([None, 6])} | overrides)
    tied = {"tie_word_embeddings": sizes["tie_word_embeddings"]}
    return transformers.GPT2Config(vocab_size=97, n_positions=40, n_embd=32, n_layer=2, n_head=4, **tied)


def save_random_model(arch: str, seed: int, directory: Path, **overrides: Any) -> tuple[Any, ct.Checkpoint, Path]:
    model = transformers.AutoModelForCausalLM.from_config(peer_config(arch, seed, **overrides)).float().eval()
    randomize_weights(model, seed)
    model.save_pretrained(directory / "hf")
    checkpoint = ct.load(directory / "hf")
    return model, checkpoint, save_gguf(checkpoint, directory / "model.gguf")


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("arch", GGUF_ARCHITECTURES)
def test_gguf_round_trip(arch: str, seed: int, tmp_path: Path) -> None:
    model, checkpoint, path = save_random_model(arch, seed, tmp_path)
    loaded = ct.load(path)
    assert loaded.family == checkpoint.family
    differences = [line for line in diff_configs(checkpoint.config, loaded.config) if "dropout" not in line]
    assert not differences
    tokens = torch.randint(0, 97, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(tokens), model(tokens).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("has_eot", [True, False])
def test_eos_token_ids_round_trip(has_eot: bool, tmp_path: Path) -> None:
    """With end-of-turn tokens in the metadata, and with the end-of-text token only, as in most files."""
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens(["<end_of_turn>", "<tool>"])
    model = ct.build(ct.config(ct.config("tiny-llama").model_dump() | {"vocab_size": tokenizer.vocab_size}), seed=0)
    end_of_turn, tool = tokenizer.token_to_id("<end_of_turn>"), tokenizer.token_to_id("<tool>")
    eos_token_ids = [tokenizer.eos_token_id, end_of_turn, tool] if has_eot else tokenizer.eos_token_id
    generation = {"eos_token_id": eos_token_ids}
    checkpoint = ct.Checkpoint(model, model.config, generation_config=generation, tokenizer_loader=lambda: tokenizer)
    loaded = ct.load(save_gguf(checkpoint, tmp_path / "model.gguf")).generation_config["eos_token_id"]
    assert loaded == (eos_token_ids if has_eot else [tokenizer.eos_token_id, end_of_turn])


# Settings that transformers does not read from GGUF; it uses these defaults.
UNREAD_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "phi3": {"vocab_size": 32064, "pad_token_id": 32000, "sliding_window": None},
}


@pytest.mark.parametrize("arch", GGUF_ARCHITECTURES)
def test_transformers_loads_saved_gguf(arch: str, tmp_path: Path) -> None:
    model, _, path = save_random_model(arch, 0, tmp_path, **UNREAD_SETTINGS.get(arch, {}))
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).eval()
    tokens = torch.randint(0, 97, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(opened(tokens).logits, model(tokens).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantized_values_match_gguf_package(quantization: str, tmp_path: Path) -> None:
    _, checkpoint, _ = save_random_model("qwen2", 0, tmp_path)
    path = save_gguf(checkpoint, tmp_path / "quantized.gguf", quantization=quantization)
    file = GGUFFile(path)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(file.read_tensor(tensor.name).float().numpy(), expected), tensor.name
    storage_types = {info.storage_type for info in file.tensor_infos.values()}
    assert len(storage_types) == (1 if quantization == "f32" else 3 if quantization in MIXED_TYPES else 2)


@pytest.mark.parametrize("tied", [False, True])
def test_mixtures_have_the_types_of_llama_cpp(tied: bool, tmp_path: Path) -> None:
    """Types that llama-quantize chooses for 16 layers: `use_more_bits` and the rules of output and fused matrices."""
    names = ["token_embd.weight", *([] if tied else ["output.weight"])]
    parts = ("attn_q", "attn_v", "attn_qkv", "ffn_up", "ffn_down")
    names += [f"blk.{layer}.{part}.weight" for layer in range(16) for part in parts]
    tensors = [((name,), lambda: [torch.randn(1, 256)], 256) for name in names]
    for quantization, most, fused, file_type in (("q4_k_m", "Q4_K", "Q5_K", 15), ("q5_k_m", "Q5_K", "Q6_K", 17)):
        path = tmp_path / f"{quantization}.gguf"
        write_gguf(path, "llama", {"llama.block_count": 16}, tensors, quantization)
        file = GGUFFile(path)
        assert file.metadata["general.file_type"] == file_type
        types = {name: info.quantization for name, info in file.tensor_infos.items() if len(info.shape) == 2}
        assert types.pop("token_embd.weight") == ("Q6_K" if tied else most)
        assert types.pop("output.weight", "Q6_K") == "Q6_K"
        for name, actual in types.items():
            more_bits = int(name.split(".")[1]) in (0, 1, 4, 7, 10, 13, 14, 15)
            is_larger = name.endswith(("attn_v.weight", "ffn_down.weight")) and more_bits
            assert actual == ("Q6_K" if is_larger else fused if "attn_qkv" in name else most), name


def test_weights_that_a_type_does_not_represent_are_refused(tmp_path: Path) -> None:
    _, checkpoint, _ = save_random_model("llama", 0, tmp_path)
    path = tmp_path / "out.gguf"
    with pytest.raises(InputError, match=r"'q3' is not a supported quantization; use one of f32, .*, q4_k_m"):
        save_gguf(checkpoint, path, quantization="q3")
    with torch.no_grad():
        checkpoint.model.stacks["decoder"].blocks[0].attn.f.q.weight[0, 0] = 1e6
    for quantization in ("f16", "q8_0", "q4_k_m"):
        with pytest.raises(WeightError, match=r"'blk.0.attn_q.weight' has values outside of the range of f16"):
            save_gguf(checkpoint, path, quantization=quantization)
    assert not path.exists()
    save_gguf(checkpoint, path, quantization="bf16")


@pytest.mark.parametrize("ggml_type", [k for k in gguf.GGMLQuantizationType if k in gguf.quants._type_traits])
def test_every_quantization_type_is_read(ggml_type: Any, tmp_path: Path) -> None:
    """Random bytes of each quantization type that the gguf package can dequantize."""
    block, size = gguf.GGML_QUANT_SIZES[ggml_type]
    raw = np.random.default_rng(0).integers(0, 255, (3, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("a", raw, raw_shape=raw.shape, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "x.gguf")
    assert file.tensor_infos["a"].shape == (3, 2 * block)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, ggml_type)
    np.testing.assert_array_equal(file.read_tensor("a").float().numpy(), expected)


def test_metadata_matches_gguf_package(tmp_path: Path) -> None:
    _, _, path = save_random_model("gemma3", 1, tmp_path)
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata.keys() == expected.keys()
    for name, value in expected.items():
        assert file.metadata[name] == pytest.approx(value) if isinstance(value, float) else file.metadata[name] == value
    for tensor in reader.tensors:
        assert file.tensor_infos[tensor.name].shape == tuple(int(n) for n in tensor.shape)[::-1]


def test_llama3_rope_factors_match_rope() -> None:
    """Stored factors are the divisors of the RoPE frequencies."""
    scaling = ct.config("llama-3.2-1b").decoder.block[0].attention.position.scaling
    frequency = ct.build("llama-3-8b", device="meta").decoder.positions["0"].compute_constants()["frequency"]
    factors = torch.tensor(llama3_rope_factors(scaling, 500000.0, 128))
    scaled = ct.config("llama-3-8b").decoder.block[0].attention.position.replace(scaling=scaling)
    from cutaway.model.rope import Rope

    torch.testing.assert_close(frequency / factors, Rope(scaled, 128).compute_constants()["frequency"])


def test_rope_scaling_round_trip(tmp_path: Path) -> None:
    for name, settings in (("a", random_llama_config(3)), ("b", random_llama_config(1))):
        settings = settings | {"head_dim": 8, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
        model.save_pretrained(tmp_path / name)
        checkpoint = ct.load(tmp_path / name)
        loaded = ct.load(save_gguf(checkpoint, tmp_path / f"{name}.gguf"))
        assert not diff_configs(loaded.config, checkpoint.config)


def test_config_without_gguf_architecture_is_an_error(tmp_path: Path) -> None:
    model = ct.build("tiny-bert", seed=0)
    with pytest.raises(CutawayError, match="GGUF"):
        save_gguf(ct.Checkpoint(model, model.config), tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())
