"""The model that comes with cutaway: small, trained, others open it, and every verb takes its name."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import cutaway as ct
from cutaway.cli import main
from cutaway.pretrained import find_pretrained, list_pretrained
from cutaway.train.recipe.load import load_recipe


def test_it_is_small_and_others_open_it() -> None:
    assert list_pretrained() == ["tiny-python"]
    directory = find_pretrained("tiny-python")
    assert directory is not None
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 12e6
    checkpoint = ct.load("tiny-python", dtype=torch.float32)
    assert checkpoint.tokenizer is not None
    tokens = torch.tensor([checkpoint.tokenizer.encode("for name in sorted(os.")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits = checkpoint.model(tokens)
    torch.testing.assert_close(theirs(tokens).logits, logits, rtol=1e-5, atol=1e-4)
    assert checkpoint.tokenizer.decode([int(logits[0, -1].argmax())]) == "list"


def test_it_has_learned_python() -> None:
    """Text of this project, which it has not read, is far from chance: 8 bits a byte."""
    text = Path(__file__).read_text(encoding="utf-8")
    assert ct.evaluate(ct.load("tiny-python", dtype=torch.float32), [text]).bits_per_byte < 3


def test_it_is_what_its_recipe_makes() -> None:
    made, here = load_recipe("tiny-python").transformer_config, ct.config("tiny-python")
    assert made.replace(vocab_size=here.vocab_size).d_model == here.d_model
    assert ct.size(made).num_parameters == ct.size(here).num_parameters


def test_a_directory_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ct.save(ct.load("tiny-python"), tmp_path / "tiny-python")
    (tmp_path / "tiny-python" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        ct.load("tiny-python")


@pytest.mark.unchecked
def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`cutaway demo`, with less training than it does."""
    source = tmp_path / "lib"
    source.mkdir()
    monkeypatch.setattr("sys.argv", ["cutaway", "demo", "--steps", "2", "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    told = json.loads(capsys.readouterr().out)
    assert told["tiny-python"]["bits_per_byte"] < 3
    assert told["yours"]["bits_per_byte"] > 3
    assert told["journey"]["residual_sum_error"] < 1e-3
    assert told["tiny-python"]["sample"].startswith("def ")
