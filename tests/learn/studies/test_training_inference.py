"""Study of training and inference: sources with known probabilities, exposure, KL penalty, decoding."""

import pytest
import torch
from torch import Tensor, nn

from cutaway.check import get_checks
from cutaway.learn.studies.training_inference import bug_checks, decoding, exposure, preferences
from cutaway.learn.studies.training_inference.sources import FiniteText, PairChain, Source, TopicChain
from cutaway.model import build

pytestmark = pytest.mark.unchecked
SOURCES = [PairChain(), TopicChain()]


class SourceModel(nn.Module):
    """A perfect model: its probabilities are those of the source."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def forward(self, tokens: Tensor) -> Tensor:
        return self.source.next_probs(tokens).log()


@pytest.mark.parametrize("source", SOURCES, ids=["pair", "topic"])
def test_probabilities_are_those_of_the_samples(source: Source) -> None:
    """The frequency of the most likely symbol is its probability."""
    tokens = source.sample(2000, 12, torch.Generator().manual_seed(0))
    probs = source.next_probs(tokens)[:, 1:-1]
    assert torch.allclose(probs.sum(-1), torch.ones(2000, 10))
    largest = probs.max(-1)
    frequency = (largest.indices == tokens[:, 2:]).double().mean()
    assert float(frequency) == pytest.approx(float(largest.values.mean()), abs=0.01)


def test_entropy_rate_is_the_loss_of_the_true_probabilities() -> None:
    source = PairChain()
    tokens = source.sample(4000, 12, torch.Generator().manual_seed(0))
    probs = source.next_probs(tokens)[:, 1:-1].gather(2, tokens[:, 2:, None])
    assert float(-probs.log().mean()) == pytest.approx(source.entropy_rate, rel=0.01)


def test_topic_probabilities_follow_from_bayes_rule() -> None:
    source, tokens = TopicChain(), torch.tensor([[3, 1, 4, 1, 5]])
    weights = torch.ones(source.num_topics, dtype=torch.float64)
    for before, after in zip(tokens[0, :-1], tokens[0, 1:], strict=True):
        weights *= source.transitions.double()[:, before, after]
    expected = (weights / weights.sum()) @ source.transitions.double()[:, tokens[0, -1]]
    torch.testing.assert_close(source.next_probs(tokens)[0, -1].double(), expected, atol=1e-6, rtol=1e-4)


def test_finite_text_has_few_sequences() -> None:
    tokens = FiniteText(PairChain(), 3).sample(50, 10, torch.Generator().manual_seed(0))
    assert len(tokens.unique(dim=0)) == 3


@pytest.mark.parametrize("source", SOURCES, ids=["pair", "topic"])
def test_perfect_model_has_no_exposure_bias(source: Source) -> None:
    model = SourceModel(source)
    gold = source.sample(200, exposure.PROMPT_LEN + exposure.NUM_STEPS, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    own = exposure.continue_text(model, gold[:, : exposure.PROMPT_LEN], exposure.NUM_STEPS, generator)
    stats = [exposure.measure_continuation(model, source, tokens) for tokens in (gold, own)]
    assert all(float(each.kl.abs().max()) < 1e-5 for each in stats)
    gold_loss, own_loss = (float(each.source_loss.mean()) for each in stats)
    assert own_loss == pytest.approx(gold_loss, abs=0.05)


def test_contexts_are_equal_at_the_first_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "NUM_CONTINUATIONS", 64)
    trained = exposure.train("topic", 12, "cpu", num_seeds=2)
    results = exposure.compare_contexts("topic", trained, "cpu")
    assert results["exposure/topic/12/own-to-gold-kl/1"].mean == 1
    assert results["exposure/topic/12/own-to-gold-kl/17-32"].mean != 1
    assert results["exposure/topic/12/gold-kl"].mean > 0.5


def test_update_ratio_of_a_sublayer_without_output_is_0() -> None:
    model = build(exposure.decoder_config(16), seed=0)
    nn.init.zeros_(model.decoder.blocks[1].attn.f.o.weight)
    ratios = exposure.update_ratios(model, torch.arange(8)[None])
    assert ratios.keys() == {"attn/0", "ffn/0", "attn/1", "ffn/1"}
    assert ratios["attn/1"] == 0
    assert all(ratio > 0 for name, ratio in ratios.items() if name != "attn/1")


def test_true_reward_counts_different_good_symbols() -> None:
    texts = torch.tensor([[0, 0, 0, 0, 9], [0, 1, 2, 3, 3], [9, 9, 9, 9, 9]])
    assert preferences.true_reward(texts).tolist() == [1, 4, 0]


def test_reward_model_recovers_the_sign_of_each_weight() -> None:
    weights = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    first, second = torch.randn(2, 1, 500, 4, generator=torch.Generator().manual_seed(0))
    prefers_first = (torch.einsum("mns,ms->mn", first - second, weights) > 0).float()
    assert torch.equal(preferences.fit_reward_model(first, second, prefers_first).sign(), weights.sign())


@pytest.mark.nightly
def test_kl_penalty_keeps_the_policy_near_the_base_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_PREFERENCES": 100, "NUM_TOKENS": 6, "BETAS": (0.0, 1.0), "LR": 5e-3}.items():
        monkeypatch.setattr(preferences, name, value)
    model = build(exposure.decoder_config(16), seed=0).use_kernel("explicit")
    base = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    results = preferences.tune_policies(model, base.expand(2, -1), "cpu", num_updates=20)
    assert results["preference/kl/0/0"].mean == results["preference/kl/1/0"].mean == 0
    assert results["preference/kl/0/20"].mean > 2 * results["preference/kl/1/20"].mean > 0
    assert results["preference/proxy-reward/0/20"].mean > results["preference/proxy-reward/0/0"].mean


def test_generation_without_a_cache_is_the_same() -> None:
    model, prompt = decoding.build_decoder(128, 2, "cpu", torch.float32), torch.tensor([[1, 2], [3, 4]])
    cached, recomputed = (decoding.generate(model, prompt, 6, use_cache=use) for use in (True, False))
    assert torch.equal(cached, recomputed)
    assert cached.shape == (2, 8)


def test_a_token_takes_two_flops_per_weight() -> None:
    model = decoding.build_decoder(256, 2, "cpu", torch.float32)
    num_weights = sum(parameter.numel() for parameter in model.decoder.blocks.parameters() if parameter.ndim == 2)
    assert decoding.count_decode_flops(model, "cpu") == pytest.approx(2 * num_weights, rel=0.01)


def test_classes_of_checks_are_disjoint_and_exist() -> None:
    names = (*bug_checks.MASK_CHECKS, *bug_checks.AXIS_CHECKS)
    assert len(set(names)) == len(names)
    assert set(names) <= set(get_checks())
    assert bug_checks.failing_checks("future seen", only=["causality", "mask-polarity"]) == {"causality"}
    assert bug_checks.failing_checks("", only=["causality", "mask-polarity"]) == set()
