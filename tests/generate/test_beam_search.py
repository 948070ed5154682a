"""Beam search equals transformers' generate(num_beams=…) in sequences and scores, for one or several prompts."""

import copy
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.family_parity import randomize_weights

import cutaway as ct
from cutaway.errors import InputError, WeightError
from cutaway.generate.generation_config import read_generation_config
from cutaway.generate.search.beam_logits_processors import BeamSearchParams
from cutaway.generate.search.beam_search import Beam, beam_search

VOCAB_SIZE = 24
START = 3
SHARED = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 40, "decoder_start_token_id": START,
}  # fmt: skip
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, Any] = {
    "t5": lambda: transformers.T5Config(
        **SHARED, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=START
    ),
    "bart": lambda: transformers.BartConfig(**SHARED, **BART),
    "marian": lambda: transformers.MarianConfig(**SHARED, **BART),
    "llama": lambda: transformers.LlamaConfig(**SHARED, **LLAMA),
    "gpt2": lambda: transformers.GPT2Config(**SHARED, n_positions=40, n_embd=16, n_layer=2, n_head=2),
    "mistral": lambda: transformers.MistralConfig(**SHARED, **LLAMA, num_key_value_heads=1, sliding_window=4),
}
Pair = tuple[Any, Any]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """By family: transformers' model and ours with the same weights."""
    pairs = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        hf_config = config()
        is_encoder_decoder = hf_config.is_encoder_decoder
        auto = transformers.AutoModelForSeq2SeqLM if is_encoder_decoder else transformers.AutoModelForCausalLM
        reference = auto.from_config(hf_config, attn_implementation="eager").float().eval()
        randomize_weights(reference, seed, ("embed_positions",) if name == "marian" else ())
        directory: Path = tmp_path_factory.mktemp(name)
        reference.generation_config = transformers.GenerationConfig()
        reference.save_pretrained(directory)
        pairs[name] = reference, ct.load(directory).model
    return pairs


def random_options(r: random.Random, is_encoder_decoder: bool, likely: list[int]) -> dict[str, Any]:
    """Random arguments of `beam_search`, with EOS tokens that are likely to be generated."""
    num_beams = r.choice([2, 3, 4, 5])
    eos = set(r.sample(likely, min(len(likely), r.choice([0, 1, 1, 2, 3]))))
    forced = [] if r.random() < 0.6 else sorted(eos)[:1] or [4]

    def random_subset(*ids: Any) -> list[Any]:
        return r.choice([[], [], [entry for entry in r.sample(ids, r.randint(1, len(ids))) if entry not in forced]])

    return {
        "num_beams": num_beams,
        "n": r.randint(1, num_beams),
        "max_new_tokens": r.choice([1, 2, 5, 9, 14]),
        "eos_token_ids": eos,
        "length_penalty": r.choice([-1.0, 0.0, 0.6, 1.0, 2.0]),
        "early_stopping": r.choice([True, False, "never"]),
        "min_new_tokens": r.choice([0, 0, 0, 2, 4]),
        "forced_bos_token_id": r.choice([None, None, 9]) if is_encoder_decoder else None,
        "forced_eos_token_ids": forced,
        "bad_words_ids": random_subset([1], [6], [8], [10, 11], [12, 6], [4, 5, 6], [9, 9]),
        "suppress_tokens": random_subset(13, 14, 15),
        "begin_suppress_tokens": random_subset(16, 17, 18),
        "no_repeat_ngram_size": r.choice([0, 0, 2, 3]),
        "repetition_penalty": r.choice([1.0, 1.0, 0.8, 1.3]),
    }


