"""Sampler: exact distributions, equal to transformers', independent of row and batch; random numbers; CUDA graphs."""

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
from transformers.generation import logits_process as hf

from cutaway.generate.sampling.logits_processing import apply_logits_processors, inverse_cdf_sample, logits_to_probs
from cutaway.generate.sampling.rng import uniform
from cutaway.generate.sampling.sampler import Sampler, largest_divisor_up_to_sqrt, max_and_argmax
from cutaway.generate.sampling.sampling_params import SamplingParams, completion_seeds
from cutaway.generate.sampling.sampling_state import SamplingFeatures

EOS = (2, 5)


def reference_probs(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output_tokens: Sequence[int]
) -> tuple[np.ndarray, float]:
    """Distribution of one row by sorting in float64, and the smallest distance of a token to a filter threshold."""
    x = logits.double().numpy().copy()
    for token in {*prompt, *output_tokens}:
        x[token] = x[token] * params.repetition_penalty if x[token] < 0 else x[token] / params.repetition_penalty
    for token in set(output_tokens):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(output_tokens).count(token)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    x[list(params.suppress_tokens)] = -np.inf
    if len(output_tokens) < params.min_new_tokens:
        x[[*params.stop_token_ids, *(() if params.ignore_eos else EOS)]] = -np.inf
    if params.temperature == 0:
        return np.eye(len(x))[x.argmax()], np.inf
    x, margin = x / params.temperature, np.inf
    if params.top_k is not None and params.top_k < len(x):
        kth, after = np.sort(x)[::-1][params.top_k - 1 : params.top_k + 1]
        margin = kth - after if np.isfinite(kth) else np.inf
        x[x < kth] = -np.inf
    if params.top_p is not None and params.top_p < 1:
        p, order = softmax(x), np.argsort(-x, kind="stable")
        before = p[order].cumsum() - p[order]
        margin = min(margin, np.abs(before[1:] - params.top_p).min(initial=np.inf))
        x[order[before >= params.top_p]] = -np.inf
    if params.min_p:
        p = softmax(x)
        margin = min(margin, np.abs(p / p.max() - params.min_p).min())
        x[p < params.min_p * p.max()] = -np.inf
    return softmax(x), margin


def softmax(x: np.ndarray) -> np.ndarray:
    weight = np.exp(x - x.max())
    return weight / weight.sum()


def chi_square(samples: np.ndarray, p: np.ndarray) -> float:
    """p-value of the counts under p; rare tokens form one class."""
    counts, expected = np.bincount(samples, minlength=len(p)), len(samples) * p
    assert not counts[p == 0].any()
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 10:  # too few for a class
        counts, expected = counts[:-1], expected[:-1]
    if len(counts) < 2:
        return 1.0
    return chi_square_tail(((counts - expected) ** 2 / expected).sum(), len(counts) - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


CASES: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "low temperature": {"temperature": 0.4},
    "high temperature": {"temperature": 7.0},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-k above vocabulary": {"temperature": 1.0, "top_k": 10_000},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "tiny top-p": {"temperature": 1.0, "top_p": 1e-6},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "all filters": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.7},
    "presence and frequency": {"temperature": 1.0, "presence_penalty": 0.9, "frequency_penalty": 0.4},
    "bias and suppressed tokens": {
        "temperature": 1.0, "logit_bias": {0: 3.0, 9: -2.0, 11: -math.inf}, "suppress_tokens": [1, 3],
    },
    "minimum length": {"temperature": 1.0, "min_new_tokens": 9, "stop_token_ids": [7]},
    "minimum length reached": {"temperature": 1.0, "min_new_tokens": 5, "stop_token_ids": [7]},
    "everything": {
        "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2,
        "presence_penalty": -0.5, "frequency_penalty": 0.3, "logit_bias": {4: 1.0}, "suppress_tokens": [6],
        "min_new_tokens": 7, "stop_token_ids": [8],
    },
}  # fmt: skip
PROMPT, OUTPUT = [0, 4, 4, 10, 12], [4, 9, 13, 9, 1]


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [60, 1500])
def test_sampled_tokens_have_the_exact_distribution(name: str, size: int) -> None:
    params, rows = SamplingParams(**CASES[name]), 4000
    logits = 2.5 * torch.randn(size)
    sampler = Sampler(rows, size)
    for row in range(rows):
        sampler.set_row(row, params, PROMPT, row, eos_token_ids=EOS, output_tokens=OUTPUT)
    features = sampler.features(rows)
    p, _ = reference_probs(logits, params, PROMPT, OUTPUT)
    batch = logits.expand(rows, size)
    torch.testing.assert_close(
        logits_to_probs(batch[:3], sampler.first_rows(3), features).double(),
        torch.from_numpy(p).expand(3, size),
        atol=2e-6,
        rtol=1e-4,
    )
    output = sampler.sample(batch, features)
    assert not output.invalid.any()
    assert chi_square(output.tokens.numpy(), p) > 1e-4


