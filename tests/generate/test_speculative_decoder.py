"""Speculative decoding: same greedy tokens and same sampling distribution as plain decoding, in fewer passes."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import SEEDS, SEQ_LEN, build_randomized_model, configs, random_tokens

from cutaway import config as c
from cutaway.errors import CutawayError, InputError
from cutaway.generate import Completion, Engine, EngineConfig, EngineError, SamplingParams
from cutaway.generate.sampling.logits_processing import logits_to_probs
from cutaway.generate.sampling.sampler import Sampler
from cutaway.generate.speculative.draft_model import Proposal
from cutaway.generate.speculative.ngram_draft import NgramConfig, NgramIndex
from cutaway.generate.speculative.rejection_sampler import expected_tokens, rejection_sample
from cutaway.generate.speculative.speculative_decoder import SpeculativeDecoder, SpeculativeStats
from cutaway.model import Transformer
from cutaway.tokenizer import byte_tokenizer, train_bpe

LENGTHS = (1, 7, 4, 9, 2)


def prompts_for(config: c.Config, seed: int, lengths: Sequence[int] = LENGTHS, *, repeat: bool = False) -> Any:
    """Prompts of different lengths; with `repeat`, of a few repeated tokens."""
    which = "source" if config.form == "encoder-decoder" else "tokens"
    prompts = [random_tokens(config, 1, n, seed + n, which)[0].tolist() for n in lengths]
    return [(prompt[:3] * n)[:n] for prompt, n in zip(prompts, lengths, strict=True)] if repeat else prompts


def engine_config_for(model: Transformer, **options: Any) -> EngineConfig:
    return EngineConfig(
        model, **{"max_model_len": 2 * SEQ_LEN, "decoder_start_token_id": 0, "max_source_len": max(LENGTHS), **options}
    )


def generate_plain(
    engine_config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    tokenizer: Any = None,
) -> list[Completion]:
    engine = Engine(engine_config, tokenizer=tokenizer)
    requests = [engine.submit(prompt, p, seed=0) for prompt, p in zip(prompts, params, strict=True)]
    engine.run()
    return [request.result() for request in requests]


def generate_speculative(
    engine_config: EngineConfig,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    *,
    output_prefix: Sequence[int] = (),
    **options: Any,
) -> tuple[list[Completion], SpeculativeStats]:
    engine = SpeculativeDecoder(engine_config, tokenizer=tokenizer, max_waiting=len(prompts), **options)
    requests = [
        engine.submit(prompt, p, seed=seed, output_prefix=output_prefix)
        for prompt, p, seed in zip(prompts, params, seeds, strict=True)
    ]
    engine.run()
    return [request.result() for request in requests], engine.stats


def decoder(
    seed: int = 0, *, size: int = 5, context: int | None = None, head: c.LMHead | None = None, **stack: Any
) -> Transformer:
    """A small decoder with RoPE."""
    position = c.NoPosition() if context is None else c.LearnedPosition(length=context)
    block = c.Block(attention=c.MultiHead(heads=2, position=c.Rope()), ffn=c.Mlp(hidden=16))
    body = c.Stack(**{"layers": 2, "block": (block,), "embedding": c.Embedding(position=position), **stack})
    return build_randomized_model(
        c.Decoder(vocab_size=size, d_model=8, decoder=body, head=head or c.LMHead()), torch.float64, seed
    )


@given(
    config=configs(("decoder", "encoder-decoder")),
    seed=SEEDS,
    kind=st.sampled_from(["full", "ring", "paged"]),
    chunk=st.integers(1, SEQ_LEN),
    rows=st.integers(1, 5),
    num_draft_tokens=st.integers(1, 6),
    drafts=st.sampled_from(["itself", "another", "ngram"]),
    penalty=st.sampled_from([0.0, 0.0, 1.5]),
)
def test_greedy_completions_equal_plain_decoding(
    config: c.Config, seed: int, kind: str, chunk: int, rows: int, num_draft_tokens: int, drafts: str, penalty: float
) -> None:
    """Different prompt lengths and limits, reused rows, wrapping ring buffers, drafts of any quality."""
    model = build_randomized_model(config, torch.float64, seed)
    draft = {
        "itself": model,
        "another": build_randomized_model(config, torch.float64, seed + 1),
        "ngram": NgramConfig(3, 1),
    }[drafts]
    prompts = prompts_for(config, seed, LENGTHS[:4], repeat=drafts == "ngram")
    params = [
        SamplingParams(
            max_new_tokens=SEQ_LEN - i, stop_token_ids=[i, 5], min_new_tokens=i, frequency_penalty=penalty, logprobs=2
        )
        for i in range(len(prompts))
    ]
    engine_config = engine_config_for(model, max_num_seqs=rows, cache_implementation=kind, prefill_chunk_size=chunk)
    plain = generate_plain(engine_config, prompts, params)
    completions, stats = generate_speculative(
        engine_config, None, prompts, params, [0] * len(prompts), draft_model=draft, num_draft_tokens=num_draft_tokens
    )
    for actual, expected in zip(completions, plain, strict=True):
        assert actual.tokens == expected.tokens
        assert (actual.finish_reason, actual.stop_reason, actual.prompt_tokens) == (
            expected.finish_reason, expected.stop_reason, expected.prompt_tokens,
        )  # fmt: skip
        assert actual.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
        assert actual.top_logprobs is not None
        assert [len(top) for top in actual.top_logprobs] == [2] * len(actual.tokens)
    assert stats.num_output_tokens == sum(len(completion.tokens) for completion in completions)
    assert stats.num_forward_passes <= stats.num_output_tokens
    assert 0 <= stats.num_accepted <= stats.num_drafted
    if drafts == "itself":
        assert stats.num_accepted == stats.num_drafted


@pytest.mark.nightly
@given(
    config=configs(("decoder", "encoder-decoder")),
    seed=SEEDS,
    kind=st.sampled_from(["full", "ring", "paged"]),
    num_draft_tokens=st.integers(1, 6),
    ngram=st.booleans(),
)
def test_completion_is_independent_of_the_batch(
    config: c.Config, seed: int, kind: str, num_draft_tokens: int, ngram: bool
) -> None:
    """With or without other requests, in a reused or a fresh row."""
    model = build_randomized_model(config, torch.float64, seed)
    draft = NgramConfig(3, 1) if ngram else build_randomized_model(config, torch.float64, seed + 1)
    prompts = prompts_for(config, seed, repeat=ngram)
    params = [
        SamplingParams(max_new_tokens=8, temperature=1.0, top_k=4),
        SamplingParams(max_new_tokens=6),
        SamplingParams(max_new_tokens=3, temperature=0.7, top_p=0.9, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=8, temperature=2.0, presence_penalty=0.5, stop_token_ids=[1]),
        SamplingParams(max_new_tokens=7, temperature=1.0, min_p=0.1, logit_bias={2: 1.0}),
    ]
    seeds = [seed + i for i in range(len(prompts))]
    together, _ = generate_speculative(
        engine_config_for(model, max_num_seqs=3, cache_implementation=kind),
        None,
        prompts,
        params,
        seeds,
        draft_model=draft,
        num_draft_tokens=num_draft_tokens,
    )
    for i in (0, 3):
        engine_config = engine_config_for(model, max_num_seqs=1, cache_implementation=kind, prefill_chunk_size=3)
        alone, _ = generate_speculative(
            engine_config,
            None,
            [prompts[i]],
            [params[i]],
            [seeds[i]],
            draft_model=draft,
            num_draft_tokens=num_draft_tokens,
        )
        assert alone[0].tokens == together[i].tokens


@torch.no_grad()
def reference_probs(model: Any, prompt: list[int], params: SamplingParams, depth: int) -> np.ndarray:
    """Probability of every sequence of `depth` tokens, from full forward passes."""
    size = model.config.vocab_size
    probs = np.ones(size**depth)
    sampler = Sampler(1, size)
    for i, sequence in enumerate(itertools.product(range(size), repeat=depth)):
        logits = model(torch.tensor([prompt + list(sequence)]))
        for step in range(depth):
            sampler.set_row(0, params, prompt, 0, output_tokens=sequence[:step])
            p = logits_to_probs(logits[:, len(prompt) - 1 + step], sampler.first_rows(1), sampler.features(1))
            probs[i] *= float(p[0, sequence[step]])
    return probs


def chi_square_tail(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_square(samples: np.ndarray, p: np.ndarray) -> float:
    """p-value of the counts under p; rare sequences form one class."""
    counts, expected = np.bincount(samples, minlength=len(p)), len(samples) * p
    assert not counts[p == 0].any()
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    rare = int(np.searchsorted(expected.cumsum(), 10)) + 1
    rare = max(rare, int((expected < 5).sum()))
    counts = np.append(counts[rare:], counts[:rare].sum())
    expected = np.append(expected[rare:], expected[:rare].sum())
    return chi_square_tail(((counts - expected) ** 2 / expected).sum(), len(counts) - 1) if len(counts) > 1 else 1.0


SAMPLING_CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "filters": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    "penalties": {
        "temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.8,
        "logit_bias": {1: 0.5}, "suppress_tokens": [4], "min_new_tokens": 2, "stop_token_ids": [2],
    },
}  # fmt: skip


@torch.no_grad()
def perturbed_copy(model: Transformer, noise: float = 0.05) -> Transformer:
    """A good draft model: almost the same weights."""
    copied = build_randomized_model(model.config, torch.float64)
    copied.load_state_dict(model.state_dict())
    for weight in copied.parameters():
        weight.add_(noise * torch.randn_like(weight))
    return copied


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SAMPLING_CASES)
@pytest.mark.parametrize("drafts", ["bad", "good", "ngram"])
def test_sampled_tokens_have_the_target_distribution(name: str, drafts: str) -> None:
    """Joint distribution of the first three tokens over many seeds, against the exact probabilities."""
    model = decoder(1)
    draft = {"bad": decoder(2), "good": perturbed_copy(model), "ngram": NgramConfig(2, 1)}[drafts]
    depth, seeds, prompt = 3, 1500, [3, 1, 3] if drafts == "ngram" else [3]
    params = SamplingParams(max_new_tokens=depth + 1, ignore_eos=True, **SAMPLING_CASES[name])
    engine_config = EngineConfig(model, max_num_seqs=seeds, max_model_len=64)
    completions, stats = generate_speculative(
        engine_config, None, [prompt] * seeds, [params] * seeds, range(seeds), draft_model=draft, num_draft_tokens=depth
    )
    p = reference_probs(model, prompt, params, depth)
    # A completion that stopped early counts for all sequences with its prefix.
    codes = [
        tokens + [0] * (depth - len(tokens)) for tokens in (completion.tokens[:depth] for completion in completions)
    ]
    places = np.array([sum(token * 5 ** (depth - 1 - i) for i, token in enumerate(code)) for code in codes])
    table = p.reshape(5, 5, 5)
    if params.stop_token_ids:
        table = merge_stopped(table, params)
    assert table.sum() == pytest.approx(1)
    assert chi_square(places, table.reshape(-1)) > 1e-4
    assert stats.num_accepted > 0
    assert stats.num_accepted < stats.num_drafted
    if drafts == "good":
        assert stats.acceptance_rate > 0.8


def merge_stopped(table: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Add the probabilities of all sequences after a stop token to the entry whose rest is 0."""
    result = table.copy()
    for stop in params.stop_token_ids:
        for first in range(len(table)):
            if first == stop:
                result[first] = 0
                result[first, 0, 0] = table[first].sum()
            else:
                result[first, stop] = 0
                result[first, stop, 0] = table[first, stop].sum()
    return result