def transformers_beams(reference: Any, prompt: list[int], options: dict[str, Any]) -> list[tuple[list[int], float]]:
    """transformers' sequences and scores for one prompt, without the placeholders of missing beams."""
    tokens = torch.tensor([prompt])
    is_encoder_decoder = reference.config.is_encoder_decoder
    out = reference.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        num_beams=options["num_beams"],
        num_return_sequences=options["n"],
        max_new_tokens=options["max_new_tokens"],
        min_new_tokens=options["min_new_tokens"] or None,
        length_penalty=options["length_penalty"],
        early_stopping=options["early_stopping"],
        eos_token_id=sorted(options["eos_token_ids"]) or None,
        pad_token_id=0,
        decoder_start_token_id=START if is_encoder_decoder else None,
        forced_bos_token_id=options["forced_bos_token_id"],
        forced_eos_token_id=options["forced_eos_token_ids"] or None,
        bad_words_ids=options["bad_words_ids"] or None,
        suppress_tokens=options["suppress_tokens"] or None,
        begin_suppress_tokens=options["begin_suppress_tokens"] or None,
        no_repeat_ngram_size=options["no_repeat_ngram_size"],
        repetition_penalty=options["repetition_penalty"],
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[:, 1 if is_encoder_decoder else len(prompt) :]
    lengths = (out.beam_indices >= 0).sum(-1)
    beams = zip(new, lengths, out.sequences_scores.tolist(), strict=True)
    return [(row[:length].tolist(), score) for row, length, score in beams if score > -1e6]


def search(model: Any, prompts: list[list[int]], options: dict[str, Any]) -> list[list[Beam]]:
    is_encoder_decoder = model.config.form == "encoder-decoder"
    params = BeamSearchParams(decoder_start_token_id=START if is_encoder_decoder else None, **options)
    return beam_search(model, prompts, params)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_beams_equal_transformers(name: str, seed: int, pairs: dict[str, Pair]) -> None:
    """A batch of prompts of different lengths against single prompts in transformers."""
    reference, model = pairs[name]
    r = random.Random(f"{name} {seed}")
    reasons: list[str] = []
    for _ in range(9):
        prompts = [[r.randrange(2, VOCAB_SIZE) for _ in range(r.choice([1, 2, 5, 9]))] for _ in range(3)]
        unconstrained = search(model, prompts, {"num_beams": 4, "n": 4, "max_new_tokens": 6})
        likely = sorted({token for beams in unconstrained for beam in beams for token in beam.tokens[2:]})
        options = random_options(r, model.config.form == "encoder-decoder", likely)
        for prompt, beams in zip(prompts, search(model, prompts, options), strict=True):
            expected = transformers_beams(reference, prompt, options)
            assert [beam.tokens for beam in beams] == [tokens for tokens, _ in expected], (prompt, options)
            for beam, (_, score) in zip(beams, expected, strict=True):
                scale = max(
                    1.0, len(beam.tokens) ** -options["length_penalty"]
                )  # a negative penalty multiplies by the length
                assert beam.score == pytest.approx(score, abs=1e-4 * scale), (prompt, options)
            reasons += [beam.finish_reason for beam in beams]
    assert min(reasons.count("stop"), reasons.count("length")) >= 5


