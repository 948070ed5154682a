"""Guessing ahead changes how many passes an answer takes, and nothing else: not one token, not one chance."""

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
from cutaway.generate import Completion, Engine, EngineConfig, SamplingParams
from cutaway.generate.sampling.logits_processing import logits_to_probs
from cutaway.generate.sampling.sampler import Sampler
from cutaway.generate.speculative.draft_model import Proposal
from cutaway.generate.speculative.ngram_draft import NgramConfig, NgramIndex
from cutaway.generate.speculative.rejection_sampler import expected_tokens, rejection_sample
from cutaway.generate.speculative.speculative_decoder import SpeculativeDecoder, SpeculativeStats, generate_speculative
from cutaway.model import Transformer
from cutaway.tokenizer import byte_tokenizer, train_bpe

LENGTHS = (1, 7, 4, 9, 2)


def prompts_for(config: c.Config, seed: int, lengths: Sequence[int] = LENGTHS, *, repeat: bool = False) -> Any:
    """Ragged; for n-grams, of a few tokens again and again."""
    which = "source" if config.form == "encoder-decoder" else "tokens"
    prompts = [random_tokens(config, 1, n, seed + n, which)[0].tolist() for n in lengths]
    return [(prompt[:3] * n)[:n] for prompt, n in zip(prompts, lengths, strict=True)] if repeat else prompts


def plan_for(model: Transformer, **how: Any) -> EngineConfig:
    return EngineConfig(
        model, **{"max_model_len": 2 * SEQ_LEN, "decoder_start_token_id": 0, "max_source_len": max(LENGTHS), **how}
    )


def plainly(
    plan: EngineConfig, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], tokenizer: Any = None
) -> list[Completion]:
    engine = Engine(plan, tokenizer=tokenizer)
    tickets = [engine.submit(prompt, own, seed=0) for prompt, own in zip(prompts, settings, strict=True)]
    engine.run()
    return [ticket.result() for ticket in tickets]


def decoder(
    seed: int = 0, *, size: int = 5, context: int | None = None, head: c.LMHead | None = None, **stack: Any
) -> Transformer:
    """A small model whose next token depends on all before."""
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
    ahead=st.integers(1, 6),
    drafts=st.sampled_from(["itself", "another", "ngram"]),
    penalty=st.sampled_from([0.0, 0.0, 1.5]),
)
def test_the_most_likely_answers_are_the_same(
    config: c.Config, seed: int, kind: str, chunk: int, rows: int, ahead: int, drafts: str, penalty: float
) -> None:
    """Ragged prompts and limits, rows that are filled again, windows that wrap, a draft of any worth."""
    model = build_randomized_model(config, torch.float64, seed)
    draft = {
        "itself": model,
        "another": build_randomized_model(config, torch.float64, seed + 1),
        "ngram": NgramConfig(3, 1),
    }[drafts]
    prompts = prompts_for(config, seed, LENGTHS[:4], repeat=drafts == "ngram")
    settings = [
        SamplingParams(
            max_new_tokens=SEQ_LEN - i, stop_token_ids=[i, 5], min_new_tokens=i, frequency_penalty=penalty, logprobs=2
        )
        for i in range(len(prompts))
    ]
    plan = plan_for(model, max_num_seqs=rows, cache_implementation=kind, prefill_chunk_size=chunk)
    plain = plainly(plan, prompts, settings)
    answers, counts = generate_speculative(
        plan, None, prompts, settings, [0] * len(prompts), draft_model=draft, num_draft_tokens=ahead
    )
    for mine, theirs in zip(answers, plain, strict=True):
        assert mine.tokens == theirs.tokens
        assert (mine.finish_reason, mine.stop_reason, mine.prompt_tokens) == (
            theirs.finish_reason, theirs.stop_reason, theirs.prompt_tokens,
        )  # fmt: skip
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
        assert mine.top_logprobs is not None
        assert [len(top) for top in mine.top_logprobs] == [2] * len(mine.tokens)
    assert counts.num_output_tokens == sum(len(answer.tokens) for answer in answers)
    assert counts.num_forward_passes <= counts.num_output_tokens
    assert 0 <= counts.num_accepted <= counts.num_drafted
    if drafts == "itself":
        assert counts.num_accepted == counts.num_drafted