@st.composite
def sampling_params(draw: st.DrawFn, size: int) -> SamplingParams:
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
def test_mixed_batch_has_per_row_distributions(data: st.DataObject) -> None:
    size, rows = data.draw(st.sampled_from([13, 100, 3000])), data.draw(st.integers(1, 5))
    sampler = Sampler(rows + 2, size)
    logits = data.draw(st.sampled_from([0.5, 3.0, 30.0])) * torch.randn(rows, size)
    token = st.lists(st.integers(0, size - 1), max_size=6)
    rows_params = [(data.draw(sampling_params(size)), data.draw(token), data.draw(token)) for _ in range(rows)]
    for row, (params, prompt, output_tokens) in enumerate(rows_params):
        sampler.set_row(row, params, prompt, 3, eos_token_ids=EOS, output_tokens=output_tokens)
    features = sampler.features(rows)
    probs = logits_to_probs(logits, sampler.first_rows(rows), features).double()
    seed, step = sampler.sampling_state.int_params[:rows, 0], sampler.sampling_state.output_len[:rows].clone()
    output = sampler.sample(logits, features)
    for row, (params, prompt, output_tokens) in enumerate(rows_params):
        p, margin = reference_probs(logits[row], params, prompt, output_tokens)
        if margin > 1e-5:
            torch.testing.assert_close(probs[row], torch.from_numpy(p), atol=1e-5, rtol=1e-4)
        assert probs[row, output.tokens[row]] > 0
    sampled = sampler.sampling_state.is_sampled[:rows]
    assert torch.equal(output.tokens[sampled], inverse_cdf_sample(probs, uniform(seed, step))[sampled])
    assert torch.equal(sampler.sampling_state.output_len[:rows], step + 1)
    if features.num_logprobs < 0:
        assert output.logprobs is None
        return
    logprobs = logits.log_softmax(-1)
    torch.testing.assert_close(output.logprobs, logprobs.gather(-1, output.tokens[:, None])[:, 0])
    if features.num_logprobs > 0:
        torch.testing.assert_close(
            output.top_logprobs, logprobs.sort(-1, descending=True).values[:, : features.num_logprobs]
        )
        torch.testing.assert_close(output.top_logprobs, logprobs.gather(-1, output.top_tokens))