def test_generation_config_beams_equal_transformers(tmp_path: Path, pairs: dict[str, Pair]) -> None:
    """All options in generation_config.json, as in published summarization models."""
    reference, _ = pairs["bart"]
    reference.save_pretrained(tmp_path)
    generation_config = {
        "bos_token_id": 2, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": START,
        "forced_bos_token_id": 2, "forced_eos_token_id": 1, "no_repeat_ngram_size": 2, "num_beams": 4,
        "length_penalty": 2.0, "min_length": 6, "max_length": 12, "early_stopping": True, "bad_words_ids": [[0], [1]],
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation="eager")
    model = ct.load(tmp_path)
    config = read_generation_config(model.generation_config, model.hf_config, model.tokenizer)
    max_new_tokens = config.max_new_tokens_for(1)
    assert max_new_tokens is not None
    source = torch.randint(4, VOCAB_SIZE, (3, 8))
    expected = loaded.generate(source, output_scores=True, return_dict_in_generate=True)
    params = BeamSearchParams(
        num_beams=config.num_beams,
        max_new_tokens=max_new_tokens,
        min_new_tokens=config.min_new_tokens_for(1),
        eos_token_ids=config.eos_token_ids,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        decoder_start_token_id=config.decoder_start_token_id,
        forced_bos_token_id=config.forced_bos_token_id,
        forced_eos_token_ids=config.forced_eos_token_ids,
        bad_words_ids=config.bad_words_ids,
        no_repeat_ngram_size=config.no_repeat_ngram_size,
    )
    beams = beam_search(model.model, source.tolist(), params)
    for (beam,), sequence, score in zip(beams, expected.sequences, expected.sequences_scores, strict=True):
        assert [START, *beam.tokens] == sequence[: len(beam.tokens) + 1].tolist()
        assert (sequence[len(beam.tokens) + 1 :] == 0).all()
        assert beam.score == pytest.approx(score.item(), abs=1e-4)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["t5", "gpt2", "mistral"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_beams_are_independent_of_the_batch(name: str, early_stopping: Any, pairs: dict[str, Pair]) -> None:
    _, model = pairs[name]
    r = random.Random(name)
    prompts = [[r.randrange(2, VOCAB_SIZE) for _ in range(r.randint(1, 12))] for _ in range(9)]
    options = {
        "num_beams": 3,
        "n": 3,
        "max_new_tokens": 10,
        "eos_token_ids": {4, 5, 6, 7, 8, 9},
        "early_stopping": early_stopping,
    }
    options |= {"no_repeat_ngram_size": 2, "bad_words_ids": [[10, 11], [12, 13, 14], [15]]}
    together = search(model, prompts, options)
    assert len({len(beam.tokens) for beams in together for beam in beams}) > 1
    for prompt, beams in zip(prompts, together, strict=True):
        (alone,) = search(model, [prompt], options)
        assert [beam.tokens for beam in beams] == [beam.tokens for beam in alone]
        assert [beam.score for beam in beams] == pytest.approx([beam.score for beam in alone], abs=1e-4)
        assert [beam.finish_reason for beam in beams] == [beam.finish_reason for beam in alone]


def log_probability(model: Any, prompt: list[int], completion: list[int]) -> float:
    with torch.no_grad():
        log_p = model(torch.tensor([prompt + completion]))[0].log_softmax(-1)
    return sum(log_p[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion))


@pytest.mark.sample(3)
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("eos", [set(), {2}, {0, 3}])
def test_enough_beams_enumerate_all_sequences(length_penalty: float, eos: set[int]) -> None:
    """All sequences of a vocabulary of five, scored one by one."""
    config = ct.config("tiny-gpt").model_dump() | {"vocab_size": 5}
    model, prompt, max_new_tokens = ct.build(config, seed=1), [1, 4, 2], 3
    expected = []
    for length in range(1, max_new_tokens + 1):
        for sequence in itertools.product(range(5), repeat=length):
            if not eos & set(sequence[:-1]) and (length == max_new_tokens or sequence[-1] in eos):
                score = log_probability(model, prompt, list(sequence)) / length**length_penalty
                expected.append((list(sequence), score, "stop" if sequence[-1] in eos else "length"))
    expected.sort(key=lambda entry: -entry[1])
    options: dict[str, Any] = {
        "num_beams": 130,
        "n": 130,
        "max_new_tokens": max_new_tokens,
        "eos_token_ids": eos,
        "early_stopping": "never",
    }
    (beams,) = beam_search(model, [prompt], BeamSearchParams(length_penalty=length_penalty, **options))
    assert len(beams) == len(expected)  # fewer than n=130
    by_tokens = {tuple(sequence): (score, reason) for sequence, score, reason in expected}
    for beam, (_, score, _) in zip(beams, expected, strict=True):
        assert beam.score == pytest.approx(score, abs=1e-4)
        assert by_tokens[tuple(beam.tokens)] == (pytest.approx(beam.score, abs=1e-4), beam.finish_reason)


def test_one_beam_without_eos_is_greedy(pairs: dict[str, Pair]) -> None:
    reference, model = pairs["llama"]
    prompt = torch.tensor([[5, 9, 3]])
    expected = reference.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    ((beam,),) = beam_search(model, prompt.tolist(), BeamSearchParams(num_beams=1, max_new_tokens=8))
    assert beam.tokens == expected[0, 3:].tolist()


def test_several_forced_eos_tokens_have_equal_scores(pairs: dict[str, Pair]) -> None:
    params = BeamSearchParams(num_beams=2, n=2, max_new_tokens=1, eos_token_ids={1, 4}, forced_eos_token_ids=[1, 4])
    (beams,) = beam_search(pairs["gpt2"][1], [[5]], params)
    assert sorted(beams) == [([1], 0.0, "length"), ([4], 0.0, "length")]


def test_bfloat16_scores_are_summed_in_float32(pairs: dict[str, Pair]) -> None:
    model = copy.deepcopy(pairs["llama"][1]).bfloat16()
    ((beam,),) = beam_search(model, [[5, 9, 3]], BeamSearchParams(num_beams=3, max_new_tokens=6))
    assert beam.score == pytest.approx(log_probability(model.float(), [5, 9, 3], beam.tokens) / 6, abs=0.05)
    assert beam.score != torch.tensor(beam.score).bfloat16().item()


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("num_beams is 0", {"num_beams": 0}),
    ("num_beams is True", {"num_beams": True}),
    ("max_new_tokens is 0", {"max_new_tokens": 0}),
    ("use more beams", {"n": 3}),
    ("early_stopping is 1", {"early_stopping": 1}),
    ("length_penalty is nan", {"length_penalty": float("nan")}),
    ("length_penalty is '1'", {"length_penalty": "1"}),
    ("forced_bos_token_id holds the id -1", {"forced_bos_token_id": -1}),
    ("prompt 1 is empty", {"prompts": [[5], []]}),
    ("prompt 0 holds the id 99", {"prompts": [[99]]}),
    ("prompt 0 holds the id 't'", {"prompts": ["text"]}),
    ("decoder_start_token_id is for encoder-decoders", {"decoder_start_token_id": 3}),
    ("prompt 0 cannot be continued", {"suppress_tokens": list(range(VOCAB_SIZE))}),
    ("position 40", {"max_new_tokens": 50}),
]


