"""Study `components`: equal parameters, edits that hold in training and evaluation, forms, paired differences."""

from dataclasses import replace

import pytest
import torch

from cutaway.learn.studies import components
from cutaway.learn.studies.components import (
    BASELINE,
    EDITS_AFTER_TRAINING,
    NO_ATTENTION,
    SEQ_LEN,
    TRAINING_TEXT,
    VALIDATION_TEXT,
    VARIANTS,
    VariantLosses,
    compare_missing_mask,
    compare_variants,
    measure_edits,
    prefix_loss,
    train_variant,
    validation_loss,
)
from cutaway.learn.studies.train_grid import next_token_loss
from cutaway.lens.edit import edit
from cutaway.model import build

SMALLEST_GRID = replace(components.GRID, lrs=(3e-3, 1e-2), num_seeds=2, steps=2, batch_size=2)
EQUAL = ("untied-equal", "gelu", "relu", "no-ffn-equal", "no-attention-equal", "layernorm", "post-norm", "heads-8")


def _num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", EQUAL)
def test_variants_have_the_parameters_of_the_baseline(name: str) -> None:
    counts = [_num_parameters(build(VARIANTS[key].config, device="meta")) for key in (name, BASELINE)]
    assert counts[0] == pytest.approx(counts[1], rel=0.01)


def test_text_is_bytes_of_disjoint_modules() -> None:
    first, again = (TRAINING_TEXT.sample(4, 50, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert bytes(first[0].tolist()) in bytes(TRAINING_TEXT.text.tolist())
    window = bytes(VALIDATION_TEXT.text[1000:1200].tolist())
    assert window not in bytes(TRAINING_TEXT.text.tolist())
    assert 2 < TRAINING_TEXT.unigram_entropy < 4


def test_model_without_attention_depends_on_the_current_token_only() -> None:
    variant = VARIANTS["no-attention"]
    assert variant.edits == NO_ATTENTION
    model = build(variant.config, seed=0)
    tokens = torch.randint(256, (1, 8), generator=torch.Generator().manual_seed(0))
    with edit(model, variant.edits):
        torch.testing.assert_close(model(tokens).flip(1), model(tokens.flip(1)))


def test_trained_variant_reports_the_best_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "NUM_EVAL_SEQUENCES", 4)
    result = train_variant("swap", grid=SMALLEST_GRID)
    means = {lr: sum(losses) / 2 for lr, losses in result.losses.items()}
    assert set(means) == set(SMALLEST_GRID.lrs)
    assert means[result.best_lr] == min(means.values())
    estimates = result.estimates()
    assert estimates["loss/swap"].mean == pytest.approx(means[result.best_lr])
    reloaded = [validation_loss(model, result.variant.edits) for model in result.models()]
    assert reloaded == pytest.approx(list(result.best_losses))


def test_missing_mask_is_measured_with_and_without_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "NUM_EVAL_SEQUENCES", 4)
    monkeypatch.setattr(components, "PREFIX_LENGTHS", range(60, SEQ_LEN + 1))
    baseline, no_mask = (train_variant(name, grid=SMALLEST_GRID) for name in (BASELINE, "no-mask"))
    values = [
        {
            "loss-with-mask": [validation_loss(model) for model in variant.models()],
            "prefix-loss": [prefix_loss(model, variant.variant.edits) for model in variant.models()],
        }
        for variant in (baseline, no_mask)
    ]
    estimates = compare_missing_mask({BASELINE: baseline, "no-mask": no_mask}, *values)
    with_mask, without_mask = (estimates[f"no-mask/loss-{name}-mask"].mean for name in ("with", "without"))
    assert with_mask != without_mask
    assert estimates["difference/no-mask-with-mask"].mean == pytest.approx(with_mask - without_mask)
    model = next(baseline.models())
    tokens = components.sample_evaluation(VALIDATION_TEXT, SEQ_LEN + 1, "cpu")
    with torch.no_grad():
        teacher_forced = float(next_token_loss(model(tokens)[:, 59:], tokens[:, 59:]))
    assert prefix_loss(model) == pytest.approx(teacher_forced, rel=1e-5)
    assert estimates["prefix-loss/baseline"].count == 2


def test_edits_after_training_are_compared_with_the_same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "NUM_EVAL_SEQUENCES", 4)
    baseline = train_variant(BASELINE, grid=SMALLEST_GRID)
    estimates = measure_edits(baseline)
    loss = sum(baseline.best_losses) / 2
    for name in EDITS_AFTER_TRAINING:
        assert estimates[f"difference/after-{name}"].mean == pytest.approx(estimates[f"after/{name}"].mean - loss)
    # The residual stream of an untrained model is small, and the final norm gives it an RMS of 1.
    assert estimates["logit-scale/no-final-norm"].high < 0.5


def test_differences_are_paired_by_seed() -> None:
    def variant(name: str, losses: list[float]) -> VariantLosses:
        return VariantLosses(name, {3e-3: losses})

    trained = {"gelu": variant("gelu", [1.1, 5.1, 9.1]), BASELINE: variant(BASELINE, [1.0, 5.0, 9.0])}
    estimates = compare_variants(trained)
    assert set(estimates) == {"difference/gelu-baseline"}
    assert estimates["difference/gelu-baseline"].low == pytest.approx(0.1)
    assert estimates["difference/gelu-baseline"].high == pytest.approx(0.1)
