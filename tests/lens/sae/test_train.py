"""Training recovers a known dictionary, depends only on the seed, and metrics have known values in limiting cases."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens.activations import ActivationDataset, collect_activations
from cutaway.lens.sae import (
    SAEConfig,
    SAETrainStep,
    SparseAutoencoder,
    attach_sae,
    evaluate_sae,
    feature_density,
    feature_logit_effects,
    feature_report,
    train_sae,
)

D_IN, NUM_FEATURES, ACTIVE = 16, 24, 2


@pytest.fixture(scope="module")
def dictionary() -> Tensor:
    directions = torch.randn(NUM_FEATURES, D_IN, generator=torch.Generator().manual_seed(0))
    return directions / directions.norm(dim=1, keepdim=True)


@pytest.fixture(scope="module")
def dataset(dictionary: Tensor, tmp_path_factory: pytest.TempPathFactory) -> ActivationDataset:
    """Activations that are sums of two directions of the dictionary, with coefficients from 1 to 2, and an offset."""
    generator = torch.Generator().manual_seed(1)
    size = 4000
    active = torch.rand(size, NUM_FEATURES, generator=generator).topk(ACTIVE).indices
    coefficients = torch.zeros(size, NUM_FEATURES).scatter(1, active, 1 + torch.rand(size, ACTIVE, generator=generator))
    model = nn.Sequential(nn.Embedding(size, D_IN))
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(coefficients @ dictionary + 0.3)
    directory = tmp_path_factory.mktemp("activations")
    return collect_activations(model, torch.arange(size).view(-1, 50), "0.out", directory=directory)


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "standard": {"sparsity_coefficient": 0.6},
    "topk": {},
    "jumprelu": {"sparsity_coefficient": 0.3},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ["topk", "standard", "jumprelu"])
def test_known_dictionary_is_recovered(dataset: ActivationDataset, dictionary: Tensor, architecture: Any) -> None:
    cfg = SAEConfig(architecture, D_IN, 48, ACTIVE if architecture == "topk" else None, site="0.out")
    steps: list[SAETrainStep] = []
    options: dict[str, Any] = {"num_steps": 500, "batch_size": 256, "lr": 5e-3, "dead_after_tokens": 5000}
    sae = train_sae(dataset, cfg, on_step=steps.append, **options, **ARCHITECTURES[architecture])
    cosines = (sae.W_dec @ dictionary.T).max(0).values
    assert cosines.mean() > 0.95, cosines
    x = dataset[:]["0.out"]
    explained = 1 - (x - sae(x)).square().sum() / (x - x.mean(0)).square().sum()
    assert explained > 0.9
    assert len(steps) == 500
    torch.testing.assert_close(steps[-1].explained_variance, float(explained), rtol=0, atol=0.03)
    assert steps[-1].l0 < 6
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(48))


def test_training_depends_only_on_the_seed(dataset: ActivationDataset) -> None:
    cfg = SAEConfig("topk", D_IN, 48, 2, site="0.out")
    first, second, other = (train_sae(dataset, cfg, num_steps=20, batch_size=64, seed=seed) for seed in (0, 0, 1))
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.W_dec, other.W_dec)


def test_auxiliary_loss_revives_dead_features(dataset: ActivationDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that begin with a bias of −3 are never active without the auxiliary loss, and some are with it."""
    initialize = SparseAutoencoder.__init__

    def initialize_with_dead_features(sae: SparseAutoencoder, *args: Any, **kwargs: Any) -> None:
        initialize(sae, *args, **kwargs)
        with torch.no_grad():
            sae.b_enc[24:] = -3.0

    monkeypatch.setattr(SparseAutoencoder, "__init__", initialize_with_dead_features)

    def count_alive(coefficient: float) -> int:
        monkeypatch.setattr("cutaway.lens.sae.train._AUX_COEFFICIENT", coefficient)
        cfg = SAEConfig("standard", D_IN, 48, site="0.out")
        options: dict[str, Any] = {"batch_size": 256, "lr": 1e-2, "dead_after_tokens": 512, "sparsity_coefficient": 0.1}
        sae = train_sae(dataset, cfg, num_steps=100, **options)
        return int((feature_density(sae, dataset)[24:] > 0).sum())

    assert count_alive(1.0) > 2 * count_alive(0.0) + 5


