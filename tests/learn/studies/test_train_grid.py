"""Training of many models at once equals training of each."""

import pytest
import torch
import torch.nn.functional as F

import cutaway as ct
from cutaway.learn.studies.train_grid import MarkovChain, TrainingGrid, next_token_loss, train_grid
from cutaway.lens.analysis.gradients import placement_config

pytestmark = pytest.mark.unchecked


def test_grid_equals_separate_training() -> None:
    """Weights and losses of every member equal those of a loop with torch.optim.Adam."""
    data, config = MarkovChain(), placement_config("post", 2, activation="relu", d_model=16, vocab_size=16)
    grid = TrainingGrid(lrs=(1e-3, 1e-2), warmups=(0, 4), num_seeds=2, steps=6, batch_size=3, seq_len=7)
    trained = train_grid(lambda seed: ct.build(config, seed=seed), data, grid)
    for index, (lr, warmup, seed) in enumerate(grid.members):
        model = ct.build(config, seed=seed)
        optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
        for step, batch in enumerate(data.sample(18, 7, torch.Generator().manual_seed(seed)).split(3)):
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / max(1, warmup))
            loss = next_token_loss(model(batch), batch)
            assert loss.item() == pytest.approx(float(trained.losses[step, index]), abs=1e-4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for ours, theirs in zip(trained.load_member(index).parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


def test_markov_chain_entropies() -> None:
    """The cross-entropy of the true transitions on samples is the entropy rate."""
    data = MarkovChain()
    tokens = data.sample(4000, 9, torch.Generator().manual_seed(0))
    loss = F.nll_loss(data.transitions[tokens[:, :-1]].log().flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(data.entropy_rate, rel=0.02)
    assert data.progress(data.unigram_entropy) == 0
    assert data.progress(data.entropy_rate) == 1
