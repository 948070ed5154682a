"""Study `forms`: targets of the tasks, what each form sees, equal parameters, training and comparison."""

from dataclasses import replace

import pytest
import torch

from cutaway.learn.studies import components
from cutaway.learn.studies.forms import (
    FORMS,
    GRID,
    SEPARATOR,
    SOURCE_LENGTH,
    FormModel,
    FormResults,
    PairData,
    compare_forms,
    form_config,
    measure_form,
)
from cutaway.model import build


@pytest.mark.parametrize("vocab_size", [33, 256])
def test_forms_have_equal_parameters(vocab_size: int) -> None:
    models = [build(form_config(form, vocab_size), device="meta") for form in ("decoder", "encoder-decoder")]
    decoder, pair = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert pair == pytest.approx(decoder, rel=0.01)


def test_target_of_toy_tasks() -> None:
    for task in ("translate", "sort"):
        data = PairData(task)
        tokens = data.sample(3, 2 * SOURCE_LENGTH + 1, torch.Generator().manual_seed(0))
        source, target = tokens[:, :SOURCE_LENGTH], tokens[:, SOURCE_LENGTH + 1 :]
        assert (tokens[:, SOURCE_LENGTH] == SEPARATOR).all()
        expected = data.dictionary[source].flip(1) if task == "translate" else source.sort(1).values
        assert torch.equal(target, expected)


def test_forms_see_the_source_as_their_masks_say() -> None:
    tokens = PairData("sort").sample(1, 2 * SOURCE_LENGTH + 1, torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, SOURCE_LENGTH - 1] = (tokens[:, SOURCE_LENGTH - 1] + 1) % 32
    sees_later_source = {}
    for form in FORMS:
        model = FormModel(form, build(form_config(form, 33), seed=0), SOURCE_LENGTH)
        logits, after_change = model(tokens), model(changed)
        sees_later_source[form] = not torch.equal(logits[:, 0], after_change[:, 0])
        assert not torch.allclose(logits[:, SOURCE_LENGTH], after_change[:, SOURCE_LENGTH])
        future = model(torch.cat([tokens[:, :-1], (tokens[:, -1:] + 1) % 32], 1))
        torch.testing.assert_close(logits[:, :-1], future[:, :-1])
        if form == "encoder-decoder":
            assert not logits[:, :SOURCE_LENGTH].any()
    assert sees_later_source == {"decoder": False, "prefix": True, "encoder-decoder": False}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "NUM_EVAL_SEQUENCES", 16)
    short, longer = (
        measure_form("sort", form, grid=replace(GRID, lrs=(3e-3,), num_seeds=2, steps=steps, batch_size=8))
        for steps in (1, 20)
    )
    assert max(longer.losses) < min(short.losses)


def test_forms_are_compared_with_the_decoder() -> None:
    results = {
        ("sort", "decoder"): FormResults([1.0, 2.0], [0, 0], 5, 1e-3),
        ("sort", "prefix"): FormResults([0.5, 1.5], [0, 1], 5, 1e-3),
    }
    estimates = compare_forms(results)
    assert estimates["difference/sort/prefix-decoder"].mean == -0.5
    assert estimates["exact/sort/prefix"].mean == 0.5