def test_rejection_sampling_preserves_the_target_distribution() -> None:
    """Also where q proposes a token with p = 0, and the other way around."""
    torch.manual_seed(3)
    n, size = 200_000, 6
    target, draft = 2 * torch.randn(1, 2, size), 2 * torch.randn(size)
    target[0, 0, 2] = draft[4] = -math.inf
    sampler = Sampler(n, size)
    for row in range(n):
        sampler.row_features[row] = sampler.row_features[0]
    sampler.set_row(0, SamplingParams(temperature=1.0), [0], 0)
    for tensor in sampler.sampling_state.tensors():
        tensor[:] = tensor[0].clone()
    sampler.sampling_state.int_params[:, 0] = torch.arange(n)
    features = sampler.features(1)
    q = draft.softmax(-1).expand(n, size)
    draft_tokens = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(5))
    result = rejection_sample(
        target.expand(n, 2, size), Proposal(draft_tokens, [1] * n, [q]), sampler.first_rows(n), features
    )
    p = target[0].softmax(-1).double().numpy()
    assert chi_square(result.tokens[:, 0].numpy(), p[0]) > 1e-4
    accepted = result.num_accepted == 1
    assert chi_square(result.tokens[accepted, 1].numpy(), p[1]) > 1e-4
    overlap = float(torch.minimum(target[0, 0].softmax(-1), q[0]).sum())
    assert float(accepted.double().mean()) == pytest.approx(overlap, abs=5 * math.sqrt(0.25 / n))
    assert sampler.sampling_state.output_len.equal(1 + result.num_accepted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_draft_tokens", range(1, 7))
def test_target_as_draft_is_always_accepted(num_draft_tokens: int, temperature: float) -> None:
    model = decoder(4, size=30)
    limit = 15
    params = [SamplingParams(max_new_tokens=limit, temperature=temperature, top_p=0.95, repetition_penalty=1.2)] * 3
    engine_config = EngineConfig(model, max_num_seqs=3, max_model_len=32)
    _, stats = generate_speculative(
        engine_config,
        None,
        [[1], [2, 3], [4, 5, 6]],
        params,
        [1, 2, 3],
        draft_model=model,
        num_draft_tokens=num_draft_tokens,
    )
    assert stats.num_accepted == stats.num_drafted > 0
    assert stats.num_forward_passes == 3 * math.ceil(limit / (num_draft_tokens + 1))
    assert stats.acceptance_rate == 1
    assert stats.tokens_per_forward_pass == limit / math.ceil(limit / (num_draft_tokens + 1))


def test_ngram_draft_predicts_repetition() -> None:
    model = decoder(0, size=30)
    engine_config = EngineConfig(model, max_num_seqs=1, max_model_len=100)
    params = [SamplingParams(max_new_tokens=60)]
    completions, stats = generate_speculative(
        engine_config, None, [[3, 4]], params, [0], draft_model=NgramConfig(), num_draft_tokens=4
    )
    assert completions[0].tokens == generate_plain(engine_config, [[3, 4]], params)[0].tokens
    assert stats.num_output_tokens == 60
    assert stats.num_forward_passes < 40


def test_ngram_index_uses_the_longest_suffix() -> None:
    index = NgramIndex(NgramConfig(3, 1), [1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3])
    assert index.propose(3) == [5, 8, 2]  # the most recent of equally long matches
    index.extend([4])
    assert index.propose(2) == [9, 2]
    assert NgramIndex(NgramConfig(3, 1), [7, 7, 1]).propose(3) == []
    assert NgramIndex(NgramConfig(3, 2), [7, 1, 7]).propose(3) == []  # below min_ngram_size
    assert NgramIndex(NgramConfig(3, 2), [5, 1, 2, 1, 2]).propose(5) == [1, 2, 1, 2, 1]


def test_stop_conditions_within_accepted_drafts() -> None:
    """Stop strings, EOS tokens and limits inside a step whose remaining drafts were accepted."""
    tokenizer = byte_tokenizer()
    model = decoder(5, size=tokenizer.vocab_size)
    prompts = [[1, 2, 3], [60, 61], [9]]
    unconstrained = generate_plain(
        EngineConfig(model, max_num_seqs=3, max_model_len=40), prompts, [SamplingParams(max_new_tokens=20)] * 3
    )
    for position in range(0, 8, 2):
        stops = [
            chr(completion.tokens[position]) if completion.tokens[position] < 128 else "none"
            for completion in unconstrained
        ]
        eos = [unconstrained[0].tokens[position]]
        params = [SamplingParams(max_new_tokens=20 - i, stop=stops[i], ignore_eos=i == 1) for i in range(3)]
        engine_config = EngineConfig(model, max_num_seqs=3, max_model_len=40, eos_token_ids=eos)
        plain = generate_plain(engine_config, prompts, params, tokenizer)
        completions, _ = generate_speculative(
            engine_config, tokenizer, prompts, params, [0, 0, 0], draft_model=model, num_draft_tokens=6
        )
        assert completions == plain
        assert completions[0].finish_reason == "stop"


def test_completions_may_fill_the_context() -> None:
    """Up to the last slot; a draft model with fewer positions stops proposing."""
    model, draft = decoder(6, size=12, context=16), decoder(7, size=12, context=10)
    short = decoder(6, size=12, context=10)  # exact drafts up to its context length
    short.load_state_dict(
        {name: weight[: len(short_weight)] for name, short_weight, weight in paired_weights(short, model)}
    )
    prompts = [[1] * 15, [2], [3] * 9, [4] * 12, [5] * 10]
    params = [SamplingParams()] * 5
    for kind in ("full", "paged"):
        engine_config = EngineConfig(model, max_num_seqs=5, cache_implementation=kind)  # type: ignore[arg-type]
        plain = generate_plain(engine_config, prompts, params)
        for proposer in (draft, short, model, NgramConfig(2, 1)):
            for num_draft_tokens in (1, 4):
                completions, _ = generate_speculative(
                    engine_config,
                    None,
                    prompts,
                    params,
                    [0] * 5,
                    draft_model=proposer,
                    num_draft_tokens=num_draft_tokens,
                )
                assert [completion.tokens for completion in completions] == [completion.tokens for completion in plain]


def paired_weights(a: Transformer, b: Transformer) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    return [(name, weight, b.state_dict()[name]) for name, weight in a.state_dict().items()]


def test_paged_cache_with_waiting_requests_and_equal_prefixes() -> None:
    model = decoder(8, size=12)
    prompts = [[1, 2] * 40 + [i] for i in range(6)]
    params = [SamplingParams(max_new_tokens=50 - i) for i in range(6)]
    engine_config = EngineConfig(model, max_num_seqs=4, max_model_len=192, cache_implementation="paged")
    engine_config.kv_cache_memory_bytes = 7 * engine_config.bytes_for_slots(64)
    completions, _ = generate_speculative(
        engine_config, None, prompts, params, [0] * 6, draft_model=perturbed_copy(model), num_draft_tokens=3
    )
    plain = generate_plain(EngineConfig(model, max_num_seqs=1, max_model_len=192), prompts, params)
    assert [completion.tokens for completion in completions] == [completion.tokens for completion in plain]


def test_output_prefix_and_forced_eos() -> None:
    config = c.EncoderDecoder(vocab_size=20, d_model=8, encoder=build_stack(c.Stack, c.Block), decoder=cross_stack())
    model, draft = build_randomized_model(config, torch.float64, 1), build_randomized_model(config, torch.float64, 2)
    engine_config = EngineConfig(
        model, max_num_seqs=2, max_model_len=20, decoder_start_token_id=3, forced_eos_token_id=7, max_source_len=8
    )
    prompts, params = [[1, 2, 3, 4], [5] * 8, [6]], [SamplingParams(max_new_tokens=9)] * 3
    engine = Engine(engine_config)
    requests = [engine.submit(prompt, p, seed=0, output_prefix=[11]) for prompt, p in zip(prompts, params, strict=True)]
    engine.run()
    for proposer in (draft, model, NgramConfig(2, 1)):
        completions, _ = generate_speculative(
            engine_config, None, prompts, params, [0] * 3, draft_model=proposer, output_prefix=[11]
        )
        assert [completion.tokens for completion in completions] == [request.result().tokens for request in requests]
        assert all(completion.tokens[0] == 11 and completion.tokens[-1] == 7 for completion in completions)


def build_stack(stack: Any, block: Any, **extra: Any) -> Any:
    return stack(layers=1, block=(block(attention=c.MultiHead(heads=2), ffn=c.Mlp(hidden=8), **extra),))


def cross_stack() -> c.CrossStack:
    return build_stack(c.CrossStack, c.CrossBlock, cross=c.Cross(heads=2))


def test_vocabularies_with_different_padding() -> None:
    """Same tokens, but the draft's vocab_size is padded more or less than the target's."""
    tokenizer = byte_tokenizer()
    real = tokenizer.vocab_size
    model = decoder(5, size=real + 5)
    prompts, params = [[real + 4, 2, 3], [60]], [SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=12)]
    engine_config = EngineConfig(model, max_num_seqs=2, max_model_len=40)
    plain = generate_plain(engine_config, prompts, params)
    for size in (real, real + 9):
        draft = decoder(6, size=size)
        options: dict[str, Any] = {"draft_model": draft, "draft_tokenizer": byte_tokenizer()}
        completions, _ = generate_speculative(engine_config, tokenizer, prompts, params, [0, 0], **options)
        assert [completion.tokens for completion in completions] == [completion.tokens for completion in plain]


