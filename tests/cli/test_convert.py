"""`cutaway convert`: round trip, JSON report, errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.cli_runner import CliRunner

import cutaway as ct
from cutaway.cli.verbs.convert import GGUFQuantization
from cutaway.families.config_tree import diff_configs
from cutaway.families.gguf.file_format import QUANTIZATIONS
from cutaway.tokenizer import byte_tokenizer

CUTAWAY = str(Path(sys.executable).parent / "cutaway")


def assert_equal_weights(a: Any, b: Any) -> None:
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name]), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face directory of a tiny Llama with a tokenizer."""
    model = ct.build("tiny-llama", seed=0)
    checkpoint = ct.Checkpoint(model, model.config, tokenizer_loader=byte_tokenizer)
    return ct.save(checkpoint, tmp_path_factory.mktemp("llama") / "model")


def run_command(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([CUTAWAY, *args], capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_round_trip_keeps_weights_config_and_tokenizer(llama: Path, tmp_path: Path) -> None:
    native, gguf, hf = tmp_path / "own", tmp_path / "x.gguf", tmp_path / "hf"
    for source, out, to in ((llama, native, "cutaway"), (native, gguf, "gguf"), (gguf, hf, "hf")):
        process = run_command("convert", str(source), str(out), "--to", to)
        assert process.returncode == 0, process.stderr
        assert f"written: {out}" in process.stdout
    original, converted = ct.load(llama), ct.load(hf)
    assert not diff_configs(original.config, converted.config)
    assert_equal_weights(original.model, converted.model)
    assert original.tokenizer is not None
    assert converted.tokenizer is not None
    text = "Grüße, 世界!"
    assert converted.tokenizer.encode(text) == original.tokenizer.encode(text)


@pytest.mark.nightly
def test_json_report_and_verification(llama: Path) -> None:
    process = run_command("convert", str(llama), "--verify", "--json")
    assert process.returncode == 0, process.stderr
    data = json.loads(process.stdout)
    assert data["report"]["family"] == "llama"
    assert data["report"]["missing_keys"] == data["report"]["unexpected_keys"] == []
    assert data["verification"]["ok"]
    assert data["verification"]["first_mismatch"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nowhere",), "does not exist"),
        (("{dir}", "out.bin", "--to", "gguf"), ".gguf"),
        (("{dir}", "--quantization", "q8_0"), "--to gguf"),
        (("{dir}", "{dir}"), "exists; pass another path"),
        (("{dir}", "{tmp}/x", "--family", "gpt2"), "cannot represent this model"),
        (("{dir}", "{tmp}/x", "--family", "gtp2"), "not a supported family"),
    ],
)
def test_errors_have_one_message_and_write_nothing(
    args: tuple[str, ...], message: str, llama: Path, tmp_path: Path, run_cli: CliRunner
) -> None:
    error = run_cli("convert", *(arg.format(dir=llama, tmp=tmp_path) for arg in args), code=2)
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_quantization_options_equal_the_writable_types() -> None:
    assert set(get_args(GGUFQuantization)) == set(QUANTIZATIONS)