def test_exact_and_constant_autoencoders_recover_all_and_none_of_the_loss() -> None:
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    eye = torch.eye(256)
    sae = SparseAutoencoder(SAEConfig("standard", 256, 512, site="blocks.2.resid_post"))
    with torch.no_grad():
        sae.W_enc.copy_(torch.cat((eye, -eye), 1))
        sae.W_dec.copy_(sae.W_enc.T)
    texts = ["Once upon a time there was a little girl named Lily.", "The cat sat on the mat."]
    metrics = evaluate_sae(checkpoint, sae, texts)
    assert metrics.explained_variance == pytest.approx(1, abs=1e-6)
    assert metrics.loss_recovered == pytest.approx(1, abs=1e-4)
    assert metrics.l0 == pytest.approx(256, abs=1)
    assert checkpoint.tokenizer is not None
    losses, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([checkpoint.tokenizer.encode(text)])
        with torch.no_grad():
            losses += float(nn.functional.cross_entropy(checkpoint.model(ids)[0, :-1], ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    assert metrics.loss == pytest.approx(losses / count, rel=1e-5)
    with torch.no_grad():
        sae.W_dec.zero_()
    metrics = evaluate_sae(checkpoint, sae, texts)
    assert metrics.loss_recovered == pytest.approx(0, abs=1e-5)


def test_report_of_a_feature(tmp_path: Path) -> None:
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    assert checkpoint.tokenizer is not None
    texts = ["The cat sat on the mat.", "The dog saw the cat.", "A bird sang."]
    site = "blocks.5.resid_post"
    dataset = collect_activations(checkpoint, texts, site, directory=tmp_path)
    sae = SparseAutoencoder(SAEConfig("standard", 256, 300, site=site), seed=0)
    (report,) = feature_report(checkpoint, sae, dataset, 7, num_examples=2)
    acts = sae.encode(dataset[:][site])[:, 7].detach()
    assert report.density == pytest.approx(float((acts > 0).float().mean()))
    assert report.max_activation == pytest.approx(float(acts.max()))
    best = report.top_tokens[0]
    assert best.index == int(acts.argmax())
    assert any((best.before + best.token + best.after) in text for text in texts)
    assert len({dataset[token.index].sequences.item() for token in report.top_tokens}) == len(report.top_tokens)
    assert str(report).startswith("feature 7: active on")

    # The direct effect is the change of the logits at the last site, up to the scale of the final norm.
    effects = feature_logit_effects(checkpoint, sae, 7, top_k=2048)
    tokens = torch.tensor([checkpoint.tokenizer.encode(texts[0])])
    with torch.no_grad(), attach_sae(checkpoint, sae):
        logits = []
        for value in (0.0, 0.01):
            with ct.edit(checkpoint, {f"{site}.sae.acts": {"do": "replace", "value": value, "units": [7]}}):
                logits.append(checkpoint.model(tokens)[0, -1])
    change = (logits[1] - logits[0]).sort(descending=True).values
    assert float(torch.corrcoef(torch.stack((change, effects.values)))[0, 1]) > 0.9


def test_errors(dataset: ActivationDataset) -> None:
    def train(architecture: Any = "topk", d_in: int = D_IN, k: int | None = 2, **options: Any) -> None:
        train_sae(dataset, SAEConfig(architecture, d_in, 48, k, site="0.out"), num_steps=1, **options)

    with pytest.raises(InputError, match="pass d_in=16"):
        train(d_in=17)
    with pytest.raises(InputError, match="has no sparsity loss"):
        train(sparsity_coefficient=0.1)
    with pytest.raises(InputError, match="standard needs one"):
        train("standard", k=None)
    with pytest.raises(InputError, match="can be loaded, but not trained"):
        train("gated", k=None)
    with pytest.raises(InputError, match="pass a smaller one"):
        train(batch_size=5000)
    with pytest.raises(InputError, match="topk needs k"):
        SAEConfig("topk", 4, 8)
    with pytest.raises(InputError, match="k ≤ d_sae"):
        SAEConfig("topk", 4, 8, 9)