@given(
    config=configs(("decoder", "encoder-decoder")),
    seed=SEEDS,
    kind=st.sampled_from(["full", "ring", "paged"]),
    ahead=st.integers(1, 6),
    ngram=st.booleans(),
)
def test_an_answer_depends_on_its_request_alone(
    config: c.Config, seed: int, kind: str, ahead: int, ngram: bool
) -> None:
    """With neighbours that have other settings or with none, in a row that others had before or in a fresh one."""
    model = build_randomized_model(config, torch.float64, seed)
    draft = NgramConfig(3, 1) if ngram else build_randomized_model(config, torch.float64, seed + 1)
    prompts = prompts_for(config, seed, repeat=ngram)
    settings = [
        SamplingParams(max_new_tokens=8, temperature=1.0, top_k=4),
        SamplingParams(max_new_tokens=6),
        SamplingParams(max_new_tokens=3, temperature=0.7, top_p=0.9, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=8, temperature=2.0, presence_penalty=0.5, stop_token_ids=[1]),
        SamplingParams(max_new_tokens=7, temperature=1.0, min_p=0.1, logit_bias={2: 1.0}),
    ]
    seeds = [seed + i for i in range(len(prompts))]
    together, _ = generate_speculative(
        plan_for(model, max_num_seqs=3, cache_implementation=kind),
        None,
        prompts,
        settings,
        seeds,
        draft_model=draft,
        num_draft_tokens=ahead,
    )
    for i in (0, 3):
        plan = plan_for(model, max_num_seqs=1, cache_implementation=kind, prefill_chunk_size=3)
        alone, _ = generate_speculative(
            plan, None, [prompts[i]], [settings[i]], [seeds[i]], draft_model=draft, num_draft_tokens=ahead
        )
        assert alone[0].tokens == together[i].tokens


@torch.no_grad()
def exact(model: Any, prompt: list[int], settings: SamplingParams, depth: int) -> np.ndarray:
    """The chance of every sequence of `depth` tokens, from full passes."""
    size = model.config.vocab_size
    chances = np.ones(size**depth)
    sampler = Sampler(1, size)
    for place, said in enumerate(itertools.product(range(size), repeat=depth)):
        logits = model(torch.tensor([prompt + list(said)]))
        for step in range(depth):
            sampler.set_row(0, settings, prompt, 0, output_tokens=said[:step])
            p = logits_to_probs(logits[:, len(prompt) - 1 + step], sampler.first_rows(1), sampler.features(1))
            chances[place] *= float(p[0, said[step]])
    return chances


def tail(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_square(drawn: np.ndarray, p: np.ndarray) -> float:
    """How likely counts at least this far from p are; what is rare is counted together."""
    counts, expected = np.bincount(drawn, minlength=len(p)), len(drawn) * p
    assert not counts[p == 0].any()
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    rare = int(np.searchsorted(expected.cumsum(), 10)) + 1
    rare = max(rare, int((expected < 5).sum()))
    counts = np.append(counts[rare:], counts[:rare].sum())
    expected = np.append(expected[rare:], expected[:rare].sum())
    return tail(((counts - expected) ** 2 / expected).sum(), len(counts) - 1) if len(counts) > 1 else 1.0


DRAWN: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "filters": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    "penalties": {
        "temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.8,
        "logit_bias": {1: 0.5}, "suppress_tokens": [4], "min_new_tokens": 2, "stop_token_ids": [2],
    },
}  # fmt: skip