@given(data=st.data())
def test_logits_processing_equals_transformers(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([11, 300, 2000]))
    params = dataclasses.replace(
        data.draw(sampling_params(size)),
        presence_penalty=0.0,
        frequency_penalty=0.0,
        temperature=data.draw(st.floats(0.1, 3)),
        ignore_eos=False,
    )
    token = st.lists(st.integers(0, size - 1), min_size=1, max_size=6)
    prompt, output_tokens = data.draw(token), data.draw(token)
    logits = 3 * torch.randn(1, size)
    ids = torch.tensor([prompt + output_tokens])
    chain: list[Any] = [hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    if params.logit_bias:
        bias = [[[token], value] for token, value in params.logit_bias.items()]
        chain.append(hf.SequenceBiasLogitsProcessor(bias))
    if params.suppress_tokens:
        chain.append(hf.SuppressTokensLogitsProcessor(list(params.suppress_tokens)))
    stops = sorted({*params.stop_token_ids, *EOS})
    chain.append(hf.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_new_tokens, stops))
    expected = logits
    for step in chain:
        expected = step(ids, expected)
    sampler = Sampler(1, size)
    sampler.set_row(0, params, prompt, 0, eos_token_ids=EOS, output_tokens=output_tokens)
    rows, features = sampler.first_rows(1), sampler.features(1)
    torch.testing.assert_close(apply_logits_processors(logits, rows, features), expected)

    expected = hf.TemperatureLogitsWarper(params.temperature)(ids, expected)
    if params.top_k is not None:
        expected = hf.TopKLogitsWarper(params.top_k)(ids, expected)
    if params.top_p is not None:
        expected = hf.TopPLogitsWarper(params.top_p)(ids, expected)
    if params.min_p is not None:
        expected = hf.MinPLogitsWarper(params.min_p)(ids, expected)
    _, margin = reference_probs(logits[0], params, prompt, output_tokens)
    if margin > 1e-5:
        torch.testing.assert_close(logits_to_probs(logits, rows, features), expected.softmax(-1), atol=1e-6, rtol=1e-4)


@given(data=st.data())
def test_ties_are_kept_as_in_transformers(data: st.DataObject) -> None:
    """bf16 logits often tie: top-k keeps all ties of the k-th, top-p the fewest; transformers keeps any of them."""
    size = data.draw(st.sampled_from([12, 90, 2000]))
    logits = torch.randint(-data.draw(st.integers(0, 4)), 1, (1, size)).float()
    top_k = data.draw(st.none() | st.integers(1, size))
    top_p = data.draw(st.none() | st.floats(0.05, 0.95))
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    sampler = Sampler(1, size)
    sampler.set_row(0, params, [], 0)
    expected = logits
    if top_k is not None:
        expected = hf.TopKLogitsWarper(top_k)(None, expected)
    p = expected.double().softmax(-1).numpy()[0]
    if top_p is not None:
        mass_before = np.sort(p)[::-1].cumsum() - np.sort(p)[::-1]
        if np.abs(mass_before - top_p).min() < 1e-5:
            return
        expected = hf.TopPLogitsWarper(top_p)(None, expected)
    probs = logits_to_probs(logits, sampler.first_rows(1), sampler.features(1))
    assert torch.equal(logits[probs > 0].sort().values, logits[expected > -math.inf].sort().values)
    for value in logits.unique():  # of ties, those with smaller ids are kept
        kept = (probs > 0)[logits == value]
        assert torch.equal(kept, kept.sort(descending=True).values)


def test_radix_select_equals_top_k_window_exactly() -> None:
    """A row samples the same with a larger window, which another row of the batch may need."""
    size, rows = 5000, 64
    logits = (torch.randn(rows, size) * 4).bfloat16()
    sampler, features = Sampler(rows, size), []
    for row in range(rows):
        sampler.set_row(row, SamplingParams(temperature=1.0, top_k=1 + row, top_p=0.1 + row / 72), [], 0)
    for window in (64, 1024, size):
        features.append(dataclasses.replace(sampler.features(rows), top_k_window=window))
    first, *others = (logits_to_probs(logits, sampler.first_rows(rows), f) for f in features)
    for other in others:
        assert torch.equal(first, other)


