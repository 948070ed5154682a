"""read_generation_config equals transformers; wrong types are errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import cutaway as ct
from cutaway.errors import InputError
from cutaway.generate.generation_config import GenerationConfig, read_generation_config
from cutaway.tokenizer import byte_tokenizer

BART = {
    "vocab_size": 40, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1,
    "decoder_attention_heads": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 30,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_bos_token_id": 0,
    "forced_eos_token_id": 2, "no_repeat_ngram_size": 3, "num_beams": 4, "length_penalty": 2.0, "min_length": 5,
    "max_length": 14, "early_stopping": True, "bad_words_ids": [[2], [1], [7, 8]], "suppress_tokens": [9],
    "begin_suppress_tokens": [10, 11], "repetition_penalty": 1.25,
}  # fmt: skip
"""Settings of published summarization and translation models."""


def to_transformers_names(config: GenerationConfig) -> dict[str, Any]:
    """A GenerationConfig under transformers' key names."""
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "decoder_start_token_id": config.decoder_start_token_id,
        "forced_bos_token_id": config.forced_bos_token_id,
        "forced_eos_token_id": list(config.forced_eos_token_ids),
        "no_repeat_ngram_size": config.no_repeat_ngram_size,
        "num_beams": config.num_beams,
        "repetition_penalty": config.repetition_penalty,
        "length_penalty": config.length_penalty,
        "early_stopping": config.early_stopping,
        "min_length": config.min_length,
        "max_length": config.max_length,
        "suppress_tokens": list(config.suppress_tokens),
        "begin_suppress_tokens": list(config.begin_suppress_tokens),
    }


def check_against_transformers(directory: Path) -> GenerationConfig:
    """Compare the GenerationConfig of a directory with transformers'."""
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).generation_config
    checkpoint = ct.load(directory)
    config = read_generation_config(checkpoint.generation_config, checkpoint.hf_config, checkpoint.tokenizer)
    defaults = reference._get_default_generation_params() | {"max_length": None}
    for key, actual in to_transformers_names(config).items():
        value = getattr(reference, key)
        value = defaults.get(key) if value is None else value
        if isinstance(actual, list):
            value = [] if value is None else value if isinstance(value, list) else [value]
        assert actual == value, key
    return config


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("left_out", [(), ("num_beams", "early_stopping", "forced_bos_token_id"), tuple(SETTINGS)])
def test_config_equals_transformers(file: str, left_out: tuple[str, ...], tmp_path: Path) -> None:
    """In generation_config.json, or in config.json as in older checkpoints."""
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))
    model.save_pretrained(tmp_path)
    settings = {key: value for key, value in SETTINGS.items() if key not in left_out}
    config = json.loads((tmp_path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in SETTINGS}
    if file == "config.json":
        (tmp_path / "generation_config.json").unlink()
        config |= settings
    else:
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps(config))
    generation_config = check_against_transformers(tmp_path)
    if not left_out:
        assert generation_config.bad_words_ids == ((1,), (7, 8))  # EOS tokens are removed
        assert generation_config.pad_token_id == 1


def test_force_bos_token_to_be_generated() -> None:
    old = {"force_bos_token_to_be_generated": True, "bos_token_id": 3}
    assert read_generation_config({}, old).forced_bos_token_id == 3
    assert read_generation_config({}, old | {"force_bos_token_to_be_generated": False}).forced_bos_token_id is None


def test_token_ids_fall_back_to_config_and_tokenizer() -> None:
    """Token ids fall back to config.json, then to the tokenizer; other settings do not."""
    tokenizer = byte_tokenizer()
    assert read_generation_config({}, {}, None) == GenerationConfig()
    from_tokenizer = read_generation_config({}, {}, tokenizer)
    assert (from_tokenizer.eos_token_ids, from_tokenizer.bos_token_id, from_tokenizer.pad_token_id) == (
        (tokenizer.eos_token_id,),
        tokenizer.bos_token_id,
        tokenizer.pad_token_id,
    )
    from_config = read_generation_config(
        {"temperature": 0.6}, {"eos_token_id": [5, 6], "num_beams": 4, "pad_token_id": -1}, None
    )
    assert (from_config.eos_token_ids, from_config.num_beams, from_config.pad_token_id) == ((5, 6), 1, 5)
    assert read_generation_config({"eos_token_id": 0}, {"eos_token_id": 5}, tokenizer).eos_token_ids == (0,)
    assert read_generation_config({"bos_token_id": 4}, {}, None).decoder_start_token_id == 4
    assert (
        read_generation_config({"bos_token_id": 4, "decoder_start_token_id": 0}, {}, None).decoder_start_token_id == 0
    )
    assert read_generation_config({"bos_token_id": 4}, {"decoder_start_token_id": 7}, None).decoder_start_token_id == 7


