"""`cutaway trace`: JSON, table, --position, --sites, --save, errors."""

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
def decoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_checkpoint(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def encoder_decoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoder-decoder with a byte tokenizer."""
    return save_small_checkpoint(tmp_path_factory.mktemp("pair") / "model", "tiny-t5")


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoder with an LM head and a WordPiece tokenizer."""
    directory = tmp_path_factory.mktemp("masked") / "model"
    config = ct.config(ct.config("tiny-bert").model_dump() | {"vocab_size": 400})
    ct.save(Checkpoint(ct.build(config, seed=0), config), directory)
    write_bert_files(directory)
    return directory


# ---------------------------------------------------------------------------------------- equality with the library


def test_json_equals_follow_token(run: CliRunner, decoder_dir: Path) -> None:
    checkpoint = ct.load(decoder_dir)
    assert checkpoint.tokenizer is not None
    tokens = checkpoint.tokenizer.encode("The cat sat")
    expected = follow_token(checkpoint.model, torch.tensor([tokens]))
    data = json.loads(run(decoder_dir, "The cat sat", "--json"))
    assert [entry["token"] for entry in data["tokens"]] == tokens
    assert data["positions"] == {"decoder": len(tokens) - 1}
    assert [stage["site"] for stage in data["stages"]] == list(sites(checkpoint.model))
    for stage, expected_stage in zip(data["stages"], expected.stages, strict=True):
        assert {key: stage[key] for key in ("equation", "axes", "norm", "relative_norm", "cosine")} == {
            key: getattr(expected_stage, key) for key in ("equation", "axes", "norm", "relative_norm", "cosine")
        }
        assert [(entry["token"], entry["probability"]) for entry in stage["top_tokens"]] == list(
            expected_stage.top_tokens
        )
    assert data["residual_sum_error"] == expected.residual_sum_error == 0.0
    assert data["pattern_row_error"] == expected.pattern_row_error
    assert not data["is_untrained"]
    [completion] = ct.generate(checkpoint, "The cat sat", max_new_tokens=1)
    assert data["top_tokens"][0]["token"] == completion.tokens[0]


def test_target_follows_the_decoder_start_token(run: CliRunner, encoder_decoder_dir: Path) -> None:
    data = json.loads(run(encoder_decoder_dir, "Hello", "--target", "Hal", "--position", "H", "--json"))
    assert [entry["token"] for entry in data["tokens"]] == [0, *b"Hal"]
    assert data["positions"] == {"encoder": len(data["source_tokens"]) - 1, "decoder": 1}
    without_target = json.loads(run(encoder_decoder_dir, "Hello", "--position", "e", "--json"))
    assert [entry["token"] for entry in without_target["tokens"]] == [0]
    assert without_target["positions"] == {"encoder": 1, "decoder": 0}
    checkpoint = ct.load(encoder_decoder_dir)
    source = torch.tensor([[entry["token"] for entry in data["source_tokens"]]])
    logits = checkpoint.model(source, torch.tensor([[0]]))
    assert without_target["top_tokens"][0]["token"] == int(logits[0, -1].argmax())
    output = run(encoder_decoder_dir, "Hello", "--target", "Hal")
    assert re.search(r"encoder input .*Hello", output)
    assert re.search(r"decoder input .*Hal", output)


def test_encoder_predicts_the_masked_token(run: CliRunner, encoder_dir: Path) -> None:
    data = json.loads(run(encoder_dir, "the [MASK] sat", "--position", "[MASK]", "--json"))
    checkpoint = ct.load(encoder_dir)
    assert checkpoint.tokenizer is not None
    position = data["positions"]["encoder"]
    assert data["tokens"][position]["token"] == checkpoint.tokenizer.mask_token_id
    logits = checkpoint.model(torch.tensor([checkpoint.tokenizer.encode("the [MASK] sat")]))
    assert data["top_tokens"][0]["token"] == int(logits[0, position].argmax())
    output = run(encoder_dir, "the [MASK] sat", "--position", "[MASK]")
    assert "top 5 for this position" in output
    assert "not a sum here" in output


def test_pretrained_model_and_all_blocks(run: CliRunner) -> None:
    output = run("tiny-python", "import o")
    assert "… 2 blocks between: --all-blocks shows them" in output
    assert "blocks.2" not in output
    assert "blocks.2" in run("tiny-python", "import o", "--all-blocks")
    assert "random weights" not in output


@pytest.mark.parametrize("name", [name for name in ct.presets() if name.startswith("tiny-")])
def test_table_of_every_form(run: CliRunner, name: str) -> None:
    output = run(name, "naïve", "--position", "ï")
    assert "random weights" in output
    assert r"'\xaf'" in output.splitlines()[2]
    assert "max difference" in output
    assert max(len(line) for line in output.splitlines() if "blocks" not in line and "input" not in line) <= 96
    assert ("top 5" in output) == (ct.config(name).head.kind == "lm")


# ---------------------------------------------------------------------------------------- --position and --sites


@pytest.mark.parametrize(
    ("position", "expected"),
    [("0", 0), ("-1", 10), ("-11", 0), ("The", 2), ("cat", 6), ("a", 9), (" sat", 10), ("T", 0)],
)
def test_position_is_an_index_or_a_substring(run: CliRunner, decoder_dir: Path, position: str, expected: int) -> None:
    """The last token of the last occurrence of a substring."""
    data = json.loads(run(decoder_dir, "The cat sat", "--position", position, "--json"))
    assert data["positions"]["decoder"] == expected


def test_sites_option_selects_sites(run: CliRunner, decoder_dir: Path) -> None:
    data = json.loads(run(decoder_dir, "abc", "--sites", "attn.out", "--sites", "blocks.1.resid_*", "--json"))
    site_names = [stage["site"] for stage in data["stages"]]
    assert site_names == [
        "blocks.0.attn.out",
        "blocks.1.resid_pre",
        "blocks.1.attn.out",
        "blocks.1.resid_mid",
        "blocks.1.resid_post",
        "blocks.2.attn.out",
        "blocks.3.attn.out",
    ]
    assert data["residual_sum_error"] == 0.0
    assert data["pattern_row_error"] is None
    output = run(decoder_dir, "abc", "--sites", "resid_pre")
    assert output.count("resid_pre") == 4
    assert "cosine" not in output


def test_text_from_stdin(run: CliRunner, decoder_dir: Path) -> None:
    assert json.loads(run(decoder_dir, "-", "--json", stdin="abc\n"))["text"] == "abc"


def test_token_ids_without_a_tokenizer(run: CliRunner, tmp_path: Path) -> None:
    config = ct.config("tiny-llama")
    directory = ct.save(Checkpoint(ct.build(config, seed=0), config), tmp_path / "model")
    data = json.loads(run(directory, "5, 6,7", "--json"))
    assert [entry["token"] for entry in data["tokens"]] == [5, 6, 7]
    assert "pass token ids, such as 1,2,3" in run(directory, "Hello", code=2)
    assert "the vocabulary has 256 ids" in run(directory, "5,99999", code=2)


# ---------------------------------------------------------------------------------------- saving


def test_saved_activations_equal_trace(run: CliRunner, decoder_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "values.safetensors"
    output = run(decoder_dir, "abcd", "--save", file)
    assert "saved" in output
    checkpoint = ct.load(decoder_dir)
    assert checkpoint.tokenizer is not None
    with torch.no_grad(), Trace(checkpoint.model, "*") as t:
        checkpoint.model(torch.tensor([checkpoint.tokenizer.encode("abcd")]))
    with safe_open(file, "pt") as saved:
        assert set(saved.keys()) == set(sites(checkpoint.model))
        assert saved.metadata()["blocks.0.attn.pattern"] == "BHTS"
        for name in t:
            assert torch.equal(saved.get_tensor(name), t[name])
    assert list(tmp_path.iterdir()) == [file]
    before = file.read_bytes()
    assert "exists and is not overwritten" in run(decoder_dir, "other", "--save", file, code=2)
    assert file.read_bytes() == before
    selected_file = tmp_path / "some.safetensors"
    assert json.loads(run(decoder_dir, "abcd", "--sites", "attn.out", "--save", selected_file, "--json"))[
        "saved"
    ] == str(selected_file)
    with safe_open(selected_file, "pt") as saved:
        assert set(saved.keys()) == {f"blocks.{layer}.attn.out" for layer in range(4)}


def test_failed_save_leaves_no_file(
    run: CliRunner, decoder_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Trace, "save", raise_disk_full)
    assert "the disk is full" in run(decoder_dir, "abc", "--save", tmp_path / "a.safetensors", code=2)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tyni-gpt", "abc"], "did you mean tiny-gpt"),
        (["missing.toml", "abc"], "does not exist"),
        (["no-such/model", "abc"], "is not stored locally, and the Hub cannot be reached"),
        (["tiny-gpt", ""], "the text is empty; pass at least one character"),
        (["tiny-gpt", "abc", "--position", "3"], "--position is 3; the text has tokens 0 to 2"),
        (["tiny-gpt", "abc", "--position", "-4"], "--position is -4"),
        (["tiny-gpt", "abc", "--position", "dog"], "--position is 'dog', which is not in the decoded text"),
        (["tiny-gpt", "abc", "--position", ""], "--position is ''"),
        (["tiny-gpt", "abc", "--sites", "atn.out"], "this model has no site 'atn.out'; use one of attn.out"),
        (["tiny-gpt", "abc", "--sites", "blocks.9.resid_post"], "it has 2 blocks"),
        (["tiny-gpt", "x" * 65], "positions 0 to 63 only; pass a shorter sequence"),
        (["tiny-llama", "x" * 2049], "at most 2048"),
        (["llama-3.1-405b", "abc"], "choose a smaller model"),
        (["tiny-bert", "abc", "--target", "d"], "but the form of this model is encoder"),
        (["tiny-gpt", "abc", "--save", "a.pt"], "does not end in .safetensors"),
        (["tiny-gpt", "abc", "--save", "no/such/a.safetensors"], "is not a directory"),
        (["tiny-gpt", "abc", "--device", "tpu"], "is not available"),
        (["tiny-gpt", "abc", "--device", "meta"], "no values"),
    ],
)
def test_errors_exit_with_code_two(run: CliRunner, arguments: list[str], message: str) -> None:
    error = run(*arguments, code=2)
    assert message in error
    assert "Traceback" not in error


def test_text_longer_than_the_context_has_a_note(run: CliRunner) -> None:
    length = ct.config("tiny-llama").context or 0
    assert f"more than the context of {length}" in run("tiny-llama", "x" * (length + 1), "--sites", "embed")


def test_control_characters_in_the_text_are_escaped(run: CliRunner, decoder_dir: Path) -> None:
    output = run(decoder_dir, "a\x1b[31mb [bold]c[/]", "--sites", "embed")
    assert "\x1b" not in output
    assert r"a\x1b[31mb [bold]c[/]" in output
    assert byte_tokenizer().encode("\x1b")[0] == 27