def sample_row(sampler: Sampler, row: int, rows: int, logits: Tensor, steps: int = 12) -> list[int]:
    """Tokens of one row, with logits that depend only on the step."""
    features = sampler.features(rows)
    return [int(sampler.sample(logits[step].expand(rows, -1), features).tokens[row]) for step in range(steps)]


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_independent_of_row_and_batch(name: str) -> None:
    params, size = SamplingParams(**CASES[name]), 1500
    logits = 2 * torch.randn(12, size)
    alone = Sampler(1, size)
    alone.set_row(0, params, PROMPT, 77, eos_token_ids=EOS)
    expected = sample_row(alone, 0, 1, logits)
    for rows, row in ((3, 0), (7, 6), (33, 11)):
        sampler = Sampler(rows, size)
        for other, neighbour in zip(range(rows), [*CASES.values()] * 3, strict=False):
            sampler.set_row(other, SamplingParams(**neighbour), [other], other, eos_token_ids=EOS)
        sampler.set_row(row, params, PROMPT, 77, eos_token_ids=EOS)
        assert sample_row(sampler, row, rows, logits) == expected


def test_request_continues_after_interruption_or_move() -> None:
    params, size = SamplingParams(**CASES["everything"]), 200
    logits = 2 * torch.randn(12, size)
    alone = Sampler(1, size)
    alone.set_row(0, params, PROMPT, 77, eos_token_ids=EOS)
    expected = sample_row(alone, 0, 1, logits)

    resumed = Sampler(2, size)
    resumed.set_row(1, params, PROMPT, 77, eos_token_ids=EOS, output_tokens=expected[:5])
    assert sample_row(resumed, 1, 2, logits[5:], 7) == expected[5:]

    moved = Sampler(4, size)
    moved.set_row(0, SamplingParams(**CASES["bias and suppressed tokens"]), [3], 1, eos_token_ids=EOS)
    moved.set_row(3, params, PROMPT, 77, eos_token_ids=EOS)
    tokens = sample_row(moved, 3, 4, logits, 4)
    moved.swap_rows(3, 1)
    tokens += sample_row(moved, 1, 2, logits[4:], 4)
    moved.swap_rows(0, 1)
    tokens += sample_row(moved, 0, 1, logits[8:], 4)
    assert tokens == expected


def test_inactive_rows_keep_their_state() -> None:
    params, size = SamplingParams(**CASES["everything"]), 50
    sampler = Sampler(2, size)
    for row in range(2):
        sampler.set_row(row, params, PROMPT, 5)
    before = [tensor.clone() for tensor in sampler.sampling_state.tensors()]
    sampler.sample(torch.randn(2, size), sampler.features(2), torch.tensor([True, False]))
    for old, new in zip(before, sampler.sampling_state.tensors(), strict=True):
        assert torch.equal(old[1], new[1])
    assert sampler.sampling_state.output_len.tolist() == [1, 0]


def test_copied_state_does_not_change_the_original() -> None:
    """Speculative decoding: draft tokens are appended to the copy only."""
    params, size = SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=1.0), 20
    sampler = Sampler(1, size)
    sampler.set_row(0, params, [3], 0)
    features, logits = sampler.features(1), torch.randn(1, size)
    copied = sampler.first_rows(1).copy()
    copied.append_tokens(torch.tensor([7]), torch.tensor([True]), features)
    p, _ = reference_probs(logits[0], params, [3], [7])
    torch.testing.assert_close(
        logits_to_probs(logits, copied, features)[0].double(), torch.from_numpy(p), atol=1e-6, rtol=1e-4
    )
    p, _ = reference_probs(logits[0], params, [3], [])
    torch.testing.assert_close(
        logits_to_probs(logits, sampler.first_rows(1), features)[0].double(), torch.from_numpy(p), atol=1e-6, rtol=1e-4
    )