def test_length_limits_with_and_without_prompt() -> None:
    config = read_generation_config({"max_length": 20, "min_length": 8}, {})
    assert (config.max_new_tokens_for(5), config.min_new_tokens_for(5)) == (15, 3)
    assert (config.max_new_tokens_for(30), config.min_new_tokens_for(30)) == (0, 0)
    new = read_generation_config({"max_length": 20, "min_length": 8, "max_new_tokens": 4, "min_new_tokens": 1}, {})
    assert (new.max_new_tokens_for(5), new.min_new_tokens_for(5)) == (4, 1)
    assert read_generation_config({}, {}).max_new_tokens_for(5) is None


WRONG: list[tuple[str, Any]] = [
    ("eos_token_id", "2"),
    ("eos_token_id", [2, "3"]),
    ("eos_token_id", 2.0),
    ("eos_token_id", True),
    ("eos_token_id", [[2]]),
    ("pad_token_id", {"a": 1}),
    ("decoder_start_token_id", [2]),
    ("decoder_start_token_id", -2),
    ("forced_bos_token_id", "en"),
    ("forced_eos_token_id", 1.5),
    ("bad_words_ids", [1, 2]),
    ("bad_words_ids", [[]]),
    ("bad_words_ids", [[1], [-1]]),
    ("bad_words_ids", "word"),
    ("suppress_tokens", [None]),
    ("no_repeat_ngram_size", -1),
    ("no_repeat_ngram_size", 2.5),
    ("num_beams", 0),
    ("num_beams", "four"),
    ("length_penalty", "2"),
    ("length_penalty", float("nan")),
    ("length_penalty", 10**400),
    ("early_stopping", "always"),
    ("early_stopping", 1),
    ("min_length", -3),
    ("max_length", 0),
    ("max_new_tokens", []),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
@pytest.mark.parametrize("in_config_json", [False, True])
def test_wrong_type_error_names_the_file(key: str, value: Any, in_config_json: bool) -> None:
    files: tuple[Any, Any] = ({}, {key: value}) if in_config_json else ({key: value}, {})
    with pytest.raises(
        InputError, match=f"{'config.json' if in_config_json else 'generation_config.json'} has {key} = "
    ):
        read_generation_config(*files)


def test_non_object_is_an_error() -> None:
    not_an_object: Any = ["eos_token_id", 2]
    with pytest.raises(InputError, match="must be a JSON object"):
        read_generation_config(not_an_object, {})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
FILE = st.dictionaries(st.sampled_from([*SETTINGS, "force_bos_token_to_be_generated", "max_new_tokens"]), ANYTHING)


@given(FILE, FILE)
def test_any_json_is_read_or_raises_input_error(generation: dict[str, Any], hf_config: dict[str, Any]) -> None:
    try:
        config = read_generation_config(generation, hf_config)
    except InputError:
        return
    assert all(token >= 0 for token in config.eos_token_ids)
    assert config.num_beams >= 1


@pytest.mark.parametrize("beams", [1, 3])
def test_repetition_penalty_of_the_file_is_applied(beams: int, tmp_path: Path) -> None:
    """As in published chat models: transformers applies the repetition penalty in greedy decoding too."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.5, eos_token_id=59, pad_token_id=59
    )
    model.save_pretrained(tmp_path)
    prompt = [5, 17, 3, 17]
    options = {"do_sample": False, "temperature": None, "top_k": None, "num_beams": beams, "max_new_tokens": 24}
    expected = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    completions = ct.generate(ct.load(tmp_path), [prompt], max_new_tokens=24, beams=None if beams == 1 else beams)
    assert completions[0].tokens == [token for token in expected if token != 59]
    without = ct.generate(ct.load(tmp_path).model, [prompt], max_new_tokens=24, beams=None if beams == 1 else beams)
    assert without[0].tokens != completions[0].tokens