@torch.no_grad()
def near(model: Transformer, noise: float = 0.05) -> Transformer:
    """A good draft: almost the same weights."""
    other = build_randomized_model(model.config, torch.float64)
    other.load_weights(model.state_dict())
    for weight in other.parameters():
        weight.add_(noise * torch.randn_like(weight))
    return other


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("drafts", ["bad", "good", "ngram"])
def test_drawn_tokens_have_their_chances(name: str, drafts: str) -> None:
    """The first three tokens together, over many seeds, against every sequence's exact chance."""
    model = decoder(1)
    draft = {"bad": decoder(2), "good": near(model), "ngram": NgramConfig(2, 1)}[drafts]
    depth, seeds, prompt = 3, 2500, [3, 1, 3] if drafts == "ngram" else [3]
    settings = SamplingParams(max_new_tokens=depth + 1, ignore_eos=True, **DRAWN[name])
    plan = EngineConfig(model, max_num_seqs=seeds, max_model_len=64)
    answers, counts = generate_speculative(
        plan, None, [prompt] * seeds, [settings] * seeds, range(seeds), draft_model=draft, num_draft_tokens=depth
    )
    p = exact(model, prompt, settings, depth)
    # An answer that ended early stands for all that could have followed.
    codes = [tokens + [0] * (depth - len(tokens)) for tokens in (answer.tokens[:depth] for answer in answers)]
    places = np.array([sum(token * 5 ** (depth - 1 - i) for i, token in enumerate(code)) for code in codes])
    table = p.reshape(5, 5, 5)
    if settings.stop_token_ids:
        table = merged(table, settings)
    assert table.sum() == pytest.approx(1)
    assert chi_square(places, table.reshape(-1)) > 1e-4
    assert counts.num_accepted > 0
    assert counts.num_accepted < counts.num_drafted
    if drafts == "good":
        assert counts.acceptance_rate > 0.8


def merged(table: np.ndarray, settings: SamplingParams) -> np.ndarray:
    """Chances of answers that end with a stop token, all in the place where the rest is 0."""
    result = table.copy()
    for stop in settings.stop_token_ids:
        for first in range(len(table)):
            if first == stop:
                result[first] = 0
                result[first, 0, 0] = table[first].sum()
            else:
                result[first, stop] = 0
                result[first, stop, 0] = table[first, stop].sum()
    return result