def test_nan_draft_model_does_not_change_the_output() -> None:
    model, draft = decoder(1, size=9), decoder(2, size=9)
    with torch.no_grad():
        next(draft.parameters()).fill_(math.nan)
    params = [SamplingParams(max_new_tokens=10), SamplingParams(max_new_tokens=10, temperature=1.0)]
    engine_config = EngineConfig(model, max_num_seqs=2, max_model_len=20)
    completions, _ = generate_speculative(engine_config, None, [[1], [2]], params, [0, 1], draft_model=draft)
    assert completions[0].tokens == generate_plain(engine_config, [[1]], params[:1])[0].tokens
    assert len(completions[1].tokens) == 10


def test_nan_target_model_raises_an_error() -> None:
    model = decoder(1, size=9)
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    for temperature in (0.0, 1.0):
        params = [SamplingParams(max_new_tokens=5, temperature=temperature)]
        for draft in (model, NgramConfig()):
            with pytest.raises(CutawayError, match="NaN"):
                generate_speculative(
                    EngineConfig(model, max_num_seqs=1, max_model_len=20), None, [[1]], params, [0], draft_model=draft
                )


def test_nan_does_not_reach_other_requests() -> None:
    model = decoder(1, size=9, head=c.LMHead(tied=False))
    with torch.no_grad():
        model.stacks["decoder"].embed.token.weight[8] = math.nan
    params = [SamplingParams(max_new_tokens=6, suppress_tokens=[8])]
    spec_decoder = SpeculativeDecoder(
        EngineConfig(model, max_num_seqs=2, max_model_len=20), draft_model=decoder(2, size=9)
    )
    requests = [spec_decoder.submit(prompt, params[0], seed=0) for prompt in ([1, 2], [8, 3], [3], [4])]
    spec_decoder.run()
    with pytest.raises(CutawayError, match="NaN"):
        requests.pop(1).result()
    plain = generate_plain(EngineConfig(model, max_num_seqs=1, max_model_len=20), [[1, 2], [3], [4]], params * 3)
    assert [request.result().tokens for request in requests] == [completion.tokens for completion in plain]
    for request, completion in zip(requests, plain, strict=True):
        assert [token for chunk in request.stream() for token in chunk.tokens] == completion.tokens