def test_only_required_features_are_allocated() -> None:
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
    sampler.set_row(3, SamplingParams(min_new_tokens=3), [1], 0)  # no stop token
    assert sampler.features(4) == sampler.features(2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_invalid_logits_are_flagged(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=5, top_p=0.9, min_p=0.1, suppress_tokens=[0], min_new_tokens=1
    )
    sampler = Sampler(6, 100)
    for row in range(6):
        sampler.set_row(row, params, [1], row, eos_token_ids=[2])
    logits = torch.randn(6, 100)
    logits[0, 50] = math.nan
    logits[1, 0] = math.nan  # suppressed, but still invalid logits
    logits[2, 2] = math.nan
    logits[3] = -math.inf
    logits[4, 7] = math.inf
    output = sampler.sample(logits, sampler.features(6))
    assert output.invalid.tolist() == [True, True, True, True, True, False]
    assert bool(((output.tokens >= 0) & (output.tokens < 100)).all())


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 1e30, 1e300])
def test_extreme_temperatures_sample_valid_tokens(temperature: float) -> None:
    sampler = Sampler(1, 50)
    sampler.set_row(0, SamplingParams(temperature=temperature, top_p=0.9, suppress_tokens=[3]), [], 0)
    logits = torch.arange(50).float()[None]
    p = logits_to_probs(logits, sampler.first_rows(1), sampler.features(1))[0]
    assert p.sum() == pytest.approx(1)
    assert p[3] == 0
    assert (p[-1] == 1) if temperature < 1 else (p.count_nonzero() == 45)
    assert not sampler.sample(logits, sampler.features(1)).invalid


def test_zero_probability_token_is_never_sampled() -> None:
    weight = torch.zeros(6, 9)
    weight[0, 4] = weight[1, 0] = weight[2, 8] = 1
    weight[3, [2, 6]] = 1e-30
    weight[4, [0, 8]] = torch.tensor([1.0, 1e-38])
    weight[5] = 1 / 3
    for u in (0.0, 2.0**-52, 0.5, 1 - 2.0**-52):
        sampled = inverse_cdf_sample(weight, torch.full((6,), u, dtype=torch.float64))
        assert bool((weight.gather(-1, sampled[:, None]) > 0).all())
    assert sampled.tolist() == [4, 0, 8, 6, 0, 8]


def test_random_numbers_are_uniform_and_independent() -> None:
    """Over seeds, steps and streams: each sequence is uniform, and pairs are uniform on the square."""
    n = 40_000
    count, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    big = torch.full_like(count, 2**63 - 1)
    sequences = [uniform(count, zero), uniform(zero, count), uniform(count * 2**40, zero), uniform(big, count)]
    sequences += [uniform(count, zero, 1), uniform(zero + 5, count, 2), uniform(count, count)]
    for sequence in sequences:
        assert sequence.min() >= 0
        assert sequence.max() < 1
        ordered, steps = sequence.sort().values, torch.arange(n, dtype=torch.float64)
        distance = torch.maximum((steps + 1) / n - ordered, ordered - steps / n).max()
        assert distance * math.sqrt(n) < 2.2  # Kolmogorov–Smirnov, p > 1e-4
        assert_uniform((sequence * 1000).long(), 1000)
        assert_uniform((sequence * 2**20 % 1 * 256).long(), 256)  # the lower bits too
        assert_uniform((sequence[:-1] * 30).long() * 30 + (sequence[1:] * 30).long(), 900)
    for first, second in (
        (sequences[0], sequences[1]),
        (sequences[0], sequences[4]),
        (sequences[0], uniform(count + 1, zero)),
        (sequences[1], sequences[6]),
    ):
        assert_uniform((first * 30).long()[1:] * 30 + (second * 30).long()[1:], 900)


def assert_uniform(classes: Tensor, n: int) -> None:
    counts = torch.bincount(classes, minlength=n).double()
    expected = len(classes) / n
    assert chi_square_tail(float(((counts - expected) ** 2 / expected).sum()), n - 1) > 1e-4


def test_random_numbers_are_stable_across_versions() -> None:
    """A seed must give the same tokens in later versions."""
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