def test_the_rule_alone_gives_the_models_distribution() -> None:
    """For any p and q, also where q guesses what p never says and the other way round."""
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
    needs = sampler.features(1)
    q = draft.softmax(-1).expand(n, size)
    guesses = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(5))
    verdict = rejection_sample(target.expand(n, 2, size), Proposal(guesses, [1] * n, [q]), sampler.first_rows(n), needs)
    p = target[0].softmax(-1).double().numpy()
    assert chi_square(verdict.tokens[:, 0].numpy(), p[0]) > 1e-4
    taken = verdict.num_accepted == 1
    assert chi_square(verdict.tokens[taken, 1].numpy(), p[1]) > 1e-4
    overlap = float(torch.minimum(target[0, 0].softmax(-1), q[0]).sum())
    assert float(taken.double().mean()) == pytest.approx(overlap, abs=5 * math.sqrt(0.25 / n))
    assert sampler.sampling_state.output_len.equal(1 + verdict.num_accepted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ahead", range(1, 7))
def test_a_draft_that_is_the_model_is_always_right(ahead: int, temperature: float) -> None:
    model = decoder(4, size=30)
    limit = 15
    settings = [SamplingParams(max_new_tokens=limit, temperature=temperature, top_p=0.95, repetition_penalty=1.2)] * 3
    plan = EngineConfig(model, max_num_seqs=3, max_model_len=32)
    _, counts = generate_speculative(
        plan, None, [[1], [2, 3], [4, 5, 6]], settings, [1, 2, 3], draft_model=model, num_draft_tokens=ahead
    )
    assert counts.num_accepted == counts.num_drafted > 0
    assert counts.num_forward_passes == 3 * math.ceil(limit / (ahead + 1))
    assert counts.acceptance_rate == 1
    assert counts.tokens_per_forward_pass == limit / math.ceil(limit / (ahead + 1))


def test_what_repeats_is_guessed() -> None:
    model = decoder(0, size=30)
    plan = EngineConfig(model, max_num_seqs=1, max_model_len=100)
    settings = [SamplingParams(max_new_tokens=60)]
    answers, counts = generate_speculative(
        plan, None, [[3, 4]], settings, [0], draft_model=NgramConfig(), num_draft_tokens=4
    )
    assert answers[0].tokens == plainly(plan, [[3, 4]], settings)[0].tokens
    assert counts.num_output_tokens == 60
    assert counts.num_forward_passes < 40


def test_the_longest_end_that_stood_there_before() -> None:
    repeats = NgramIndex(NgramConfig(3, 1), [1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3])
    assert repeats.propose(3) == [5, 8, 2]  # the last of those as long
    repeats.extend([4])
    assert repeats.propose(2) == [9, 2]
    assert NgramIndex(NgramConfig(3, 1), [7, 7, 1]).propose(3) == []
    assert NgramIndex(NgramConfig(3, 2), [7, 1, 7]).propose(3) == []  # one token is too little
    assert NgramIndex(NgramConfig(3, 2), [5, 1, 2, 1, 2]).propose(5) == [1, 2, 1, 2, 1]


def test_answers_end_within_what_was_guessed() -> None:
    """Stop strings, end tokens and limits, where the rest of a round was accepted already."""
    tokenizer = byte_tokenizer()
    model = decoder(5, size=tokenizer.vocab_size)
    prompts = [[1, 2, 3], [60, 61], [9]]
    free = plainly(
        EngineConfig(model, max_num_seqs=3, max_model_len=40), prompts, [SamplingParams(max_new_tokens=20)] * 3
    )
    for at in range(0, 8, 2):
        stops = [chr(answer.tokens[at]) if answer.tokens[at] < 128 else "none" for answer in free]
        eos = [free[0].tokens[at]]
        settings = [SamplingParams(max_new_tokens=20 - i, stop=stops[i], ignore_eos=i == 1) for i in range(3)]
        plan = EngineConfig(model, max_num_seqs=3, max_model_len=40, eos_token_ids=eos)
        plain = plainly(plan, prompts, settings, tokenizer)
        answers, _ = generate_speculative(
            plan, tokenizer, prompts, settings, [0, 0, 0], draft_model=model, num_draft_tokens=6
        )
        assert answers == plain
        assert answers[0].finish_reason == "stop"


def test_answers_may_fill_the_context() -> None:
    """To the last slot, whatever neighbours guess meanwhile; a draft with fewer positions falls silent."""
    model, draft = decoder(6, size=12, context=16), decoder(7, size=12, context=10)
    short = decoder(6, size=12, context=10)  # guesses rightly up to there
    short.load_weights({name: weight[: len(mine)] for name, mine, weight in both(short, model)})
    prompts = [[1] * 15, [2], [3] * 9, [4] * 12, [5] * 10]
    settings = [SamplingParams()] * 5
    for kind in ("full", "paged"):
        plan = EngineConfig(model, max_num_seqs=5, cache_implementation=kind)  # type: ignore[arg-type]
        plain = plainly(plan, prompts, settings)
        for guess in (draft, short, model, NgramConfig(2, 1)):
            for ahead in (1, 4):
                answers, _ = generate_speculative(
                    plan, None, prompts, settings, [0] * 5, draft_model=guess, num_draft_tokens=ahead
                )
                assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]


def both(a: Transformer, b: Transformer) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    return [(name, weight, b.state_dict()[name]) for name, weight in a.state_dict().items()]


def test_texts_that_wait_for_pages_and_begin_alike() -> None:
    model = decoder(8, size=12)
    prompts = [[1, 2] * 40 + [i] for i in range(6)]
    settings = [SamplingParams(max_new_tokens=50 - i) for i in range(6)]
    plan = EngineConfig(model, max_num_seqs=4, max_model_len=192, cache_implementation="paged")
    plan.kv_cache_memory_bytes = 7 * plan.bytes_for_slots(64)
    answers, _ = generate_speculative(
        plan, None, prompts, settings, [0] * 6, draft_model=near(model), num_draft_tokens=3
    )
    plain = plainly(EngineConfig(model, max_num_seqs=1, max_model_len=192), prompts, settings)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]


