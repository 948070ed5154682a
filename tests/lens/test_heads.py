"""Models with heads of tasks: sites, analyses of hidden states, the exported page, and what they are refused for."""

from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.errors import ConfigError, InputError
from cutaway.families.gguf.load_save import save_gguf
from cutaway.families.replace_head import replace_head


@pytest.fixture(scope="module")
def classifier() -> ct.Checkpoint:
    return replace_head(ct.load("tiny-english"), "sequence-classification", labels=["ham", "spam"], seed=0)


def test_sites_of_a_classifier_are_those_of_its_body(classifier: ct.Checkpoint) -> None:
    model: Any = classifier.model
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), ct.trace(model, "resid_post", "final_norm") as t:
        logits = model(tokens)
    assert torch.equal(model.head(t["final_norm"], None), logits)
    with pytest.raises(
        InputError, match="no site 'logits': the model has a SequenceClassificationHead and no language"
    ):
        ct.trace(model, "logits")


def test_page_of_a_classifier_is_exported(classifier: ct.Checkpoint, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from cutaway.cli import app

    saved, page = ct.save(classifier, tmp_path / "model"), tmp_path / "page.html"
    result = CliRunner().invoke(app, ["open", str(saved), "--export", str(page), "The cat sat"])
    assert result.exit_code == 0, result.output
    assert page.stat().st_size > 100_000


def test_classifier_is_refused_where_an_lm_head_is_needed(classifier: ct.Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a head of kind 'sequence-classification', so it cannot generate; call model"):
        ct.generate(classifier, ["hello"], max_new_tokens=2)
    with pytest.raises(InputError, match="so it computes no logits of tokens; use a model with an LM head"):
        ct.evaluate(classifier, ["some text to score"])
    with pytest.raises(ConfigError, match="only language models can be saved as GGUF"):
        save_gguf(classifier, tmp_path / "model.gguf")
