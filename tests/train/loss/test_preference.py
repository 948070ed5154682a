"""Losses of preference learning: equal to the formulas of the papers and of TRL in fp64, with equal gradients."""

from typing import Any

import pytest
import torch
from support.bigram import BigramModel
from torch import Tensor
from torch.nn import functional as F

from cutaway.train.data.datasets import Row
from cutaway.train.data.preference_dataset import LabeledDataset, PairDataset
from cutaway.train.loss.chunked_cross_entropy import LossSums
from cutaway.train.loss.preference import log_odds_ratios
from cutaway.train.objectives.objective import Objective
from cutaway.train.objectives.preference import dpo, kto, orpo
from cutaway.train.objectives.reference_model import ReferenceModel
from cutaway.train.recipe.preference_objectives import DPOConfig, KTOConfig, ORPOConfig

VOCAB, BETA = 11, 0.37


def random_answer(prompt: Tensor, length: int) -> Row:
    tokens = torch.cat([prompt, torch.randint(VOCAB, (length,))])
    return tokens.numpy(), (torch.arange(len(tokens)) >= len(prompt)).long().numpy()


def random_pairs(count: int = 5) -> list[Row]:
    rows = []
    for index in range(count):
        prompt = torch.randint(VOCAB, (2 + index % 3,))
        rows.append((*random_answer(prompt, 1 + index), *random_answer(prompt, 7 - index)))
    return rows


def answer_log_probs(model: BigramModel, row: Row) -> Tensor:
    """Log-probabilities of the tokens of an answer, from the full logits of one sequence."""
    tokens, is_target = (torch.from_numpy(each) for each in row)
    log_probs = F.log_softmax(model.table[tokens[:-1]], -1)
    return torch.stack([log_probs[i, tokens[i + 1]] for i in range(len(tokens) - 1) if is_target[i + 1]])


def gradient_of(loss: Tensor, model: BigramModel) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, [model.table])
    return gradient


def assert_equal_losses(ours: LossSums, expected: Tensor, model: BigramModel) -> None:
    mean = ours.loss / ours.weight
    assert abs(float(mean.detach() - expected.detach())) <= 1e-9
    difference = gradient_of(mean, model) - gradient_of(expected, model)
    assert float(difference.abs().max()) <= 1e-9


@pytest.fixture
def policy() -> BigramModel:
    return BigramModel(VOCAB, seed=1)


@pytest.fixture
def reference() -> BigramModel:
    return BigramModel(VOCAB, seed=2)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo(loss_type: Any, policy: BigramModel, reference: BigramModel) -> None:
    rows = random_pairs()
    batch = PairDataset(rows, 0, pad_id=0).collate(rows)
    ours = dpo(batch, DPOConfig(beta=BETA, loss_type=loss_type), ReferenceModel(reference)).loss(policy)  # type: ignore[arg-type]
    losses, rewards, chosen_sums = [], [], []
    for row in rows:
        logps, ref_logps = (
            [answer_log_probs(model, each) for each in (row[:2], row[2:])] for model in (policy, reference)
        )
        chosen, rejected = (logps[i].sum() - ref_logps[i].sum().detach() for i in (0, 1))
        if loss_type == "sigmoid":
            losses.append(torch.log1p(torch.exp(-BETA * (chosen - rejected))))
        else:
            margin = chosen / len(logps[0]) - rejected / len(logps[1])
            losses.append((margin - 1 / (2 * BETA)) ** 2)
        rewards.append(torch.stack([BETA * chosen, BETA * rejected]).detach())
        chosen_sums.append(logps[0].sum().detach())
    assert_equal_losses(ours, torch.stack(losses).mean(), policy)
    means = {name: float(each.total / each.weight) for name, each in ours.metrics.items()}
    chosen_rewards, rejected_rewards = torch.stack(rewards).unbind(1)
    assert means["rewards/chosen"] == pytest.approx(float(chosen_rewards.mean()), abs=1e-12)
    assert means["rewards/margins"] == pytest.approx(float((chosen_rewards - rejected_rewards).mean()), abs=1e-12)
    accuracy = float((chosen_rewards > rejected_rewards).double().mean())
    assert means["rewards/accuracies"] == accuracy
    assert 0 < accuracy < 1
    assert means["logps/chosen"] == pytest.approx(float(torch.stack(chosen_sums).mean()), abs=1e-12)


def test_kto(policy: BigramModel, reference: BigramModel) -> None:
    rows: list[Row] = []
    for index, pair in enumerate(random_pairs()):
        rows.append((*(pair[:2] if index % 2 else pair[2:]), torch.tensor([index % 2 or index == 4]).long().numpy()))
    dataset = LabeledDataset(rows, 0, pad_id=0, max_tokens=99, group_size=None, shuffle=False)
    batch = dataset.get_batch(0, len(rows))
    config = KTOConfig(beta=BETA, desirable_weight=1.3, undesirable_weight=0.6)
    log_ratios, mismatched = [], []
    for index, row in enumerate(rows):
        other = rows[index - 1]  # the first prompt has the answer of the last row
        prompt_length, other_length = (int((each[1] == 0).sum()) for each in (row, other))
        tokens = torch.tensor([*row[0][:prompt_length], *other[0][other_length:]])
        mixed = tokens.numpy(), (torch.arange(len(tokens)) >= prompt_length).long().numpy()
        log_ratios.append(answer_log_probs(policy, row[:2]).sum() - answer_log_probs(reference, row[:2]).sum().detach())
        mismatched.append((answer_log_probs(policy, mixed).sum() - answer_log_probs(reference, mixed).sum()).detach())
    kl = torch.stack(mismatched).mean().clamp(min=0)
    losses = [
        1.3 * (1 - torch.sigmoid(BETA * (ratio - kl))) if row[2][0] else 0.6 * (1 - torch.sigmoid(BETA * (kl - ratio)))
        for ratio, row in zip(log_ratios, rows, strict=True)
    ]
    ours = kto(batch, config, ReferenceModel(reference)).loss(policy)  # type: ignore[arg-type]
    assert_equal_losses(ours, torch.stack(losses).mean(), policy)
    means = {name: float(each.total / each.weight) for name, each in ours.metrics.items()}
    rewards = BETA * torch.stack(log_ratios).detach()
    is_desirable = torch.tensor([bool(row[2][0]) for row in rows])
    assert means["kl"] == pytest.approx(float(kl), abs=1e-12)
    assert means["rewards/rejected"] == pytest.approx(float(rewards[~is_desirable].mean()), abs=1e-12)
    margin = rewards[is_desirable].mean() - rewards[~is_desirable].mean()
    assert means["rewards/margins"] == pytest.approx(float(margin), abs=1e-12)