def test_begun_and_forced_tokens() -> None:
    config = c.EncoderDecoder(vocab_size=20, d_model=8, encoder=side(c.Stack, c.Block), decoder=crossed())
    model, draft = build_randomized_model(config, torch.float64, 1), build_randomized_model(config, torch.float64, 2)
    plan = EngineConfig(
        model, max_num_seqs=2, max_model_len=20, decoder_start_token_id=3, forced_eos_token_id=7, max_source_len=8
    )
    prompts, settings = [[1, 2, 3, 4], [5] * 8, [6]], [SamplingParams(max_new_tokens=9)] * 3
    engine = Engine(plan)
    tickets = [
        engine.submit(prompt, own, seed=0, output_prefix=[11]) for prompt, own in zip(prompts, settings, strict=True)
    ]
    engine.run()
    for guess in (draft, model, NgramConfig(2, 1)):
        answers, _ = generate_speculative(plan, None, prompts, settings, [0] * 3, draft_model=guess, output_prefix=[11])
        assert [answer.tokens for answer in answers] == [ticket.result().tokens for ticket in tickets]
        assert all(answer.tokens[0] == 11 and answer.tokens[-1] == 7 for answer in answers)


def side(stack: Any, block: Any, **extra: Any) -> Any:
    return stack(layers=1, block=(block(attention=c.MultiHead(heads=2), ffn=c.Mlp(hidden=8), **extra),))


def crossed() -> c.CrossStack:
    return side(c.CrossStack, c.CrossBlock, cross=c.Cross(heads=2))


def test_vocabularies_that_are_padded_differently() -> None:
    """The same tokens, another number of rows: more or fewer than the model's."""
    tokenizer = byte_tokenizer()
    real = tokenizer.vocab_size
    model = decoder(5, size=real + 5)
    prompts, settings = [[real + 4, 2, 3], [60]], [SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=12)]
    plan = EngineConfig(model, max_num_seqs=2, max_model_len=40)
    plain = plainly(plan, prompts, settings)
    for size in (real, real + 9):
        draft = decoder(6, size=size)
        how: dict[str, Any] = {"draft_model": draft, "draft_tokenizer": byte_tokenizer()}
        answers, _ = generate_speculative(plan, tokenizer, prompts, settings, [0, 0], **how)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]


def test_a_broken_draft_spoils_nothing() -> None:
    model, draft = decoder(1, size=9), decoder(2, size=9)
    with torch.no_grad():
        next(draft.parameters()).fill_(math.nan)
    settings = [SamplingParams(max_new_tokens=10), SamplingParams(max_new_tokens=10, temperature=1.0)]
    plan = EngineConfig(model, max_num_seqs=2, max_model_len=20)
    answers, _ = generate_speculative(plan, None, [[1], [2]], settings, [0, 1], draft_model=draft)
    assert answers[0].tokens == plainly(plan, [[1]], settings[:1])[0].tokens
    assert len(answers[1].tokens) == 10


def test_a_broken_model_is_told() -> None:
    model = decoder(1, size=9)
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    for temperature in (0.0, 1.0):
        settings = [SamplingParams(max_new_tokens=5, temperature=temperature)]
        for draft in (model, NgramConfig()):
            with pytest.raises(CutawayError, match="NaN"):
                generate_speculative(
                    EngineConfig(model, max_num_seqs=1, max_model_len=20), None, [[1]], settings, [0], draft_model=draft
                )


def test_a_broken_text_harms_no_other() -> None:
    model = decoder(1, size=9, head=c.LMHead(tied=False))
    with torch.no_grad():
        model.stacks["decoder"].embed.token.weight[8] = math.nan
    settings = [SamplingParams(max_new_tokens=6, suppress_tokens=[8])]
    speculation = SpeculativeDecoder(
        EngineConfig(model, max_num_seqs=2, max_model_len=20), draft_model=decoder(2, size=9)
    )
    tickets = [speculation.submit(prompt, settings[0], seed=0) for prompt in ([1, 2], [8, 3], [3], [4])]
    speculation.run()
    with pytest.raises(CutawayError, match="NaN"):
        tickets.pop(1).result()
    plain = plainly(EngineConfig(model, max_num_seqs=1, max_model_len=20), [[1, 2], [3], [4]], settings * 3)
    assert [ticket.result().tokens for ticket in tickets] == [answer.tokens for answer in plain]
    for ticket, answer in zip(tickets, plain, strict=True):
        assert [token for piece in ticket.stream() for token in piece.tokens] == answer.tokens


