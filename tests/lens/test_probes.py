"""Linear probes find planted labels and not random ones, and their directions can be steered and ablated."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens.activations import ActivationDataset, collect_activations
from cutaway.lens.probes import Probe, fit_probe

SITE = "0.out"
SIZE, WIDTH = 2000, 12


@pytest.fixture(scope="module")
def planted() -> tuple[Tensor, Tensor]:
    """Activations (SIZE, WIDTH), in which direction 3 plus noise decides the label, with other means and scales."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, WIDTH, generator=generator)
    labels = (x[:, 3] + 0.1 * torch.randn(SIZE, generator=generator) > 0).long()
    return x * torch.linspace(0.5, 4, WIDTH) + torch.arange(WIDTH), labels


@pytest.fixture(scope="module")
def dataset(planted: tuple[Tensor, Tensor], tmp_path_factory: pytest.TempPathFactory) -> ActivationDataset:
    model = nn.Sequential(nn.Embedding(SIZE, WIDTH))
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(planted[0])
    directory = tmp_path_factory.mktemp("activations")
    return collect_activations(model, torch.arange(SIZE).view(-1, 20), SITE, directory=directory)


def test_logistic_probe(dataset: ActivationDataset, planted: tuple[Tensor, Tensor]) -> None:
    x, labels = planted
    probe = fit_probe(dataset, labels)
    assert probe.test.low <= probe.test.score <= probe.test.high
    assert probe.test.score > 0.93
    assert probe.test.score == pytest.approx(float((probe.predict(x) == labels).float().mean()), abs=0.05)
    assert probe.control.low < 0.55 < probe.test.low
    assert 0.4 < probe.baseline < 0.65
    assert probe.num_train + probe.num_test == SIZE
    assert float(probe.direction()[3]) > 0.99
    torch.testing.assert_close(probe.direction(0), -probe.direction(1))


def test_ridge_probe_equals_least_squares(dataset: ActivationDataset, planted: tuple[Tensor, Tensor]) -> None:
    x, _ = planted
    target = x @ torch.linspace(-1, 1, WIDTH) + 5
    probe = fit_probe(dataset, target, kind="ridge", l2=1e-9)
    assert probe.test.score == pytest.approx(1, abs=1e-5)
    assert probe.control.score < 0.1
    torch.testing.assert_close(probe.predict(x), target, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(probe.weight[0], torch.linspace(-1, 1, WIDTH), rtol=1e-3, atol=1e-3)


def test_three_classes_and_excluded_tokens(dataset: ActivationDataset, planted: tuple[Tensor, Tensor]) -> None:
    x, _ = planted
    column = x[:, 3].contiguous()
    labels = torch.bucketize(column, column.quantile(torch.tensor([0.33, 0.66])))
    labels[::5] = -1
    probe = fit_probe(dataset, labels, control="shuffled")
    assert probe.num_train + probe.num_test == int((labels >= 0).sum())
    assert probe.test.score > 0.8
    assert probe.weight.shape == (3, WIDTH)
    assert probe.control.score < 0.45


def test_control_task_is_memorized_if_tokens_repeat(tmp_path: Any) -> None:
    """With few token ids in the test and training set, random labels of token ids are learned: selectivity is 0."""
    model = nn.Sequential(nn.Embedding(10, 32))
    torch.manual_seed(0)
    sequences = torch.randint(10, (60, 20))
    dataset = collect_activations(model, sequences, SITE, directory=tmp_path)
    probe = fit_probe(dataset, (sequences.flatten() % 2).long(), l2=1e-5)
    assert probe.test.score == 1
    assert probe.control.score == 1
    assert probe.selectivity == 0


def test_same_seed_gives_the_same_probe(dataset: ActivationDataset, planted: tuple[Tensor, Tensor]) -> None:
    first, second, other = (fit_probe(dataset, planted[1], seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.weight, second.weight)
    assert first.test == second.test
    assert first.test != other.test


@torch.no_grad()
def test_direction_is_steered_and_ablated() -> None:
    model = ct.build("tiny-llama", seed=0)
    tokens, site = torch.arange(8)[None], "blocks.1.resid_post"
    weight = torch.stack((torch.zeros(64), torch.linspace(-1, 1, 64)))
    with ct.trace(model, site) as t:
        model(tokens)
    x = torch.Tensor(t[site])
    interval: Any = (1.0, 1.0, 1.0)
    probe = Probe("logistic", site, weight, torch.zeros(2), x.mean((0, 1)), interval, interval, 0.5, 1, 1)
    unit = weight[1] / weight[1].norm()
    with ct.edit(model, probe.steer(3.0, positions=[2])), ct.trace(model, site) as t:
        model(tokens)
    expected = x.clone()
    expected[:, 2] += 3 * unit
    torch.testing.assert_close(torch.Tensor(t[site]), expected)
    with ct.edit(model, probe.ablate()), ct.trace(model, site) as t:
        model(tokens)
    ablated = torch.Tensor(t[site])
    torch.testing.assert_close(ablated @ unit, (x.mean((0, 1)) @ unit).expand(1, 8), rtol=1e-4, atol=1e-4)
    others = x - (x @ unit)[..., None] * unit
    torch.testing.assert_close(ablated - (ablated @ unit)[..., None] * unit, others, rtol=1e-4, atol=1e-4)


def test_errors(dataset: ActivationDataset) -> None:
    labels = torch.zeros(SIZE, dtype=torch.long)
    for arguments, message in (
        ({"labels": labels}, "fewer than two classes"),
        ({"labels": labels[:5]}, "one label for each of the 2000 tokens"),
        ({"labels": labels.float()}, "pass integers"),
        ({"labels": torch.arange(SIZE) % 2, "kind": "other"}, "kind is 'other'"),
        ({"labels": torch.arange(SIZE) % 2, "control": "other"}, "control is 'other'"),
        ({"labels": torch.arange(SIZE) % 2, "test_fraction": 1.0}, "0 < test_fraction < 1"),
        ({"labels": torch.where(torch.arange(SIZE) < 20, torch.arange(SIZE) % 2, -1)}, "in one sequence"),
    ):
        with pytest.raises(InputError, match=message):
            fit_probe(dataset, **arguments)  # type: ignore[arg-type]