def test_kl_of_kto_is_not_negative(policy: BigramModel) -> None:
    """A policy that is less likely to produce the mismatched answers than the reference."""
    rows = [(*pair[:2], torch.tensor([1]).numpy()) for pair in random_pairs(2)]
    batch = LabeledDataset(rows, 0, pad_id=0, max_tokens=99, group_size=None, shuffle=False).get_batch(0, 2)
    kls = []
    for seed in range(8):
        ours = kto(batch, KTOConfig(), ReferenceModel(BigramModel(VOCAB, seed))).loss(policy)  # type: ignore[arg-type]
        kls.append(float(ours.metrics["kl"].total))
    assert min(kls) == 0 < max(kls)


def test_orpo(policy: BigramModel) -> None:
    rows = random_pairs()
    batch = PairDataset(rows, 0, pad_id=0).collate(rows)
    ours = orpo(batch, ORPOConfig(beta=BETA)).loss(policy)
    nll, ratios = [], []
    for row in rows:
        tokens = torch.from_numpy(row[0])
        nll.append(F.cross_entropy(policy.table[tokens[:-1]], tokens[1:], reduction="none"))
        chosen, rejected = (answer_log_probs(policy, each).mean() for each in (row[:2], row[2:]))
        odds = [logp - torch.log1p(-torch.exp(logp)) for logp in (chosen, rejected)]
        ratios.append(F.logsigmoid(odds[0] - odds[1]))
    expected = torch.cat(nll).mean() - BETA * torch.stack(ratios).mean()
    assert_equal_losses(ours, expected, policy)
    assert float(ours.metrics["nll_loss"].total / ours.metrics["nll_loss"].weight) == pytest.approx(
        float(torch.cat(nll).detach().mean()), abs=1e-12
    )


def test_odds_are_finite_for_certain_and_for_impossible_answers() -> None:
    chosen = torch.tensor([0.0, -1e-9, -1e-3, -0.5, -20.0, -2000.0], requires_grad=True)
    ratios = log_odds_ratios(chosen, torch.full_like(chosen, -1.0))
    (gradient,) = torch.autograd.grad(ratios.sum(), [chosen])
    assert bool(ratios.isfinite().all())
    assert bool(gradient.isfinite().all())
    assert torch.equal(ratios.sort(descending=True).values, ratios)


@pytest.mark.parametrize("kind", ["dpo", "ipo", "kto", "orpo"])
def test_micro_batches_equal_one_batch(kind: str, policy: BigramModel, reference: BigramModel) -> None:
    """Loss, gradient and metrics of uneven micro-batches, of which each is padded to its own longest row."""

    def objectives(*ranges: tuple[int, int]) -> list[Objective]:
        pairs = random_pairs(5)
        frozen: Any = ReferenceModel(reference)  # type: ignore[arg-type]
        if kind == "kto":
            rows = [(*pair[:2], torch.tensor([i % 2]).numpy()) for i, pair in enumerate(pairs)]
            labeled = LabeledDataset(rows, 0, pad_id=0, max_tokens=99, group_size=5)
            return [kto(labeled.get_batch(low, high - low), KTOConfig(), frozen) for low, high in ranges]
        dataset = PairDataset(pairs, 0, pad_id=0)
        batches = [dataset.get_batch(low, high - low) for low, high in ranges]
        if kind == "orpo":
            return [orpo(batch, ORPOConfig(beta=BETA)) for batch in batches]
        config = DPOConfig(beta=BETA, loss_type="ipo" if kind == "ipo" else "sigmoid")
        return [dpo(batch, config, frozen) for batch in batches]

    def run(*ranges: tuple[int, int]) -> tuple[Tensor, Tensor, dict[str, float]]:
        torch.manual_seed(0)
        micro_batches = objectives(*ranges)
        sums = [each.batch_sums(lambda objective: objective.loss(policy)) for each in micro_batches]  # type: ignore[arg-type]
        totals = {name: torch.stack([each[name].double() for each in sums]).sum() for name in sums[0]}
        losses = [each.with_batch_sums(totals).loss(policy) for each in micro_batches]  # type: ignore[arg-type]
        loss = torch.stack([each.loss for each in losses]).sum() / 5
        metrics = {
            name: float(
                sum(each.metrics[name].total for each in losses) / sum(each.metrics[name].weight for each in losses)
            )
            for name in losses[0].metrics
        }
        return loss.detach(), gradient_of(loss, policy), metrics

    whole, parts = run((0, 5)), run((0, 2), (2, 3), (3, 5))
    torch.testing.assert_close(parts[0], whole[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(parts[1], whole[1], rtol=0, atol=1e-12)
    assert float(whole[1].abs().max()) > 1e-3
    assert parts[2] == pytest.approx(whole[2], abs=1e-12)