def turning(scaling: Any) -> Transformer:
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
def test_texts_whose_angles_depend_on_their_length(scaling: Any) -> None:
    """Refused where that begins; up to there, and as a draft, such a model is like any other."""
    model = turning(scaling)
    plan = EngineConfig(model, max_num_seqs=1, max_model_len=30)
    prompt, settings = [[1, 2, 3]], [SamplingParams(max_new_tokens=6)]
    assert generate_speculative(plan, None, prompt, settings, [0], draft_model=NgramConfig(2, 1))[0][0].tokens == (
        plainly(plan, prompt, settings)[0].tokens
    )
    with pytest.raises(InputError, match="grow past 8"):
        generate_speculative(plan, None, prompt, [SamplingParams(max_new_tokens=7)], [0], draft_model=NgramConfig())
    other = EngineConfig(decoder(3), max_num_seqs=1, max_model_len=30)
    settings = [SamplingParams(max_new_tokens=20)]
    answers, _ = generate_speculative(other, None, prompt, settings, [0], draft_model=model)
    assert answers[0].tokens == plainly(other, prompt, settings)[0].tokens


def test_what_cannot_be_a_draft() -> None:
    model = decoder(size=9)
    plan = EngineConfig(model, max_num_seqs=1, max_model_len=20)

    def refused(match: str, **how: Any) -> None:
        with pytest.raises(InputError, match=match):
            generate_speculative(
                plan, how.pop("tokenizer", None), [[1]], [SamplingParams(max_new_tokens=3)], [0], **how
            )

    config = c.EncoderDecoder(vocab_size=9, d_model=8, encoder=side(c.Stack, c.Block), decoder=crossed())
    refused("same form", draft_model=build_randomized_model(config))
    refused("vocab_size is 7, and the model's 9", draft_model=decoder(size=7))
    first, second = byte_tokenizer(), train_bpe(["abab"], 260)
    refused("token 0 is", draft_model=model, tokenizer=first, draft_tokenizer=second)
    refused("give a model, or NgramConfig", draft_model="gpt2")
    for ahead in (0, 1.5, True):
        refused("num_draft_tokens is", draft_model=model, num_draft_tokens=ahead)
    for bad in ({"max_ngram_size": 0}, {"min_ngram_size": 0}, {"max_ngram_size": 1, "min_ngram_size": 2}):
        with pytest.raises(InputError):
            NgramConfig(**bad)


def test_a_cancelled_answer_ends_there_and_harms_no_other() -> None:
    model = decoder(size=11)
    plan = plan_for(model, max_num_seqs=2, cache_implementation="paged")
    asked = SamplingParams(max_new_tokens=12, logprobs=0)
    prompts = prompts_for(model.config, 0)
    speculation = SpeculativeDecoder(plan, draft_model=decoder(1, size=11), num_draft_tokens=2)
    tickets = [speculation.submit(prompt, asked, seed=0) for prompt in prompts]
    assert speculation.step()
    for gone in (0, 3):  # one at work, one that waits
        tickets[gone].abort()
    speculation.run()
    assert [ticket.result().finish_reason for ticket in tickets] == [
        "abort",
        "length",
        "length",
        "abort",
        "length",
    ]
    assert 1 <= len(tickets[0].result().tokens) <= 3
    assert tickets[3].result().tokens == []
    whole = plainly(plan_for(model), prompts, [asked] * len(prompts))
    for ticket, answer in zip(tickets, whole, strict=True):
        assert ticket.result().tokens == answer.tokens[: len(ticket.result().tokens)]
    assert not speculation.scheduler.running


@pytest.mark.parametrize("how", [{"weight_bits": 8}, {"compile": True}])
def test_guesses_are_tried_on_the_model_as_it_is(how: dict[str, Any]) -> None:
    model = decoder()
    with pytest.raises(InputError, match=f"so {next(iter(how))} has no part in it"):
        SpeculativeDecoder(plan_for(model, **how), draft_model=NgramConfig())


def test_expected_tokens() -> None:
    assert expected_tokens(0, 4) == 1
    assert expected_tokens(1, 4) == 5
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert SpeculativeStats().acceptance_rate == SpeculativeStats().tokens_per_forward_pass == 0
    with pytest.raises(InputError):
        expected_tokens(1.1, 4)