@pytest.mark.unchecked
@pytest.mark.parametrize(("message", "overrides"), WRONG)
def test_invalid_arguments_raise_errors(message: str, overrides: dict[str, Any], pairs: dict[str, Pair]) -> None:
    options: dict[str, Any] = {
        "prompts": [[5, 6]],
        "num_beams": 2,
        "max_new_tokens": 4,
        "eos_token_ids": {1},
    } | overrides
    with pytest.raises(InputError, match=message):
        beam_search(pairs["gpt2"][1], options.pop("prompts"), BeamSearchParams(**options))


@pytest.mark.unchecked
def test_unsupported_models_raise_errors(pairs: dict[str, Pair]) -> None:
    with pytest.raises(InputError, match="pass decoder_start_token_id"):
        beam_search(pairs["t5"][1], [[5]], BeamSearchParams(num_beams=2, max_new_tokens=4))
    with pytest.raises(InputError, match="needs a decoder"):
        beam_search(ct.build("tiny-bert"), [[5]], BeamSearchParams(num_beams=2, max_new_tokens=4))


def test_no_prompts(pairs: dict[str, Pair]) -> None:
    assert beam_search(pairs["gpt2"][1], [], BeamSearchParams(num_beams=2, max_new_tokens=4)) == []


def test_nan_logits_raise_weight_error() -> None:
    """The error names the prompt."""
    config = ct.config("tiny-gpt").model_dump()
    model = ct.build(config | {"head": config["head"] | {"tied": False}}, seed=0)
    table = next(p for p in model.parameters() if p.shape == (config["vocab_size"], config["d_model"]))
    with torch.no_grad():
        table[9] = torch.nan
    with pytest.raises(WeightError, match="prompt 1 contain NaN") as raised:
        beam_search(model, [[5, 6], [9]], BeamSearchParams(num_beams=2, max_new_tokens=4))
    assert "corrupt" in str(raised.value)
