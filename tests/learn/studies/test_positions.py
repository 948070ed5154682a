"""Study `positions`: tasks with known losses, which methods are relative, and what is absent."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cutaway.errors import InputError
from cutaway.learn.studies import positions
from cutaway.learn.studies.positions import (
    IGNORED,
    METHODS,
    SCALINGS,
    TRAINING_LENGTH,
    AbsoluteTask,
    DistanceTask,
    IndexTask,
    LocalTask,
    StartTokenTask,
    evaluate,
    measure_method,
    position_config,
    shift_effect,
    summarize_task,
)
from cutaway.model import build

SMALLEST_GRID = replace(positions.GRID, lrs=(3e-3,), num_seeds=2, steps=2, batch_size=2)


def test_learned_positions_beyond_the_table_raise() -> None:
    model = build(position_config("learned", 16), seed=0)
    model(torch.zeros(1, TRAINING_LENGTH, dtype=torch.long))
    with pytest.raises(InputError, match=f"has positions 0 to {TRAINING_LENGTH - 1} only"):
        model(torch.zeros(1, TRAINING_LENGTH + 1, dtype=torch.long))


@pytest.mark.parametrize("method", METHODS)
def test_only_methods_on_the_embedding_are_absolute(method: str) -> None:
    model = build(position_config(method, 16), seed=0)
    tokens = torch.randint(16, (2, TRAINING_LENGTH), generator=torch.Generator().manual_seed(0))
    effect = shift_effect(model, tokens)
    assert effect > 0.05 if method in ("sinusoidal", "learned") else effect < 1e-5


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaling_of_rope_is_the_identity_at_the_training_length(scaling: str) -> None:
    plain, scaled = (build(position_config("rope", 16, scaling=name), seed=0) for name in (None, scaling))
    tokens = torch.randint(16, (2, TRAINING_LENGTH), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain(tokens), scaled(tokens))


def test_true_transitions_reach_the_optimum_of_the_local_task() -> None:
    task = LocalTask()
    tokens = task.sample(2000, 64, torch.Generator().manual_seed(0))
    log_probs = task.transitions[tokens[:, :-2], tokens[:, 1:-1]].log()
    loss = float(F.nll_loss(log_probs.flatten(0, 1), tokens[:, 2:].flatten()))
    assert loss == pytest.approx(task.optimum, rel=0.01)
    pair_counts = torch.bincount(tokens[:, :-1].flatten() * 8 + tokens[:, 1:].flatten(), minlength=64).view(8, 8)
    torch.testing.assert_close(pair_counts / pair_counts.sum(), task.pair_frequencies.float(), atol=2e-3, rtol=0)
    assert task.optimum < task.chance < torch.log(torch.tensor(8.0))


def test_labels_of_tasks_on_random_tokens() -> None:
    tokens = DistanceTask().sample(3, TRAINING_LENGTH, torch.Generator().manual_seed(0))
    row, distance, index = tokens[0].tolist(), DistanceTask.DISTANCE, AbsoluteTask.INDEX
    assert DistanceTask().label(tokens)[0].tolist() == [IGNORED] * distance + row[:-distance]
    assert AbsoluteTask().label(tokens)[0].tolist() == [IGNORED] * (index + 1) + [row[index]] * (
        TRAINING_LENGTH - index - 1
    )
    started = StartTokenTask().cut(StartTokenTask().sample(3, 64, torch.Generator().manual_seed(0)), TRAINING_LENGTH)
    assert ((started == 16) == (torch.arange(TRAINING_LENGTH) == 0)).all()
    assert (StartTokenTask().label(started)[:, -1] == started[:, index]).all()
    task = IndexTask()
    assert task.label(tokens)[0].tolist() == [(t + int(n)) % 16 for t, n in zip(row, task.numbers, strict=True)]


def test_results_are_absent_where_a_method_has_no_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "NUM_EVAL_SEQUENCES", 4)
    learned, *_ = measure_method(DistanceTask(), "learned", grid=SMALLEST_GRID)
    assert set(learned) == {("learned", 1)}
    rope, *_ = measure_method(DistanceTask(), "rope", grid=SMALLEST_GRID)
    scaled = {(f"rope-{scaling}", length) for scaling in SCALINGS for length in (2, 4)}
    assert set(rope) == {("rope", 1), ("rope", 2), ("rope", 4)} | scaled
    assert all(len(losses) == SMALLEST_GRID.num_seeds for losses in rope.values())
    index, *_ = measure_method(IndexTask(), "alibi", grid=SMALLEST_GRID)
    assert set(index) == {("alibi", 1)}


def test_evaluation_covers_the_last_half_training_length() -> None:
    class LastToken(torch.nn.Module):
        """Predicts label 3 with certainty in the evaluated positions, and label 0 before."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            labels = torch.zeros_like(tokens)
            labels[:, -TRAINING_LENGTH // 2 :] = 3
            return 100.0 * F.one_hot(labels, 16)

    tokens = torch.full((2, 4 * TRAINING_LENGTH), 3)
    for length in positions.LENGTHS:
        assert evaluate(LastToken(), DistanceTask(), tokens, length) == pytest.approx(0, abs=1e-6)


def test_summary_has_progress_and_paired_changes() -> None:
    chance = DistanceTask().chance
    losses = {("rope", 1): [0.0, 0.2], ("rope", 2): [1.0, 1.2], ("rope-yarn", 2): [0.5, 0.7], ("alibi", 1): [0.3, 0.5]}
    estimates = summarize_task(DistanceTask(), losses)
    assert estimates["progress/rope/distance/1x"].mean == pytest.approx(1 - 0.1 / chance)
    assert estimates["change/rope/distance/2x"].mean == pytest.approx(1)
    assert estimates["change/rope-yarn/distance/2x"].high == pytest.approx(0.5)
    assert estimates["difference/alibi-rope/distance/1x"].low == pytest.approx(0.3)


def test_every_result_has_a_stable_key() -> None:
    losses = {(method, 1): [0.1, 0.2] for method in METHODS}
    keys = summarize_task(IndexTask(), losses)
    assert {f"progress/{method}/index/1x" for method in METHODS} <= keys.keys()