def build_rope_model(scaling: Any) -> Transformer:
    rope = c.Rope(scaling=scaling)
    return decoder(block=(c.Block(attention=c.MultiHead(heads=2, d_head=4, position=rope), ffn=c.Mlp(hidden=8)),))


@pytest.mark.parametrize(
    "scaling",
    [
        c.LongRope(short_factors=(1.0, 1.0), long_factors=(2.0, 3.0), original_length=8, attention_factor=1.0),
        c.DynamicNTK(factor=2.0, original_length=8),
    ],
    ids=["LongRoPE", "dynamic NTK"],
)
def test_length_dependent_rope(scaling: Any) -> None:
    """An error above the switch length; below it, and as a draft model, it works."""
    model = build_rope_model(scaling)
    engine_config = EngineConfig(model, max_num_seqs=1, max_model_len=30)
    prompt, params = [[1, 2, 3]], [SamplingParams(max_new_tokens=6)]
    assert generate_speculative(engine_config, None, prompt, params, [0], draft_model=NgramConfig(2, 1))[0][
        0
    ].tokens == (generate_plain(engine_config, prompt, params)[0].tokens)
    with pytest.raises(InputError, match="would exceed 8"):
        generate_speculative(
            engine_config, None, prompt, [SamplingParams(max_new_tokens=7)], [0], draft_model=NgramConfig()
        )
    other = EngineConfig(decoder(3), max_num_seqs=1, max_model_len=30)
    params = [SamplingParams(max_new_tokens=20)]
    completions, _ = generate_speculative(other, None, prompt, params, [0], draft_model=model)
    assert completions[0].tokens == generate_plain(other, prompt, params)[0].tokens


