"""The pretrained models: size, agreement with transformers, quality, recipes, `cutaway demo`."""

import json
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import cutaway as ct
from cutaway.cli import main
from cutaway.generate.fill_mask import fill_mask
from cutaway.pretrained import (
    DEFAULT_MODEL,
    EXAMPLE_TEXTS,
    example_text,
    find_pretrained,
    list_pretrained,
    load_examples,
)
from cutaway.train.recipe.load import load_recipe

MAX_BYTES = {"tiny-english": 12e6, "tiny-english-encoder": 8e6, "tiny-dates": 4e6, "tiny-python": 12e6}
"""Limits of the sizes of the directories."""
TRANSFORMERS_CLASSES: dict[str, Any] = {
    "tiny-english": transformers.AutoModelForCausalLM,
    "tiny-english-encoder": transformers.AutoModelForMaskedLM,
    "tiny-dates": transformers.AutoModelForSeq2SeqLM,
    "tiny-python": transformers.AutoModelForCausalLM,
}
SCRIPTS = Path(__file__).parents[2] / "scripts"
CLOZE = SCRIPTS.parent / "examples" / "tiny-english" / "cloze.toml"


def next_tokens(checkpoint: Any, text: str, count: int) -> list[str]:
    with torch.no_grad():
        logits = checkpoint.model(torch.tensor([checkpoint.tokenizer.encode(text)]))
    return [checkpoint.tokenizer.decode([token]).strip() for token in logits[0, -1].topk(count).indices.tolist()]


