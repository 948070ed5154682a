"""Study `residual-depth`: paths, expansion by orders, deletion, survival of writes, and the loss landscape."""

from dataclasses import replace

import pytest
import torch

import cutaway.learn.studies.residual_depth as study
from cutaway.learn.studies import copy_by_depth, loss_landscape
from cutaway.learn.studies.loss_landscape import (
    GRID as LANDSCAPE_GRID,
)
from cutaway.learn.studies.loss_landscape import (
    LossSurface,
    count_maxima,
    describe_slice,
    lanczos,
    measure_landscape,
)
from cutaway.learn.studies.rank_correlation import spearman
from cutaway.learn.studies.residual_depth import (
    GRIDS,
    ResidualStack,
    count_paths,
    decoder_config,
    measure_deletions,
    measure_gradient_paths,
    measure_model,
    measure_reads,
    measure_survival,
    measure_tiny_python,
    measure_trained,
    residual_stack,
    truncated_expansion,
)
from cutaway.learn.studies.train_grid import MarkovChain, TrainingGrid, next_token_loss, train_grid
from cutaway.lens.edit import edit
from cutaway.model import Transformer, build

TOKENS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> Transformer:
    """A decoder of 3 blocks whose weights are large enough for effects above rounding."""
    model = build(decoder_config(3, 16), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter *= 10
    return model


def linear_stack() -> ResidualStack:
    """Three linear sublayers."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64)
    x = torch.randn(1, 5, 4, generator=generator, dtype=torch.float64)
    sublayers = [lambda x, matrix=matrix: x @ matrix for matrix in matrices]
    return ResidualStack(torch.zeros(1, 5, dtype=torch.long), x, sublayers, lambda x: x)


def test_number_of_paths() -> None:
    counts = {key: estimate.mean for key, estimate in count_paths().items()}
    for blocks in (1, 6, 12, 32):
        assert counts[f"paths/sequential/{blocks}"] == 2 ** (2 * blocks)
        assert counts[f"paths/parallel/{blocks}"] == 3**blocks


@torch.no_grad()
def test_residual_stack_computes_the_logits_of_the_model(model: Transformer) -> None:
    stack = residual_stack(model, TOKENS)
    torch.testing.assert_close(stack.compute_logits(stack.run()), model(TOKENS))
    with edit(model, {"blocks.1": "skip"}):
        torch.testing.assert_close(stack.compute_logits(stack.run((2, 3))), model(TOKENS))


def test_expansion_by_orders_sums_paths_by_length() -> None:
    """In a linear stack, the terms of order k are the paths through k sublayers."""
    stack = linear_stack()
    x, (a, b, c) = stack.embedded, stack.sublayers
    sums = study._sums_by_size(stack)
    first = x + a(x) + b(x) + c(x)
    second = first + b(a(x)) + c(a(x)) + c(b(x))
    for order, expected in enumerate((x, first, second, stack.run())):
        torch.testing.assert_close(truncated_expansion(sums, order), expected)


def test_gradients_by_path_length_add_to_the_gradient(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    results = measure_gradient_paths(model, TOKENS)
    assert len(results) == 6 + 1 + 1
    assert 0 < results["gradient-path-length"] < 1
    for block in model.stacks["decoder"].blocks:  # without sublayers, the path of length 0 is the whole gradient
        for branch in (block.attn, block.ffn):
            monkeypatch.setattr(branch, "scale", 0.0)
    norms = measure_gradient_paths(model, TOKENS)
    assert norms["gradient-by-path-length/0"] == pytest.approx(1)
    assert norms["gradient-by-path-length/1"] == 0


@torch.no_grad()
def test_deletion_cost_is_the_increase_of_the_loss(model: Transformer) -> None:
    stack = residual_stack(model, TOKENS)
    results = measure_deletions(stack)
    with edit(model, {"blocks.2": "skip"}):
        increase = float(next_token_loss(model(TOKENS), TOKENS) - stack.baseline.mean())
    assert results["delete-block/2"] == pytest.approx(increase, abs=1e-5)
    assert results["delete-middle-block"] == results["delete-block/1"] == results["delete-middle-block-max"]


@torch.no_grad()
def test_a_cancelled_write_does_not_survive() -> None:
    x = torch.randn(1, 5, 4)
    write = torch.randn(1, 5, 4)
    signs = (1, 0, -1, 0)  # the second block removes what the first block wrote
    sublayers = [lambda x, sign=sign: sign * write for sign in signs]
    results = measure_survival(ResidualStack(torch.zeros(1, 5, dtype=torch.long), x, sublayers, lambda x: x))
    assert results["survival/0/1"] == pytest.approx(0, abs=1e-6)
    assert results["survival/embedding/1"] == pytest.approx(1, abs=1e-5)


@torch.no_grad()
def test_removal_before_the_next_block_is_deletion(model: Transformer) -> None:
    stack = residual_stack(model, TOKENS)
    reads, deletions = measure_reads(stack), measure_deletions(stack)
    for layer in (0, 1):
        assert reads[f"remove/{layer}/{layer + 1}"] == pytest.approx(deletions[f"delete-block/{layer}"], abs=1e-5)
    assert reads["read/2/head"] == pytest.approx(deletions["delete-block/2"], abs=1e-5)


def test_all_measurements_of_a_model(model: Transformer) -> None:
    results = measure_model(model, TOKENS)
    assert results["path-sum-error/0"] == pytest.approx(1)
    assert results["path-sum-error/6"] == 0
    assert all(torch.isfinite(torch.tensor(value)) for value in results.values())


def test_tiny_python_needs_its_first_block_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "EXPANDED_TOKENS", 3)
    monkeypatch.setattr(study, "NUM_DELETIONS", 2)
    estimates = measure_tiny_python(num_groups=1, num_tokens=24)
    costs = [estimates[f"delete-block/tiny-python/{layer}"].mean for layer in range(6)]
    assert max(costs) == costs[0] > 1
    assert estimates["path-sum-error/tiny-python/6"].mean > 1  # no convergence by orders


def test_trained_models_are_measured_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = replace(GRIDS["8-blocks"][2], num_seeds=2, steps=2, batch_size=2, seq_len=9)
    monkeypatch.setitem(study.GRIDS, "8-blocks", (3, 8, grid))
    estimates = measure_trained("8-blocks")
    assert estimates["loss/8-blocks"].count == 2


def test_rank_correlation() -> None:
    assert spearman(torch.tensor([1, 2, 30]), torch.tensor([0.1, 0.2, 0.3])) == pytest.approx(1)
    assert spearman(torch.tensor([1, 2, 30]), torch.tensor([3, 2, 1])) == pytest.approx(-1)


def test_slice_of_a_parabola_is_convex() -> None:
    x = torch.linspace(-1, 1, 41, dtype=torch.float64)
    stats = describe_slice(3 * x**2)
    assert stats["curvature"] == pytest.approx(6)
    assert stats["sharpness"] == pytest.approx(3 / 4)
    assert stats["nonconvex"] == stats["local-maxima"] == 0


def test_count_of_maxima_ignores_small_ones() -> None:
    x = torch.linspace(0, 1, 401)
    assert count_maxima(torch.sin(6 * torch.pi * x)) == 3
    assert count_maxima(x + 0.001 * torch.sin(60 * torch.pi * x)) == 0


def test_lanczos_finds_the_extreme_eigenvalues() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(30, 30, generator=generator, dtype=torch.float64)
    matrix = matrix + matrix.T
    found = lanczos(lambda v: matrix @ v, torch.randn(30, generator=generator, dtype=torch.float64), 30)
    expected = torch.linalg.eigvalsh(matrix)
    torch.testing.assert_close(found[[0, -1]], expected[[0, -1]])


def test_directions_have_the_norms_of_the_rows_of_the_weights() -> None:
    data = MarkovChain()
    config = decoder_config(1, 8, vocab_size=data.num_symbols)
    grid = replace(LANDSCAPE_GRID, lrs=(1e-3,), num_seeds=1, steps=1, batch_size=2)
    surface = LossSurface(train_grid(lambda seed: build(config, seed=seed), data, grid), torch.randint(16, (2, 9)))
    model = build(config, seed=0)
    flat = torch.cat([parameter.flatten() for parameter in model.parameters()]).detach()
    direction = surface.random_direction(flat, torch.Generator().manual_seed(0))
    offset = 0
    for parameter in model.parameters():
        part = direction[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
        norm = parameter.norm(dim=-1) if parameter.ndim > 1 else torch.zeros(parameter.shape[:-1])
        torch.testing.assert_close(part.norm(dim=-1), norm)


def test_landscape_without_residual_connections_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_POINTS": 5, "NUM_DIRECTIONS": 1, "HESSIAN_ITERATIONS": 3}.items():
        monkeypatch.setattr(loss_landscape, name, value)
    grid = replace(LANDSCAPE_GRID, lrs=(3e-3,), num_seeds=2, steps=3, batch_size=2)
    with_residual, without = (measure_landscape(1, residual, grid=grid) for residual in (True, False))
    curvatures = with_residual["landscape/curvature/residual/1"], without["landscape/curvature/no-residual/1"]
    assert curvatures[0].count == 2
    assert curvatures[0] != curvatures[1]


def test_copying_loss_is_that_of_each_token_at_its_own_position() -> None:
    tokens = copy_by_depth.RandomTokens().sample(2, 5, torch.Generator().manual_seed(0))
    logits = 50 * torch.nn.functional.one_hot(tokens, copy_by_depth.VOCAB_SIZE).float()
    assert copy_by_depth.copy_loss(logits, tokens) < 1e-6 < copy_by_depth.copy_loss(logits.roll(1, 1), tokens)


@pytest.mark.nightly
def test_one_block_learns_to_copy_and_eight_without_residual_connections_do_not() -> None:
    grid = TrainingGrid(lrs=(1e-2,), warmups=(0,), num_seeds=2, steps=50)
    shallow, deep = (copy_by_depth.measure_copying(depth, False, grid=grid) for depth in (1, 8))
    assert shallow["copy-accuracy/no-residual/1"].mean > 0.9
    assert deep["copy-accuracy/no-residual/8"].mean < 0.5
