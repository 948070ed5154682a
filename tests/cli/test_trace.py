"""`cutaway trace` as a person and as a machine use it."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.checkpoints import save_small_checkpoint
from support.cli_runner import CliRunner
from support.tokenizer_files import write_bert_files

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.lens import Trace, follow_token, sites
from cutaway.tokenizer import byte_tokenizer

pytestmark = pytest.mark.unchecked


@pytest.fixture
def run(run_cli: CliRunner) -> CliRunner:
    return partial(run_cli, "trace")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_checkpoint(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder-decoder of bytes."""
    return save_small_checkpoint(tmp_path_factory.mktemp("pair") / "model", "tiny-t5")


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with a head and a word-piece tokenizer."""
    directory = tmp_path_factory.mktemp("masked") / "model"
    config = ct.config(ct.config("tiny-bert").model_dump() | {"vocab_size": 400})
    ct.save(Checkpoint(ct.build(config, seed=0), config), directory)
    write_bert_files(directory)
    return directory


# ---------------------------------------------------------------------------------------- the same numbers


def test_json_is_the_librarys_journey(run: CliRunner, plain: Path) -> None:
    checkpoint = ct.load(plain)
    assert checkpoint.tokenizer is not None
    tokens = checkpoint.tokenizer.encode("The cat sat")
    expected = follow_token(checkpoint.model, torch.tensor([tokens]))
    told = json.loads(run(plain, "The cat sat", "--json"))
    assert [each["token"] for each in told["tokens"]] == tokens
    assert told["positions"] == {"decoder": len(tokens) - 1}
    assert [stage["site"] for stage in told["stages"]] == list(sites(checkpoint.model))
    for stage, own in zip(told["stages"], expected.stages, strict=True):
        assert {key: stage[key] for key in ("equation", "axes", "norm", "relative_norm", "cosine")} == {
            key: getattr(own, key) for key in ("equation", "axes", "norm", "relative_norm", "cosine")
        }
        assert [(each["token"], each["probability"]) for each in stage["top_tokens"]] == list(own.top_tokens)
    assert told["residual_sum_error"] == expected.residual_sum_error == 0.0
    assert told["pattern_row_error"] == expected.pattern_row_error
    assert not told["is_untrained"]
    [best] = ct.generate(checkpoint, "The cat sat", max_new_tokens=1)
    assert told["top_tokens"][0]["token"] == best.tokens[0]


def test_a_target_stands_behind_the_token_that_answers_begin_with(run: CliRunner, pair: Path) -> None:
    told = json.loads(run(pair, "Hello", "--target", "Hal", "--position", "H", "--json"))
    assert [each["token"] for each in told["tokens"]] == [0, *b"Hal"]
    assert told["positions"] == {"encoder": len(told["source_tokens"]) - 1, "decoder": 1}
    alone = json.loads(run(pair, "Hello", "--position", "e", "--json"))
    assert [each["token"] for each in alone["tokens"]] == [0]
    assert alone["positions"] == {"encoder": 1, "decoder": 0}
    checkpoint = ct.load(pair)
    source = torch.tensor([[each["token"] for each in told["source_tokens"]]])
    logits = checkpoint.model(source, torch.tensor([[0]]))
    assert alone["top_tokens"][0]["token"] == int(logits[0, -1].argmax())
    shown = run(pair, "Hello", "--target", "Hal")
    assert re.search(r"encoder reading .*Hello", shown)
    assert re.search(r"decoder reading .*Hal", shown)


def test_an_encoder_says_what_stands_at_the_mask(run: CliRunner, masked: Path) -> None:
    told = json.loads(run(masked, "the [MASK] sat", "--position", "[MASK]", "--json"))
    checkpoint = ct.load(masked)
    assert checkpoint.tokenizer is not None
    place = told["positions"]["encoder"]
    assert told["tokens"][place]["token"] == checkpoint.tokenizer.mask_token_id
    logits = checkpoint.model(torch.tensor([checkpoint.tokenizer.encode("the [MASK] sat")]))
    assert told["top_tokens"][0]["token"] == int(logits[0, place].argmax())
    shown = run(masked, "the [MASK] sat", "--position", "[MASK]")
    assert "top five for this place" in shown
    assert "not a plain sum here" in shown


def test_the_model_that_comes_with_cutaway(run: CliRunner) -> None:
    shown = run("tiny-python", "import o")
    assert "… 2 blocks between: --all-blocks shows them" in shown
    assert "blocks.2" not in shown
    assert "blocks.2" in run("tiny-python", "import o", "--all-blocks")
    assert "fresh weights" not in shown


@pytest.mark.parametrize("name", [name for name in ct.presets() if name.startswith("tiny-")])
def test_every_form_for_people(run: CliRunner, name: str) -> None:
    shown = run(name, "naïve", "--position", "ï")
    assert "fresh weights" in shown
    assert r"'\xaf'" in shown.splitlines()[2]
    assert "largest difference" in shown
    assert max(len(line) for line in shown.splitlines() if "blocks" not in line and "reading" not in line) <= 96
    assert ("top five" in shown) == (ct.config(name).head.kind == "lm")


# ---------------------------------------------------------------------------------------- which token, which sites


@pytest.mark.parametrize(
    ("at", "place"), [("0", 0), ("-1", 10), ("-11", 0), ("The", 2), ("cat", 6), ("a", 9), (" sat", 10), ("T", 0)]
)
def test_at_is_a_number_or_a_piece_of_text(run: CliRunner, plain: Path, at: str, place: int) -> None:
    """Of a piece, the last token; of several, the last."""
    told = json.loads(run(plain, "The cat sat", "--position", at, "--json"))
    assert told["positions"]["decoder"] == place


def test_sites_choose_what_is_told(run: CliRunner, plain: Path) -> None:
    told = json.loads(run(plain, "abc", "--sites", "attn.out", "--sites", "blocks.1.resid_*", "--json"))
    named = [stage["site"] for stage in told["stages"]]
    assert named == [
        "blocks.0.attn.out",
        "blocks.1.resid_pre",
        "blocks.1.attn.out",
        "blocks.1.resid_mid",
        "blocks.1.resid_post",
        "blocks.2.attn.out",
        "blocks.3.attn.out",
    ]
    assert told["residual_sum_error"] == 0.0
    assert told["pattern_row_error"] is None
    shown = run(plain, "abc", "--sites", "resid_pre")
    assert shown.count("resid_pre") == 4
    assert "cosine" not in shown


def test_standard_input_is_a_text(run: CliRunner, plain: Path) -> None:
    assert json.loads(run(plain, "-", "--json", stdin="abc\n"))["text"] == "abc"


def test_a_model_without_a_tokenizer_reads_numbers(run: CliRunner, tmp_path: Path) -> None:
    config = ct.config("tiny-llama")
    directory = ct.save(Checkpoint(ct.build(config, seed=0), config), tmp_path / "model")
    told = json.loads(run(directory, "5, 6,7", "--json"))
    assert [each["token"] for each in told["tokens"]] == [5, 6, 7]
    assert "write token ids, as in 1,2,3" in run(directory, "Hello", code=2)
    assert "the vocabulary has ids" in run(directory, "5,99999", code=2)


# ---------------------------------------------------------------------------------------- saving


def test_saved_values_are_the_traces(run: CliRunner, plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "values.safetensors"
    shown = run(plain, "abcd", "--save", file)
    assert "written" in shown
    checkpoint = ct.load(plain)
    assert checkpoint.tokenizer is not None
    with torch.no_grad(), Trace(checkpoint.model, "*") as t:
        checkpoint.model(torch.tensor([checkpoint.tokenizer.encode("abcd")]))
    with safe_open(file, "pt") as found:
        assert set(found.keys()) == set(sites(checkpoint.model))
        assert found.metadata()["blocks.0.attn.pattern"] == "BHTS"
        for name in t:
            assert torch.equal(found.get_tensor(name), t[name])
    assert list(tmp_path.iterdir()) == [file]
    before = file.read_bytes()
    assert "exists already" in run(plain, "other", "--save", file, code=2)
    assert file.read_bytes() == before
    some = tmp_path / "some.safetensors"
    assert json.loads(run(plain, "abcd", "--sites", "attn.out", "--save", some, "--json"))["saved"] == str(some)
    with safe_open(some, "pt") as found:
        assert set(found.keys()) == {f"blocks.{layer}.attn.out" for layer in range(4)}


def test_what_fails_leaves_no_file(
    run: CliRunner, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Trace, "save", full)
    assert "the disk is full" in run(plain, "abc", "--save", tmp_path / "a.safetensors", code=2)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tyni-gpt", "abc"], "did you mean tiny-gpt"),
        (["missing.toml", "abc"], "does not exist"),
        (["no-such/model", "abc"], "neither a path here nor"),
        (["tiny-gpt", ""], "the text is empty; give at least one character"),
        (["tiny-gpt", "abc", "--position", "3"], "--position is 3, and the text has the tokens 0 to 2"),
        (["tiny-gpt", "abc", "--position", "-4"], "--position is -4"),
        (["tiny-gpt", "abc", "--position", "dog"], "--position is 'dog', which is not in the text"),
        (["tiny-gpt", "abc", "--position", ""], "--position is ''"),
        (["tiny-gpt", "abc", "--sites", "atn.out"], "this model has no site 'atn.out'; there is attn.out"),
        (["tiny-gpt", "abc", "--sites", "blocks.9.resid_post"], "it has 2 blocks"),
        (["tiny-gpt", "x" * 65], "positions 0 to 63 only; shorten it"),
        (["tiny-llama", "x" * 2049], "at most 2048"),
        (["llama-3.1-405b", "abc"], "choose a smaller one"),
        (["tiny-bert", "abc", "--target", "d"], "--target is for encoder-decoders, and this is an encoder"),
        (["tiny-gpt", "abc", "--save", "a.pt"], "should end in .safetensors"),
        (["tiny-gpt", "abc", "--save", "no/such/a.safetensors"], "is no directory"),
        (["tiny-gpt", "abc", "--device", "tpu"], "is not available"),
        (["tiny-gpt", "abc", "--device", "meta"], "no values"),
        (["tiny-gpt"], "Missing argument 'TEXT'"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_two(run: CliRunner, arguments: list[str], message: str) -> None:
    error = run(*arguments, code=2)
    assert message in error
    assert "Traceback" not in error


def test_a_text_longer_than_the_context_is_read_and_told(run: CliRunner) -> None:
    length = ct.config("tiny-llama").context or 0
    assert f"more than the {length} it was made for" in run("tiny-llama", "x" * (length + 1), "--sites", "embed")


def test_a_text_cannot_command_the_terminal(run: CliRunner, plain: Path) -> None:
    shown = run(plain, "a\x1b[31mb [bold]c[/]", "--sites", "embed")
    assert "\x1b" not in shown
    assert r"a\x1b[31mb [bold]c[/]" in shown
    assert byte_tokenizer().encode("\x1b")[0] == 27