@pytest.mark.parametrize("name", MAX_BYTES)
def test_pretrained_is_small_and_opens_in_transformers(name: str) -> None:
    assert list_pretrained() == sorted(MAX_BYTES)
    directory = find_pretrained(name)
    assert directory is not None
    assert sum(file.stat().st_size for file in directory.iterdir()) <= MAX_BYTES[name]
    checkpoint = ct.load(name, dtype=torch.float32)
    assert checkpoint.tokenizer is not None
    tokens = torch.tensor([checkpoint.tokenizer.encode(EXAMPLE_TEXTS[name])])
    reference = TRANSFORMERS_CLASSES[name].from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        if name == "tiny-dates":
            expected = reference(input_ids=tokens, decoder_input_ids=tokens).logits
            torch.testing.assert_close(checkpoint.model(tokens, tokens), expected, rtol=1e-5, atol=1e-4)
        else:
            expected = reference(tokens).logits
            torch.testing.assert_close(checkpoint.model(tokens), expected, rtol=1e-5, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert tokenizer.encode(EXAMPLE_TEXTS[name], add_special_tokens=False) == tokens[0].tolist()


@pytest.mark.parametrize("name", MAX_BYTES)
def test_pretrained_matches_its_recipe(name: str) -> None:
    recipe_config, config = load_recipe(name).transformer_config, ct.config(name)
    assert recipe_config.replace(vocab_size=config.vocab_size).d_model == config.d_model
    assert ct.size(recipe_config).num_parameters == pytest.approx(ct.size(config).num_parameters, rel=1e-3)


def test_examples_have_good_predictions() -> None:
    assert DEFAULT_MODEL in EXAMPLE_TEXTS
    assert example_text("gpt2") == example_text(DEFAULT_MODEL)
    python = ct.load("tiny-python", dtype=torch.float32)
    assert next_tokens(python, example_text("tiny-python"), 1) == ["list"]
    dates = ct.load("tiny-dates", dtype=torch.float32)
    assert ct.generate(dates, example_text("tiny-dates"))[0].text == "2021-03-03"
    encoder = ct.load("tiny-english-encoder", dtype=torch.float32)
    assert encoder.tokenizer is not None
    [[fills]] = fill_mask(encoder.model, encoder.tokenizer, [example_text("tiny-english-encoder")], top_k=5)
    assert {"cat", "dog", "bird", "bear"} & {fill.token.strip() for fill in fills}


def test_english_cloze() -> None:
    """A sensible word is among the five most probable next words of at least 85 % of the prompts."""
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    cloze = tomllib.loads(CLOZE.read_text(encoding="utf-8"))
    is_sensible = [bool({*next_tokens(checkpoint, prompt, 5)} & {*words.split()}) for prompt, words in cloze.items()]
    assert len(cloze) == 43
    assert sum(is_sensible) >= 0.85 * len(cloze)


def test_common_words_are_one_token() -> None:
    words = "cat dog bird mat house mother little happy because butterfly Lily said playing tomorrow friend"
    for name in ("tiny-english", "tiny-english-encoder"):
        tokenizer = ct.load(name).tokenizer
        assert tokenizer is not None
        assert all(len(tokenizer.encode(f" {word}")) == 1 for word in words.split())


def test_python_model_has_learned_python() -> None:
    """On this file, which was not in the training data, bits per byte are far below chance (8)."""
    text = Path(__file__).read_text(encoding="utf-8")
    assert ct.evaluate(ct.load("tiny-python", dtype=torch.float32), [text]).bits_per_byte < 3


def test_directory_of_the_same_name_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ct.save(ct.load("tiny-dates"), tmp_path / "tiny-dates")
    (tmp_path / "tiny-dates" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        ct.load("tiny-dates")


@pytest.mark.unchecked
@pytest.mark.nightly
def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`cutaway demo` with two training steps."""
    source = tmp_path / "lib"
    source.mkdir()
    monkeypatch.setattr("sys.argv", ["cutaway", "demo", "--steps", "2", "--json"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert not exit_info.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["tiny-python"]["bits_per_byte"] < 3
    assert report["yours"]["bits_per_byte"] > 3
    assert report["journey"]["residual_sum_error"] < 1e-3
    assert report["tiny-python"]["sample"].startswith("def ")
    assert report["tiny-english"]["sample"].startswith("Once upon a time, there was a ")


def test_model_cards_are_rendered_from_their_evaluation() -> None:
    cards: Any = runpy.run_path(str(SCRIPTS / "write_model_cards.py"))
    for name in cards["EVALUATIONS"]:
        directory = find_pretrained(name)
        assert directory is not None
        assert (directory / "README.md").read_text(encoding="utf-8") == cards["render_card"](name)
        log = [json.loads(line) for line in (directory / "training_log.jsonl").read_text().splitlines()]
        evaluation = json.loads((directory / "evaluation.json").read_text(encoding="utf-8"))
        assert [row["step"] for row in log if "loss" in row][-1] == pytest.approx(evaluation["steps"], abs=10)
    for name, examples in cards["render_examples"]().items():
        assert load_examples(name) == json.loads(examples)


def test_english_evaluation_is_that_of_the_weights() -> None:
    """The stored cloze results and the first sample are those of the shipped weights."""
    cards: Any = runpy.run_path(str(SCRIPTS / "write_model_cards.py"))
    directory = find_pretrained("tiny-english")
    assert directory is not None
    evaluation = json.loads((directory / "evaluation.json").read_text(encoding="utf-8"))
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    cloze = tomllib.loads(CLOZE.read_text(encoding="utf-8"))
    for row, (prompt, words) in zip(evaluation["cloze"], cloze.items(), strict=True):
        measured = cards["cloze_row"](checkpoint, prompt, words.split())
        assert (row["prompt"], row["rank"]) == (prompt, measured["rank"])
        assert row.get("probability") == pytest.approx(measured.get("probability"), abs=1e-3)


@pytest.mark.parametrize("name", ["tiny-english", "tiny-dates"])
def test_edits_of_examples_change_the_prediction(name: str) -> None:
    """The edits of the examples of the web page lower the probability of the most probable next token."""
    checkpoint = ct.load(name, dtype=torch.float32)
    assert checkpoint.tokenizer is not None
    examples = [example for example in load_examples(name) if "edits" in example["fragment"]]
    assert examples
    for example in examples:
        fragment = example["fragment"]
        texts = [fragment["source"], fragment["text"]] if "source" in fragment else [fragment["text"]]
        tokens = [torch.tensor([checkpoint.tokenizer.encode(text)]) for text in texts]
        if len(tokens) == 2:
            tokens[1] = F.pad(tokens[1], (1, 0), value=checkpoint.tokenizer.bos_token_id)
        terms = [term.split(":zero@") for term in fragment["edits"].split(",")]
        edits = {site: {"do": "zero", "heads": [int(head) for head in heads.split(".")]} for site, heads in terms}
        with torch.no_grad():
            before = checkpoint.model(*tokens)[0, -1].softmax(-1)
            with ct.edit(checkpoint.model, edits):
                after = checkpoint.model(*tokens)[0, -1].softmax(-1)
        best = int(before.argmax())
        assert after[best] < 0.7 * before[best], example["title"]
