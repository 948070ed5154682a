"""The pretrained model: size, agreement with transformers, quality, recipe, `cutaway demo`."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import cutaway as ct
from cutaway.cli import main
from cutaway.pretrained import find_pretrained, list_pretrained
from cutaway.train.recipe.load import load_recipe


def test_pretrained_is_small_and_opens_in_transformers() -> None:
    assert list_pretrained() == ["tiny-python"]
    directory = find_pretrained("tiny-python")
    assert directory is not None
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 12e6
    checkpoint = ct.load("tiny-python", dtype=torch.float32)
    assert checkpoint.tokenizer is not None
    tokens = torch.tensor([checkpoint.tokenizer.encode("for name in sorted(os.")])
    transformers_model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits = checkpoint.model(tokens)
    torch.testing.assert_close(transformers_model(tokens).logits, logits, rtol=1e-5, atol=1e-4)
    assert checkpoint.tokenizer.decode([int(logits[0, -1].argmax())]) == "list"


def test_pretrained_has_learned_python() -> None:
    """On this file, which was not in the training data, bits per byte are far below chance (8)."""
    text = Path(__file__).read_text(encoding="utf-8")
    assert ct.evaluate(ct.load("tiny-python", dtype=torch.float32), [text]).bits_per_byte < 3


def test_pretrained_matches_its_recipe() -> None:
    recipe_config, config = load_recipe("tiny-python").transformer_config, ct.config("tiny-python")
    assert recipe_config.replace(vocab_size=config.vocab_size).d_model == config.d_model
    assert ct.size(recipe_config).num_parameters == ct.size(config).num_parameters


def test_directory_of_the_same_name_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ct.save(ct.load("tiny-python"), tmp_path / "tiny-python")
    (tmp_path / "tiny-python" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        ct.load("tiny-python")


@pytest.mark.unchecked
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