def test_invalid_drafts_raise_errors() -> None:
    model = decoder(size=9)
    engine_config = EngineConfig(model, max_num_seqs=1, max_model_len=20)

    def check_error(match: str, **options: Any) -> None:
        with pytest.raises(InputError, match=match):
            generate_speculative(
                engine_config, options.pop("tokenizer", None), [[1]], [SamplingParams(max_new_tokens=3)], [0], **options
            )

    config = c.EncoderDecoder(vocab_size=9, d_model=8, encoder=build_stack(c.Stack, c.Block), decoder=cross_stack())
    check_error("same structure", draft_model=build_randomized_model(config))
    check_error("vocab_size is 7, but the target model's is 9", draft_model=decoder(size=7))
    first, second = byte_tokenizer(), train_bpe(["abab"], 260)
    check_error("token 0 is", draft_model=model, tokenizer=first, draft_tokenizer=second)
    check_error("pass a model, or NgramConfig", draft_model="gpt2")
    for num_draft_tokens in (0, 1.5, True):
        check_error("num_draft_tokens is", draft_model=model, num_draft_tokens=num_draft_tokens)
    for arguments in ({"max_ngram_size": 0}, {"min_ngram_size": 0}, {"max_ngram_size": 1, "min_ngram_size": 2}):
        with pytest.raises(InputError):
            NgramConfig(**arguments)


