"""Study `recurrent`: the equations of nn.RNN and nn.LSTM, equal sizes, exact counts, tasks and gradients."""

from dataclasses import replace

import pytest
import torch

from cutaway.learn.studies.recall_tasks import COPY_GRID, CopyTask, RecallTask, Task
from cutaway.learn.studies.recurrent import (
    MODELS,
    STEP_LENGTHS,
    TRAINED_MODELS,
    ModelName,
    RecurrentModel,
    build_model,
    compare_on_text,
    count_dependent_steps,
    gradient_by_distance,
    measure_gradients,
    measure_task,
    num_core_parameters,
    train_task,
)
from cutaway.learn.studies.study import Estimate

SMALLEST_GRID = replace(COPY_GRID, lrs=(1e-2,), num_seeds=2, steps=2, batch_size=2)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "transformer"])
def test_training_uses_the_equations_of_the_module(name: ModelName) -> None:
    model, tokens = build_model(name, 16, seed=0), torch.randint(16, (2, 9))
    assert isinstance(model, RecurrentModel)
    torch.testing.assert_close(model(tokens), model.run_module(tokens))


def test_models_have_equal_sizes() -> None:
    sizes = [num_core_parameters(name) for name in TRAINED_MODELS]
    assert max(sizes) < 1.03 * min(sizes)


def test_dependent_products_grow_with_the_length_in_recurrent_models_alone() -> None:
    counts = {key: estimate.mean for key, estimate in count_dependent_steps().items()}
    for length in STEP_LENGTHS:
        for name in ("rnn", "lstm"):
            assert counts[f"dependent-products/{name}/{length}"] == 2 * length + 1  # two layers and the head
        assert counts[f"dependent-products/transformer/{length}"] == 2 * 6 + 1  # q·k, pattern·v and 4 matrices a block


def test_every_path_of_a_recurrent_model_passes_every_state() -> None:
    """Without one state, no gradient reaches earlier inputs. Attention has a path past each position."""
    model = build_model("rnn", 16, seed=0)
    assert isinstance(model, RecurrentModel)
    x = torch.randn(1, 6, model.core.input_size, requires_grad=True)
    first_half = model.core(x[:, :3])[1].detach()  # the state after three positions
    out = model.core(x[:, 3:], first_half)[0][:, -1]
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert not gradient[:, :3].any()
    assert gradient[:, 3:].norm(dim=-1).all()
    transformer = build_model("transformer", 16, seed=0)
    handle = transformer.get_submodule("decoder.blocks.0").register_forward_hook(
        lambda module, args, x: torch.cat([x[:, :3], x[:, 3:4].detach(), x[:, 4:]], 1)
    )
    norms = gradient_by_distance(transformer, torch.randint(16, (2, 6)))
    handle.remove()
    assert norms.all()


def test_gradient_by_distance_is_the_norm_of_the_jacobian() -> None:
    model = build_model("lstm", 16, seed=0)
    assert isinstance(model, RecurrentModel)
    tokens = torch.randint(16, (1, 5), generator=torch.Generator().manual_seed(0))
    jacobian = torch.autograd.functional.jacobian(
        lambda x: model.head(model.run_core(x))[0, -1], model.embed(tokens).detach()
    )
    expected = jacobian[:, 0].square().sum((0, 2)).sqrt()  # (V, T, d)
    measured = gradient_by_distance(model, tokens.expand(4000, -1))  # 4000 projections
    torch.testing.assert_close(measured, expected, rtol=0.1, atol=0)


def test_gradients_vanish_over_distance_in_recurrent_models_and_not_in_attention() -> None:
    estimates = {key: value for name in MODELS for key, value in measure_gradients(name, num_seeds=3).items()}
    for name in ("rnn", "rnn-orthogonal", "lstm", "lstm-forget-1"):
        assert estimates[f"gradient/init/{name}/64"].high < 0.01
    assert estimates["gradient/init/transformer/64"].low > 0.5


@pytest.mark.parametrize("task", [CopyTask(3), RecallTask(4)])
def test_targets_are_at_their_distances(task: Task) -> None:
    tokens = task.sample(20, task.length, torch.Generator().manual_seed(0))
    assert tokens.shape == (20, task.length)
    assert int(tokens.max()) < task.num_symbols
    targets, distances = task.targets(tokens), task.distances(tokens)
    positions = torch.arange(task.length - targets.shape[1], task.length)
    assert torch.equal(tokens.gather(1, positions - distances), targets)
    if isinstance(task, RecallTask):  # the key is before its value
        assert torch.equal(tokens.gather(1, positions - distances - 1), tokens[:, positions])


def test_task_results_by_distance() -> None:
    estimates = measure_task(RecallTask(4), "rnn", grid=SMALLEST_GRID)
    assert {key for key in estimates if key.startswith("accuracy")} == {
        "accuracy/recall/4/rnn",
        *(f"accuracy-by-distance/recall/4/rnn/{band}" for band in ("1-1", "2-3", "4-7", "8-15")),
    }
    assert 0 < estimates["accuracy/recall/4/rnn"].mean < 0.3
    assert "gradient-at-target/copy/4/lstm" in measure_task(CopyTask(4), "lstm", grid=SMALLEST_GRID)


def test_best_members_are_the_seeds_of_one_learning_rate() -> None:
    trained = train_task(CopyTask(4), "rnn", grid=replace(SMALLEST_GRID, lrs=(1e-2, 1e3), steps=10))
    assert trained.best_members() == [0, 1]


@pytest.mark.nightly
def test_transformer_learns_to_copy() -> None:
    grid = replace(COPY_GRID, lrs=(1e-2,), warmups=(20,), num_seeds=1, steps=150, batch_size=16)
    assert measure_task(CopyTask(1), "transformer", grid=grid)["accuracy/copy/1/transformer"].mean > 0.9


def test_equal_time_gives_fewer_steps_to_the_slower_model() -> None:
    steps = torch.arange(100, 0, -1.0)[:, None]
    curves: dict[ModelName, torch.Tensor] = {"lstm": 2 * steps, "transformer": steps}
    times = {
        "step-time/lstm-to-transformer/32": Estimate(4.0, 4.0, 4.0, 1),
        "step-time/lstm-to-transformer/64": Estimate(0.5, 0.5, 0.5, 1),
    }
    estimates = {key: value.mean for key, value in compare_on_text(curves, times).items()}
    assert estimates["text-loss-difference/equal-steps/lstm"] == 2 - 1
    assert estimates["text-loss-difference/equal-time/32/lstm"] == 2 * 76 - 1  # 25 of 100 steps
    assert estimates["text-loss-difference/equal-time/64/lstm"] == 2 - 51  # 50 steps of the Transformer
    assert estimates["text-steps-to-equal/lstm"] == pytest.approx(0.99)


def test_baselines_ignore_the_token_to_be_found() -> None:
    assert CopyTask(4).baseline == 1 / 14
    assert RecallTask(1).baseline == 1
    assert RecallTask(2).baseline == pytest.approx((1 / 16 * 2 + 15 / 16) / 2, abs=0.005)
