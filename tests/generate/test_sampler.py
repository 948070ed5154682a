"""Tokens are drawn with the chances they should have, which are transformers', and the same in any row and batch."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as theirs

from cutaway.generate.sampling.logits_processing import apply_logits_processors, inverse_cdf_sample, logits_to_probs
from cutaway.generate.sampling.rng import completion_seed, uniform
from cutaway.generate.sampling.sampler import Sampler, largest_divisor_up_to_sqrt, max_and_argmax
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.generate.sampling.sampling_state import SamplingFeatures

EOS = (2, 5)


def exact(
    logits: Tensor, settings: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[np.ndarray, float]:
    """One row's distribution by sorting in double precision, and how near a filter's edge a token came."""
    x = logits.double().numpy().copy()
    for token in {*prompt, *answer}:
        x[token] = x[token] * settings.repetition_penalty if x[token] < 0 else x[token] / settings.repetition_penalty
    for token in set(answer):
        x[token] -= settings.presence_penalty + settings.frequency_penalty * list(answer).count(token)
    for token, bias in settings.logit_bias.items():
        x[token] += bias
    x[list(settings.suppress_tokens)] = -np.inf
    if len(answer) < settings.min_new_tokens:
        x[[*settings.stop_token_ids, *(() if settings.ignore_eos else EOS)]] = -np.inf
    if settings.temperature == 0:
        return np.eye(len(x))[x.argmax()], np.inf
    x, near = x / settings.temperature, np.inf
    if settings.top_k is not None and settings.top_k < len(x):
        kth, after = np.sort(x)[::-1][settings.top_k - 1 : settings.top_k + 1]
        near = kth - after if np.isfinite(kth) else np.inf
        x[x < kth] = -np.inf
    if settings.top_p is not None and settings.top_p < 1:
        p, order = softmax(x), np.argsort(-x, kind="stable")
        before = p[order].cumsum() - p[order]
        near = min(near, np.abs(before[1:] - settings.top_p).min(initial=np.inf))
        x[order[before >= settings.top_p]] = -np.inf
    if settings.min_p:
        p = softmax(x)
        near = min(near, np.abs(p / p.max() - settings.min_p).min())
        x[p < settings.min_p * p.max()] = -np.inf
    return softmax(x), near


def softmax(x: np.ndarray) -> np.ndarray:
    weight = np.exp(x - x.max())
    return weight / weight.sum()


def chi_square(drawn: np.ndarray, p: np.ndarray) -> float:
    """How likely counts at least this far from p are; rare tokens are counted together."""
    counts, expected = np.bincount(drawn, minlength=len(p)), len(drawn) * p
    assert not counts[p == 0].any()
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 10:  # too few to be a class of their own
        counts, expected = counts[:-1], expected[:-1]
    if len(counts) < 2:
        return 1.0
    return tail(((counts - expected) ** 2 / expected).sum(), len(counts) - 1)


def tail(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


CASES: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "cool": {"temperature": 0.4},
    "hot": {"temperature": 7.0},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-k of all": {"temperature": 1.0, "top_k": 10_000},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-p of almost nothing": {"temperature": 1.0, "top_p": 1e-6},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "all filters": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.7},
    "presence and frequency": {"temperature": 1.0, "presence_penalty": 0.9, "frequency_penalty": 0.4},
    "bias and bans": {"temperature": 1.0, "logit_bias": {0: 3.0, 9: -2.0, 11: -math.inf}, "suppress_tokens": [1, 3]},
    "least length": {"temperature": 1.0, "min_new_tokens": 9, "stop_token_ids": [7]},
    "least length reached": {"temperature": 1.0, "min_new_tokens": 5, "stop_token_ids": [7]},
    "everything": {
        "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2,
        "presence_penalty": -0.5, "frequency_penalty": 0.3, "logit_bias": {4: 1.0}, "suppress_tokens": [6],
        "min_new_tokens": 7, "stop_token_ids": [8],
    },
}  # fmt: skip
PROMPT, ANSWER = [0, 4, 4, 10, 12], [4, 9, 13, 9, 1]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [60, 1500])
def test_tokens_are_drawn_with_their_chances(name: str, size: int) -> None:
    settings, rows = SamplingParams(**CASES[name]), 4000
    logits = 2.5 * torch.randn(size)
    sampler = Sampler(rows, size)
    for row in range(rows):
        sampler.set_row(row, settings, PROMPT, row, eos_token_ids=EOS, output_tokens=ANSWER)
    needs = sampler.features(rows)
    p, _ = exact(logits, settings, PROMPT, ANSWER)
    batch = logits.expand(rows, size)
    torch.testing.assert_close(
        logits_to_probs(batch[:3], sampler.first_rows(3), needs).double(),
        torch.from_numpy(p).expand(3, size),
        atol=2e-6,
        rtol=1e-4,
    )
    drawn = sampler.sample(batch, needs)
    assert not drawn.invalid.any()
    assert chi_square(drawn.tokens.numpy(), p) > 1e-4


@st.composite
def requests(draw: st.DrawFn, size: int) -> SamplingParams:
    token = st.integers(0, size - 1)
    number = st.floats(-2, 2, width=32)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.9])),
        top_k=draw(st.none() | st.integers(1, size + 5)),
        top_p=draw(st.none() | st.floats(0.01, 1)),
        min_p=draw(st.none() | st.floats(0, 1)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8, 3.0])),
        presence_penalty=draw(st.just(0.0) | number),
        frequency_penalty=draw(st.just(0.0) | number),
        logit_bias=draw(st.dictionaries(token, number | st.just(-math.inf), max_size=3)),
        suppress_tokens=draw(st.lists(token, max_size=3)),
        stop_token_ids=draw(st.lists(token, max_size=2)),
        min_new_tokens=draw(st.integers(0, 4)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, 6)),
    )


@given(data=st.data())
def test_a_mixed_batch_has_each_rows_own_distribution(data: st.DataObject) -> None:
    size, rows = data.draw(st.sampled_from([13, 100, 3000])), data.draw(st.integers(1, 5))
    sampler = Sampler(rows + 2, size)
    logits = data.draw(st.sampled_from([0.5, 3.0, 30.0])) * torch.randn(rows, size)
    token = st.lists(st.integers(0, size - 1), max_size=6)
    asked = [(data.draw(requests(size)), data.draw(token), data.draw(token)) for _ in range(rows)]
    for row, (settings, prompt, answer) in enumerate(asked):
        sampler.set_row(row, settings, prompt, 3, eos_token_ids=EOS, output_tokens=answer)
    needs = sampler.features(rows)
    ours = logits_to_probs(logits, sampler.first_rows(rows), needs).double()
    seed, step = sampler.sampling_state.int_params[:rows, 0], sampler.sampling_state.output_len[:rows].clone()
    drawn = sampler.sample(logits, needs)
    for row, (settings, prompt, answer) in enumerate(asked):
        p, near = exact(logits[row], settings, prompt, answer)
        if near > 1e-5:
            torch.testing.assert_close(ours[row], torch.from_numpy(p), atol=1e-5, rtol=1e-4)
        assert ours[row, drawn.tokens[row]] > 0
    sampled = sampler.sampling_state.is_sampled[:rows]
    assert torch.equal(drawn.tokens[sampled], inverse_cdf_sample(ours, uniform(seed, step))[sampled])
    assert torch.equal(sampler.sampling_state.output_len[:rows], step + 1)
    if needs.num_logprobs is None:
        assert drawn.logprobs is None
        return
    logprobs = logits.log_softmax(-1)
    torch.testing.assert_close(drawn.logprobs, logprobs.gather(-1, drawn.tokens[:, None])[:, 0])
    if needs.num_logprobs:
        torch.testing.assert_close(
            drawn.top_logprobs, logprobs.sort(-1, descending=True).values[:, : needs.num_logprobs]
        )
        torch.testing.assert_close(drawn.top_logprobs, logprobs.gather(-1, drawn.top_tokens))


@given(data=st.data())
def test_logits_are_processed_as_by_transformers(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([11, 300, 2000]))
    settings = dataclasses.replace(
        data.draw(requests(size)),
        presence_penalty=0.0,
        frequency_penalty=0.0,
        temperature=data.draw(st.floats(0.1, 3)),
        ignore_eos=False,
    )
    token = st.lists(st.integers(0, size - 1), min_size=1, max_size=6)
    prompt, answer = data.draw(token), data.draw(token)
    logits = 3 * torch.randn(1, size)
    ids = torch.tensor([prompt + answer])
    chain: list[Any] = [theirs.RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)]
    if settings.logit_bias:
        bias = [[[token], value] for token, value in settings.logit_bias.items()]
        chain.append(theirs.SequenceBiasLogitsProcessor(bias))
    if settings.suppress_tokens:
        chain.append(theirs.SuppressTokensLogitsProcessor(list(settings.suppress_tokens)))
    stops = sorted({*settings.stop_token_ids, *EOS})
    chain.append(theirs.MinNewTokensLengthLogitsProcessor(len(prompt), settings.min_new_tokens, stops))
    expected = logits
    for step in chain:
        expected = step(ids, expected)
    sampler = Sampler(1, size)
    sampler.set_row(0, settings, prompt, 0, eos_token_ids=EOS, output_tokens=answer)
    rows, needs = sampler.first_rows(1), sampler.features(1)
    torch.testing.assert_close(apply_logits_processors(logits, rows, needs), expected)

    expected = theirs.TemperatureLogitsWarper(settings.temperature)(ids, expected)
    if settings.top_k is not None:
        expected = theirs.TopKLogitsWarper(settings.top_k)(ids, expected)
    if settings.top_p is not None:
        expected = theirs.TopPLogitsWarper(settings.top_p)(ids, expected)
    if settings.min_p is not None:
        expected = theirs.MinPLogitsWarper(settings.min_p)(ids, expected)
    _, near = exact(logits[0], settings, prompt, answer)
    if near > 1e-5:
        torch.testing.assert_close(logits_to_probs(logits, rows, needs), expected.softmax(-1), atol=1e-6, rtol=1e-4)


@given(data=st.data())
def test_equal_logits_are_kept_as_by_transformers(data: st.DataObject) -> None:
    """bf16 logits are often equal: top-k keeps all that equal its last, top-p the fewest, in theirs any of them."""
    size = data.draw(st.sampled_from([12, 90, 2000]))
    logits = torch.randint(-data.draw(st.integers(0, 4)), 1, (1, size)).float()
    top_k = data.draw(st.none() | st.integers(1, size))
    top_p = data.draw(st.none() | st.floats(0.05, 0.95))
    settings = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    sampler = Sampler(1, size)
    sampler.set_row(0, settings, [], 0)
    expected = logits
    if top_k is not None:
        expected = theirs.TopKLogitsWarper(top_k)(None, expected)
    p = expected.double().softmax(-1).numpy()[0]
    if top_p is not None:
        before = np.sort(p)[::-1].cumsum() - np.sort(p)[::-1]
        if np.abs(before - top_p).min() < 1e-5:
            return
        expected = theirs.TopPLogitsWarper(top_p)(None, expected)
    ours = logits_to_probs(logits, sampler.first_rows(1), sampler.features(1))
    assert torch.equal(logits[ours > 0].sort().values, logits[expected > -math.inf].sort().values)
    for value in logits.unique():  # ours are the first of the equals, as the most likely token is
        kept = (ours > 0)[logits == value]
        assert torch.equal(kept, kept.sort(descending=True).values)


def test_the_search_and_the_window_agree_to_the_last_bit() -> None:
    """A batch that must search all logits draws for its neighbours what a batch that looks at a few would draw."""
    size, rows = 5000, 64
    logits = (torch.randn(rows, size) * 4).bfloat16()
    sampler, needs = Sampler(rows, size), []
    for row in range(rows):
        sampler.set_row(row, SamplingParams(temperature=1.0, top_k=1 + row, top_p=0.1 + row / 72), [], 0)
    for window in (64, 1024, size):
        needs.append(dataclasses.replace(sampler.features(rows), top_k_window=window))
    first, *others = (logits_to_probs(logits, sampler.first_rows(rows), each) for each in needs)
    for other in others:
        assert torch.equal(first, other)


def answers(sampler: Sampler, row: int, rows: int, logits: Tensor, steps: int = 12) -> list[int]:
    """What one row says, while all rows see logits that depend on the step only."""
    needs = sampler.features(rows)
    return [int(sampler.sample(logits[step].expand(rows, -1), needs).tokens[row]) for step in range(steps)]


@pytest.mark.parametrize("name", CASES)
def test_a_request_says_the_same_in_any_row_and_batch(name: str) -> None:
    settings, size = SamplingParams(**CASES[name]), 1500
    logits = 2 * torch.randn(12, size)
    alone = Sampler(1, size)
    alone.set_row(0, settings, PROMPT, 77, eos_token_ids=EOS)
    expected = answers(alone, 0, 1, logits)
    for rows, row in ((3, 0), (7, 6), (33, 11)):
        sampler = Sampler(rows, size)
        for other, neighbour in zip(range(rows), [*CASES.values()] * 3, strict=False):
            sampler.set_row(other, SamplingParams(**neighbour), [other], other, eos_token_ids=EOS)
        sampler.set_row(row, settings, PROMPT, 77, eos_token_ids=EOS)
        assert answers(sampler, row, rows, logits) == expected


def test_a_request_goes_on_where_it_was_interrupted_or_moved() -> None:
    settings, size = SamplingParams(**CASES["everything"]), 200
    logits = 2 * torch.randn(12, size)
    alone = Sampler(1, size)
    alone.set_row(0, settings, PROMPT, 77, eos_token_ids=EOS)
    expected = answers(alone, 0, 1, logits)

    again = Sampler(2, size)
    again.set_row(1, settings, PROMPT, 77, eos_token_ids=EOS, output_tokens=expected[:5])
    assert answers(again, 1, 2, logits[5:], 7) == expected[5:]

    moved = Sampler(4, size)
    moved.set_row(0, SamplingParams(**CASES["bias and bans"]), [3], 1, eos_token_ids=EOS)
    moved.set_row(3, settings, PROMPT, 77, eos_token_ids=EOS)
    said = answers(moved, 3, 4, logits, 4)
    moved.move_row(3, 1)
    said += answers(moved, 1, 2, logits[4:], 4)
    moved.swap_rows(0, 1)
    said += answers(moved, 0, 1, logits[8:], 4)
    assert said == expected


def test_rows_that_rest_remember_nothing_new() -> None:
    settings, size = SamplingParams(**CASES["everything"]), 50
    sampler = Sampler(2, size)
    for row in range(2):
        sampler.set_row(row, settings, PROMPT, 5)
    before = [tensor.clone() for tensor in sampler.sampling_state.tensors()]
    sampler.sample(torch.randn(2, size), sampler.features(2), torch.tensor([True, False]))
    for old, new in zip(before, sampler.sampling_state.tensors(), strict=True):
        assert torch.equal(old[1], new[1])
    assert sampler.sampling_state.output_len.tolist() == [1, 0]


def test_rows_led_ahead_leave_the_real_ones_alone() -> None:
    """Speculation: the copy knows the drafted tokens, the sampler does not."""
    settings, size = SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=1.0), 20
    sampler = Sampler(1, size)
    sampler.set_row(0, settings, [3], 0)
    needs, logits = sampler.features(1), torch.randn(1, size)
    ahead = sampler.first_rows(1).copy()
    ahead.append_tokens(torch.tensor([7]), torch.tensor([True]), needs)
    p, _ = exact(logits[0], settings, [3], [7])
    torch.testing.assert_close(
        logits_to_probs(logits, ahead, needs)[0].double(), torch.from_numpy(p), atol=1e-6, rtol=1e-4
    )
    p, _ = exact(logits[0], settings, [3], [])
    torch.testing.assert_close(
        logits_to_probs(logits, sampler.first_rows(1), needs)[0].double(), torch.from_numpy(p), atol=1e-6, rtol=1e-4
    )


def test_only_what_is_needed_is_there() -> None:
    sampler = Sampler(4, 30)
    assert sampler.features(4) == SamplingFeatures()
    assert len(sampler.sampling_state.tensors()) == 3
    sampler.set_row(0, SamplingParams(), [1], 0)
    sampler.set_row(1, SamplingParams(temperature=1.0, top_k=5, logprobs=2), [1], 0)
    sampler.set_row(2, SamplingParams(presence_penalty=1.0, top_p=0.5, logprobs=0), [1], 0)  # greedy: no filter
    assert sampler.features(1) == SamplingFeatures()
    assert sampler.features(2) == SamplingFeatures(sampled=True, top_k=True, top_k_window=30, num_logprobs=2)
    assert sampler.features(3) == dataclasses.replace(sampler.features(2), count_penalties=True)
    assert sampler.sampling_state.output_counts is not None
    assert sampler.sampling_state.seen_mask is None
    assert sampler.sampling_state.logit_bias is None
    sampler.clear_row(2)
    assert sampler.features(3) == sampler.features(2)
    assert {sampler.features(2): 1}[sampler.features(3)] == 1
    sampler.set_row(3, SamplingParams(min_new_tokens=3), [1], 0)  # nothing would stop it
    assert sampler.features(4) == sampler.features(2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_are_noticed(temperature: float) -> None:
    settings = SamplingParams(
        temperature=temperature, top_k=5, top_p=0.9, min_p=0.1, suppress_tokens=[0], min_new_tokens=1
    )
    sampler = Sampler(6, 100)
    for row in range(6):
        sampler.set_row(row, settings, [1], row, eos_token_ids=[2])
    logits = torch.randn(6, 100)
    logits[0, 50] = math.nan
    logits[1, 0] = math.nan  # banned, and yet a sign that the model is broken
    logits[2, 2] = math.nan
    logits[3] = -math.inf
    logits[4, 7] = math.inf
    drawn = sampler.sample(logits, sampler.features(6))
    assert drawn.invalid.tolist() == [True, True, True, True, True, False]
    assert bool(((drawn.tokens >= 0) & (drawn.tokens < 100)).all())


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 1e30, 1e300])
def test_any_temperature_gives_a_token_of_the_vocabulary(temperature: float) -> None:
    sampler = Sampler(1, 50)
    sampler.set_row(0, SamplingParams(temperature=temperature, top_p=0.9, suppress_tokens=[3]), [], 0)
    logits = torch.arange(50).float()[None]
    p = logits_to_probs(logits, sampler.first_rows(1), sampler.features(1))[0]
    assert p.sum() == pytest.approx(1)
    assert p[3] == 0
    assert (p[-1] == 1) if temperature < 1 else (p.count_nonzero() == 45)
    assert not sampler.sample(logits, sampler.features(1)).invalid


def test_a_token_without_a_chance_is_never_drawn() -> None:
    weight = torch.zeros(6, 9)
    weight[0, 4] = weight[1, 0] = weight[2, 8] = 1
    weight[3, [2, 6]] = 1e-30
    weight[4, [0, 8]] = torch.tensor([1.0, 1e-38])
    weight[5] = 1 / 3
    for number in (0.0, 2.0**-52, 0.5, 1 - 2.0**-52):
        drawn = inverse_cdf_sample(weight, torch.full((6,), number, dtype=torch.float64))
        assert bool((weight.gather(-1, drawn[:, None]) > 0).all())
    assert drawn.tolist() == [4, 0, 8, 6, 0, 8]


def test_numbers_are_uniform_and_independent() -> None:
    """By seed, by step, by stream and by neighbours: each is flat, and pairs fill the square."""
    n = 40_000
    count, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    big = torch.full_like(count, 2**63 - 1)
    walks = [uniform(count, zero), uniform(zero, count), uniform(count * 2**40, zero), uniform(big, count)]
    walks += [uniform(count, zero, 1), uniform(zero + 5, count, 2), uniform(count, count)]
    for walk in walks:
        assert walk.min() >= 0
        assert walk.max() < 1
        ordered, steps = walk.sort().values, torch.arange(n, dtype=torch.float64)
        distance = torch.maximum((steps + 1) / n - ordered, ordered - steps / n).max()
        assert distance * math.sqrt(n) < 2.2  # Kolmogorov–Smirnov, p > 1e-4
        flat((walk * 1000).long(), 1000)
        flat((walk * 2**20 % 1 * 256).long(), 256)  # the lower bits too
        flat((walk[:-1] * 30).long() * 30 + (walk[1:] * 30).long(), 900)
    for one, other in (
        (walks[0], walks[1]),
        (walks[0], walks[4]),
        (walks[0], uniform(count + 1, zero)),
        (walks[1], walks[6]),
    ):
        flat((one * 30).long()[1:] * 30 + (other * 30).long()[1:], 900)


def flat(classes: Tensor, n: int) -> None:
    counts = torch.bincount(classes, minlength=n).double()
    expected = len(classes) / n
    assert tail(float(((counts - expected) ** 2 / expected).sum()), n - 1) > 1e-4


def test_the_numbers_stay_what_they_are() -> None:
    """A seed in somebody's notes must draw the same next year."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    for seed, step, stream in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**63 - 1, 10**6, 3)):
        x = mix((seed + 0x9E3779B97F4A7C15) & mask)
        x = mix((x + step * 0x9E3779B97F4A7C15) & mask)
        expected = (mix(x ^ (stream + 1)) >> 12) / 2**52
        assert float(uniform(torch.tensor(seed), torch.tensor(step), stream)) == expected