def test_aborted_request_does_not_affect_others() -> None:
    model = decoder(size=11)
    engine_config = engine_config_for(model, max_num_seqs=2, cache_implementation="paged")
    request_params = SamplingParams(max_new_tokens=12, logprobs=0)
    prompts = prompts_for(model.config, 0)
    spec_decoder = SpeculativeDecoder(engine_config, draft_model=decoder(1, size=11), num_draft_tokens=2)
    requests = [spec_decoder.submit(prompt, request_params, seed=0) for prompt in prompts]
    assert spec_decoder.step()
    for i in (0, 3):  # one running, one waiting
        requests[i].abort()
    spec_decoder.run()
    assert [request.result().finish_reason for request in requests] == [
        "abort",
        "length",
        "length",
        "abort",
        "length",
    ]
    assert 1 <= len(requests[0].result().tokens) <= 3
    assert requests[3].result().tokens == []
    complete = generate_plain(engine_config_for(model), prompts, [request_params] * len(prompts))
    for request, completion in zip(requests, complete, strict=True):
        assert request.result().tokens == completion.tokens[: len(request.result().tokens)]
    assert not spec_decoder.scheduler.running


def test_failing_request_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose draft prefill or output processing fails; the others continue."""
    model = decoder(size=11)
    prompts, params = [[1, 2], [3, 4, 5], [6]], SamplingParams(max_new_tokens=6)
    plain = generate_plain(engine_config_for(model), prompts, [params] * 3)
    engine = SpeculativeDecoder(engine_config_for(model, max_num_seqs=2), draft_model=decoder(1, size=11))
    requests = [engine.submit(prompt, params, seed=0) for prompt in prompts]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("detokenizer failed")

    monkeypatch.setattr(requests[1].output, "append_token", fail)
    engine.run()
    with pytest.raises(EngineError, match="detokenizer failed"):
        requests[1].result()
    assert [requests[i].result().tokens for i in (0, 2)] == [plain[i].tokens for i in (0, 2)]
    monkeypatch.setattr(engine.proposer, "propose", fail)
    failed = engine.submit([7], params, seed=0)
    engine.run()
    with pytest.raises(EngineError, match="a step failed"):
        failed.result()


@pytest.mark.parametrize("options", [{"weight_bits": 8}, {"compile": True}])
def test_weight_bits_and_compile_are_not_supported(options: dict[str, Any]) -> None:
    model = decoder()
    with pytest.raises(InputError, match=f"does not support {next(iter(options))}"):
        SpeculativeDecoder(engine_config_for(model, **options), draft_model=NgramConfig())


def test_expected_tokens() -> None:
    assert expected_tokens(0, 4) == 1
    assert expected_tokens(1, 4) == 5
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert SpeculativeStats().acceptance_rate == SpeculativeStats().tokens_per_forward_pass == 0
    with pytest.raises(InputError):
        expected_tokens(1.1, 4)