def test_completion_seeds_are_distinct() -> None:
    assert completion_seeds(SamplingParams(seed=42)) == [42]
    seeds = {x for seed in range(50) for x in completion_seeds(SamplingParams(seed=seed, n=128))}
    assert len(seeds) == 50 * 128
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("greedy", "inductor", marks=pytest.mark.nightly),
        pytest.param("mixed", "inductor", marks=pytest.mark.nightly),
        ("everything", "aot_eager"),
        pytest.param("top-p", "aot_eager", marks=pytest.mark.nightly),
        pytest.param("everything", "inductor", marks=pytest.mark.nightly),
    ],
)
def test_compiled_equals_eager(name: str, backend: str) -> None:
    torch._dynamo.reset()
    size, rows = 300, 4
    params = {
        "greedy": [{}] * rows,
        "mixed": [{}, CASES["top-p"], CASES["everything"], {"logprobs": 3, "temperature": 1.0}],
    }.get(name, [CASES.get(name, {})] * rows)
    eager, compiled = Sampler(rows, size), Sampler(rows, size)
    for sampler in (eager, compiled):
        for row in range(rows):
            sampler.set_row(row, SamplingParams(**params[row]), PROMPT, row, eos_token_ids=EOS)
    features = eager.features(rows)
    step = torch.compile(compiled.sample, fullgraph=True, backend=backend)
    logits = 3 * torch.randn(8, rows, size)
    logits[5, 1, 3] = math.nan
    active = torch.tensor([True, True, False, True])
    for row_logits in logits:
        actual, expected = step(row_logits, features, active), eager.sample(row_logits, features, active)
        valid = ~expected.invalid
        assert torch.equal(actual.invalid, expected.invalid)
        assert torch.equal(actual.tokens[valid], expected.tokens[valid])
        if features.num_logprobs >= 0:
            torch.testing.assert_close(actual.logprobs[valid], expected.logprobs[valid])
            assert torch.equal(actual.top_tokens[valid], expected.top_tokens[valid])
        if not bool(valid.all()):
            return  # the state of an invalid row is undefined
        for a, b in zip(compiled.sampling_state.tensors(), eager.sampling_state.tensors(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.unchecked
@pytest.mark.parametrize("name", CASES)
def test_cuda_graph_equals_cpu(name: str) -> None:
    size, rows, params = 3000, 5, SamplingParams(**CASES[name])
    cpu, gpu = Sampler(rows, size), Sampler(rows, size, "cuda")
    for sampler in (cpu, gpu):
        for row in range(rows):
            sampler.set_row(row, params, PROMPT, row, eos_token_ids=EOS)
    features, logits_buffer = gpu.features(rows), torch.zeros(rows, size, device="cuda")
    active = torch.ones(rows, dtype=torch.bool, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gpu.sample(logits_buffer, features, active)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = gpu.sample(logits_buffer, features, active)
    for row in range(rows):
        gpu.set_row(row, params, PROMPT, row, eos_token_ids=EOS)
    for logits in 3 * torch.randn(20, rows, size):
        logits_buffer.copy_(logits)
        graph.replay()
        assert output.tokens.tolist() == cpu.sample(logits, features).tokens.tolist()
        assert not output.invalid.any()


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_split_argmax_equals_argmax(parts: int) -> None:
    """Same value and index as a single reduction: the first of ties, and NaN if there is one."""
    x = torch.randint(0, 5, (40, 12), generator=torch.Generator().manual_seed(0)).float()
    x[3, 7] = float("nan")
    x[4] = -math.inf
    maximum, argmax = max_and_argmax(x, parts)
    expected = x.max(-1)
    assert torch.equal(maximum.nan_to_num(9.0), expected.values.nan_to_num(9.0))
    assert torch.equal(argmax, expected.indices)


def test_largest_divisor_up_to_sqrt() -> None:
    assert largest_divisor_up_to_sqrt(128256) == 334
    assert largest_divisor_up_to_sqrt(50257) == 29
    assert largest_divisor_up_to_sqrt(32003) == 1