def test_answers_to_one_prompt_have_seeds_of_their_own() -> None:
    assert completion_seed(42, 0) == 42
    seeds = {completion_seed(seed, answer) for seed in range(50) for answer in range(128)}
    assert len(seeds) == 50 * 128
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("greedy", "inductor", marks=pytest.mark.nightly),
        ("mixed", "inductor"),
        ("everything", "aot_eager"),
        pytest.param("top-p", "aot_eager", marks=pytest.mark.nightly),
        pytest.param("everything", "inductor", marks=pytest.mark.nightly),
    ],
)
def test_compiled_equals_eager(name: str, backend: str) -> None:
    torch._dynamo.reset()
    size, rows = 300, 4
    settings = {
        "greedy": [{}] * rows,
        "mixed": [{}, CASES["top-p"], CASES["everything"], {"logprobs": 3, "temperature": 1.0}],
    }.get(name, [CASES.get(name, {})] * rows)
    eager, compiled = Sampler(rows, size), Sampler(rows, size)
    for sampler in (eager, compiled):
        for row in range(rows):
            sampler.set_row(row, SamplingParams(**settings[row]), PROMPT, row, eos_token_ids=EOS)
    needs = eager.features(rows)
    step = torch.compile(compiled.sample, fullgraph=True, backend=backend)
    logits = 3 * torch.randn(8, rows, size)
    logits[5, 1, 3] = math.nan
    active = torch.tensor([True, True, False, True])
    for each in logits:
        ours, other = step(each, needs, active), eager.sample(each, needs, active)
        fine = ~other.invalid
        assert torch.equal(ours.invalid, other.invalid)
        assert torch.equal(ours.tokens[fine], other.tokens[fine])
        if needs.num_logprobs is not None:
            torch.testing.assert_close(ours.logprobs[fine], other.logprobs[fine])
            assert torch.equal(ours.top_tokens[fine], other.top_tokens[fine])
        if not bool(fine.all()):
            return  # what a broken row remembers is nobody's business
        for a, b in zip(compiled.sampling_state.tensors(), eager.sampling_state.tensors(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.unchecked
@pytest.mark.parametrize("name", CASES)
def test_captured_on_a_gpu_equals_the_cpu(name: str) -> None:
    size, rows, settings = 3000, 5, SamplingParams(**CASES[name])
    cpu, gpu = Sampler(rows, size), Sampler(rows, size, "cuda")
    for sampler in (cpu, gpu):
        for row in range(rows):
            sampler.set_row(row, settings, PROMPT, row, eos_token_ids=EOS)
    needs, place = gpu.features(rows), torch.zeros(rows, size, device="cuda")
    active = torch.ones(rows, dtype=torch.bool, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gpu.sample(place, needs, active)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = gpu.sample(place, needs, active)
    for row in range(rows):
        gpu.set_row(row, settings, PROMPT, row, eos_token_ids=EOS)
    for logits in 3 * torch.randn(20, rows, size):
        place.copy_(logits)
        graph.replay()
        assert drawn.tokens.tolist() == cpu.sample(logits, needs).tokens.tolist()
        assert not drawn.invalid.any()


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_the_highest_by_parts(parts: int) -> None:
    """The same number and place as in one go, the first of several, and NaN where there is one."""
    x = torch.randint(0, 5, (40, 12), generator=torch.Generator().manual_seed(0)).float()
    x[3, 7] = float("nan")
    x[4] = -math.inf
    best, place = max_and_argmax(x, parts)
    whole = x.max(-1)
    assert torch.equal(best.nan_to_num(9.0), whole.values.nan_to_num(9.0))
    assert torch.equal(place, whole.indices)


def test_a_vocabulary_is_cut_near_its_root() -> None:
    assert largest_divisor_up_to_sqrt(128256) == 334
    assert largest_divisor_up_to_sqrt(50257) == 29
    assert largest_divisor_up_to_sqrt(32003) == 1
