"""A checkpoint's settings for generation, read as transformers reads them; files with wrong types are refused."""

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
SUMMARIES: dict[str, Any] = {
    "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_bos_token_id": 0,
    "forced_eos_token_id": 2, "no_repeat_ngram_size": 3, "num_beams": 4, "length_penalty": 2.0, "min_length": 5,
    "max_length": 14, "early_stopping": True, "bad_words_ids": [[2], [1], [7, 8]], "suppress_tokens": [9],
    "begin_suppress_tokens": [10, 11], "repetition_penalty": 1.25,
}  # fmt: skip
"""What published models for summaries and translation have."""


def theirs_of(start: GenerationConfig) -> dict[str, Any]:
    """Our reading under the peer's names."""
    return {
        "bos_token_id": start.bos_token_id,
        "eos_token_id": list(start.eos_token_ids),
        "decoder_start_token_id": start.decoder_start_token_id,
        "forced_bos_token_id": start.forced_bos_token_id,
        "forced_eos_token_id": list(start.forced_eos_token_ids),
        "no_repeat_ngram_size": start.no_repeat_ngram_size,
        "num_beams": start.num_beams,
        "repetition_penalty": start.repetition_penalty,
        "length_penalty": start.length_penalty,
        "early_stopping": start.early_stopping,
        "min_length": start.min_length,
        "max_length": start.max_length,
        "suppress_tokens": list(start.suppress_tokens),
        "begin_suppress_tokens": list(start.begin_suppress_tokens),
    }


def check_peer(directory: Path) -> GenerationConfig:
    """Ours from a directory ≡ what the peer opens there."""
    opened = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).generation_config
    checkpoint = ct.load(directory)
    start = read_generation_config(checkpoint.generation_config, checkpoint.hf_config, checkpoint.tokenizer)
    defaults = opened._get_default_generation_params() | {"max_length": None}
    for key, mine in theirs_of(start).items():
        value = getattr(opened, key)
        value = defaults.get(key) if value is None else value
        if isinstance(mine, list):
            value = [] if value is None else value if isinstance(value, list) else [value]
        assert mine == value, key
    return start


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("left_out", [(), ("num_beams", "early_stopping", "forced_bos_token_id"), tuple(SUMMARIES)])
def test_settings_are_those_that_the_peer_opens(place: str, left_out: tuple[str, ...], tmp_path: Path) -> None:
    """In a file of their own, or in the model's as older ones have them."""
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))
    model.save_pretrained(tmp_path)
    said = {key: value for key, value in SUMMARIES.items() if key not in left_out}
    config = json.loads((tmp_path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in SUMMARIES}
    if place == "config.json":
        (tmp_path / "generation_config.json").unlink()
        config |= said
    else:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = check_peer(tmp_path)
    if not left_out:
        assert start.bad_words_ids == ((1,), (7, 8))  # an end cannot be banned
        assert start.pad_token_id == 1


def test_an_older_name_for_a_forced_start() -> None:
    old = {"force_bos_token_to_be_generated": True, "bos_token_id": 3}
    assert read_generation_config({}, old).forced_bos_token_id == 3
    assert read_generation_config({}, old | {"force_bos_token_to_be_generated": False}).forced_bos_token_id is None


def test_ids_are_looked_up_until_they_are_found() -> None:
    """In generation_config.json, in config.json, in the tokenizer; nothing else is taken from a second file."""
    tokenizer = byte_tokenizer()
    assert read_generation_config({}, {}, None) == GenerationConfig()
    own = read_generation_config({}, {}, tokenizer)
    assert (own.eos_token_ids, own.bos_token_id, own.pad_token_id) == (
        (tokenizer.eos_token_id,),
        tokenizer.bos_token_id,
        tokenizer.pad_token_id,
    )
    both = read_generation_config(
        {"temperature": 0.6}, {"eos_token_id": [5, 6], "num_beams": 4, "pad_token_id": -1}, None
    )
    assert (both.eos_token_ids, both.num_beams, both.pad_token_id) == ((5, 6), 1, 5)
    assert read_generation_config({"eos_token_id": 0}, {"eos_token_id": 5}, tokenizer).eos_token_ids == (0,)
    assert read_generation_config({"bos_token_id": 4}, {}, None).decoder_start_token_id == 4
    assert (
        read_generation_config({"bos_token_id": 4, "decoder_start_token_id": 0}, {}, None).decoder_start_token_id == 0
    )
    assert read_generation_config({"bos_token_id": 4}, {"decoder_start_token_id": 7}, None).decoder_start_token_id == 7


def test_lengths_with_the_prompt_and_without() -> None:
    start = read_generation_config({"max_length": 20, "min_length": 8}, {})
    assert (start.max_new_tokens_for(5), start.min_new_tokens_for(5)) == (15, 3)
    assert (start.max_new_tokens_for(30), start.min_new_tokens_for(30)) == (0, 0)
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
@pytest.mark.parametrize("older", [False, True])
def test_a_wrong_type_is_said_with_its_file(key: str, value: Any, older: bool) -> None:
    files: tuple[Any, Any] = ({}, {key: value}) if older else ({key: value}, {})
    with pytest.raises(InputError, match=f"{'config.json' if older else 'generation_config.json'} has {key} = "):
        read_generation_config(*files)


def test_what_is_no_object_is_said() -> None:
    anything: Any = ["eos_token_id", 2]
    with pytest.raises(InputError, match="must be a JSON object"):
        read_generation_config(anything, {})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
FILE = st.dictionaries(st.sampled_from([*SUMMARIES, "force_bos_token_to_be_generated", "max_new_tokens"]), ANYTHING)


@given(FILE, FILE)
def test_any_json_is_read_or_refused(generation: dict[str, Any], theirs: dict[str, Any]) -> None:
    try:
        start = read_generation_config(generation, theirs)
    except InputError:
        return
    assert all(token >= 0 for token in start.eos_token_ids)
    assert start.num_beams >= 1


@pytest.mark.parametrize("beams", [1, 3])
def test_a_files_penalty_is_part_of_the_answer(beams: int, tmp_path: Path) -> None:
    """As published for chat models: transformers punishes repetition whether it draws or not."""
    torch.manual_seed(0)
    small = transformers.Qwen2Config(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(small).eval()
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.5, eos_token_id=59, pad_token_id=59
    )
    model.save_pretrained(tmp_path)
    prompt = [5, 17, 3, 17]
    how = {"do_sample": False, "temperature": None, "top_k": None, "num_beams": beams, "max_new_tokens": 24}
    theirs = model.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist()
    ours = ct.generate(ct.load(tmp_path), [prompt], max_new_tokens=24, beams=None if beams == 1 else beams)
    assert ours[0].tokens == [token for token in theirs if token != 59]
    without = ct.generate(ct.load(tmp_path).model, [prompt], max_new_tokens=24, beams=None if beams == 1 else beams)
    assert without[0].tokens != ours[0].tokens
