"""`cutaway convert`: all the way round, for machines, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.cli.verbs.convert import GGUFQuantization
from cutaway.families.config_tree import diff_configs
from cutaway.families.gguf.file import GGML_TYPES
from cutaway.tokenizer import byte_tokenizer

CUTAWAY = str(Path(sys.executable).parent / "cutaway")


def same(a: Any, b: Any) -> None:
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name]), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as others write it, with a tokenizer."""
    model = ct.build("tiny-llama", seed=0)
    checkpoint = ct.Checkpoint(model, model.config, tokenizer_loader=byte_tokenizer)
    return ct.save(checkpoint, tmp_path_factory.mktemp("llama") / "model")


def command(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([CUTAWAY, *args], capture_output=True, text=True, check=False)


def test_convert_goes_all_the_way_round(llama: Path, tmp_path: Path) -> None:
    own, packed, back = tmp_path / "own", tmp_path / "x.gguf", tmp_path / "hf"
    for source, out, to in ((llama, own, "cutaway"), (own, packed, "gguf"), (packed, back, "hf")):
        done = command("convert", str(source), str(out), "--to", to)
        assert done.returncode == 0, done.stderr
        assert f"written: {out}" in done.stdout
    first, last = ct.load(llama), ct.load(back)
    assert not diff_configs(first.config, last.config)
    same(first.model, last.model)
    assert first.tokenizer is not None
    assert last.tokenizer is not None
    text = "Grüße, 世界!"
    assert last.tokenizer.encode(text) == first.tokenizer.encode(text)


def test_convert_reports_for_machines(llama: Path) -> None:
    done = command("convert", str(llama), "--verify", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["report"]["family"] == "llama"
    assert told["report"]["missing_keys"] == told["report"]["unexpected_keys"] == []
    assert told["verification"]["ok"]
    assert told["verification"]["first_mismatch"] is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nowhere",), "does not exist"),
        (("{dir}", "out.bin", "--to", "gguf"), ".gguf"),
        (("{dir}", "--quantization", "q8_0"), "--to gguf"),
        (("{dir}", "{dir}"), "exists already"),
        (("{dir}", "{tmp}/x", "--family", "gpt2"), "cannot describe this model"),
        (("{dir}", "{tmp}/x", "--family", "gtp2"), "no family"),
    ],
)
def test_convert_says_what_is_wrong(args: tuple[str, ...], said: str, llama: Path, tmp_path: Path) -> None:
    done = command("convert", *(arg.format(dir=llama, tmp=tmp_path) for arg in args))
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_quantizations_are_those_that_can_be_written() -> None:
    assert {kind.value for kind in GGUFQuantization} == GGML_TYPES.keys()
