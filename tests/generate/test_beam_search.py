"""Beam search ≡ transformers' generate(num_beams=…), sequences and scores, one prompt or many of different lengths."""

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
from cutaway.generate.search.beam_search import Beam, beam_search

VOCABULARY = 24
START = 3
SHARED = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
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
    """Theirs and ours with the same weights."""
    made = {}
    for number, (name, config) in enumerate(CONFIGS.items()):
        settings = config()
        both = settings.is_encoder_decoder
        auto = transformers.AutoModelForSeq2SeqLM if both else transformers.AutoModelForCausalLM
        theirs = auto.from_config(settings, attn_implementation="eager").float().eval()
        randomize_weights(theirs, number, ("embed_positions",) if name == "marian" else ())
        directory: Path = tmp_path_factory.mktemp(name)
        theirs.generation_config = transformers.GenerationConfig()
        theirs.save_pretrained(directory)
        made[name] = theirs, ct.load(directory).model
    return made


def draw(r: random.Random, both: bool, likely: list[int]) -> dict[str, Any]:
    """Settings as `beam_search` takes them, every one of them now and then, with ends that are likely to come up."""
    beams = r.choice([2, 3, 4, 5])
    eos = set(r.sample(likely, min(len(likely), r.choice([0, 1, 1, 2, 3]))))
    forced = [] if r.random() < 0.6 else sorted(eos)[:1] or [4]

    def some(*ids: Any) -> list[Any]:
        return r.choice([[], [], [one for one in r.sample(ids, r.randint(1, len(ids))) if one not in forced]])

    return {
        "num_beams": beams,
        "n": r.randint(1, beams),
        "max_new_tokens": r.choice([1, 2, 5, 9, 14]),
        "eos_token_ids": eos,
        "length_penalty": r.choice([-1.0, 0.0, 0.6, 1.0, 2.0]),
        "early_stopping": r.choice([True, False, "never"]),
        "min_new_tokens": r.choice([0, 0, 0, 2, 4]),
        "forced_bos_token_id": r.choice([None, None, 9]) if both else None,
        "forced_eos_token_ids": forced,
        "bad_words_ids": some([1], [6], [8], [10, 11], [12, 6], [4, 5, 6], [9, 9]),
        "suppress_tokens": some(13, 14, 15),
        "begin_suppress_tokens": some(16, 17, 18),
        "no_repeat_ngram_size": r.choice([0, 0, 2, 3]),
        "repetition_penalty": r.choice([1.0, 1.0, 0.8, 1.3]),
    }


def of_peer(theirs: Any, prompt: list[int], how: dict[str, Any]) -> list[tuple[list[int], float]]:
    """The peer's sequences and scores for a prompt alone, without those that stand in for beams it did not have."""
    tokens = torch.tensor([prompt])
    both = theirs.config.is_encoder_decoder
    out = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        num_beams=how["num_beams"],
        num_return_sequences=how["n"],
        max_new_tokens=how["max_new_tokens"],
        min_new_tokens=how["min_new_tokens"] or None,
        length_penalty=how["length_penalty"],
        early_stopping=how["early_stopping"],
        eos_token_id=sorted(how["eos_token_ids"]) or None,
        pad_token_id=0,
        decoder_start_token_id=START if both else None,
        forced_bos_token_id=how["forced_bos_token_id"],
        forced_eos_token_id=how["forced_eos_token_ids"] or None,
        bad_words_ids=how["bad_words_ids"] or None,
        suppress_tokens=how["suppress_tokens"] or None,
        begin_suppress_tokens=how["begin_suppress_tokens"] or None,
        no_repeat_ngram_size=how["no_repeat_ngram_size"],
        repetition_penalty=how["repetition_penalty"],
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[:, 1 if both else len(prompt) :]
    lengths = (out.beam_indices >= 0).sum(-1)
    found = zip(new, lengths, out.sequences_scores.tolist(), strict=True)
    return [(row[:length].tolist(), score) for row, length, score in found if score > -1e6]


def search(ours: Any, prompts: list[list[int]], how: dict[str, Any]) -> list[list[Beam]]:
    both = ours.config.form == "encoder-decoder"
    return beam_search(ours, prompts, decoder_start_token_id=START if both else None, **how)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_beams_are_the_peers(name: str, seed: int, pairs: dict[str, Pair]) -> None:
    """Many prompts of different lengths here, each alone there."""
    theirs, ours = pairs[name]
    r = random.Random(f"{name} {seed}")
    reasons: list[str] = []
    for _ in range(12):
        prompts = [[r.randrange(2, VOCABULARY) for _ in range(r.choice([1, 2, 5, 9]))] for _ in range(3)]
        free = search(ours, prompts, {"num_beams": 4, "n": 4, "max_new_tokens": 6})
        likely = sorted({token for found in free for beam in found for token in beam.tokens[2:]})
        how = draw(r, ours.config.form == "encoder-decoder", likely)
        for prompt, found in zip(prompts, search(ours, prompts, how), strict=True):
            expected = of_peer(theirs, prompt, how)
            assert [beam.tokens for beam in found] == [tokens for tokens, _ in expected], (prompt, how)
            for beam, (_, score) in zip(found, expected, strict=True):
                scale = max(1.0, len(beam.tokens) ** -how["length_penalty"])  # a negative one multiplies by the length
                assert beam.score == pytest.approx(score, abs=1e-4 * scale), (prompt, how)
            reasons += [beam.finish_reason for beam in found]
    assert min(reasons.count("stop"), reasons.count("length")) >= 5


def test_a_checkpoints_own_settings_give_the_peers_answer(tmp_path: Path, pairs: dict[str, Pair]) -> None:
    """As published for summaries: everything is in the files, and nothing is asked for."""
    theirs, _ = pairs["bart"]
    theirs.save_pretrained(tmp_path)
    said = {
        "bos_token_id": 2, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": START,
        "forced_bos_token_id": 2, "forced_eos_token_id": 1, "no_repeat_ngram_size": 2, "num_beams": 4,
        "length_penalty": 2.0, "min_length": 6, "max_length": 12, "early_stopping": True, "bad_words_ids": [[0], [1]],
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    opened = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation="eager")
    ours = ct.load(tmp_path)
    start = read_generation_config(ours.generation_config, ours.hf_config, ours.tokenizer)
    most = start.max_new_tokens_for(1)
    assert most is not None
    source = torch.randint(4, VOCABULARY, (3, 8))
    expected = opened.generate(source, output_scores=True, return_dict_in_generate=True)
    found = beam_search(
        ours.model,
        source.tolist(),
        num_beams=start.num_beams,
        max_new_tokens=most,
        min_new_tokens=start.min_new_tokens_for(1),
        eos_token_ids=start.eos_token_ids,
        length_penalty=start.length_penalty,
        early_stopping=start.early_stopping,
        decoder_start_token_id=start.decoder_start_token_id,
        forced_bos_token_id=start.forced_bos_token_id,
        forced_eos_token_ids=start.forced_eos_token_ids,
        bad_words_ids=start.bad_words_ids,
        no_repeat_ngram_size=start.no_repeat_ngram_size,
    )
    for (beam,), sequence, score in zip(found, expected.sequences, expected.sequences_scores, strict=True):
        assert [START, *beam.tokens] == sequence[: len(beam.tokens) + 1].tolist()
        assert (sequence[len(beam.tokens) + 1 :] == 0).all()
        assert beam.score == pytest.approx(score.item(), abs=1e-4)


@pytest.mark.parametrize("name", ["t5", "gpt2", "mistral"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_prompts_beams_do_not_depend_on_the_others(name: str, early_stopping: Any, pairs: dict[str, Pair]) -> None:
    _, ours = pairs[name]
    r = random.Random(name)
    prompts = [[r.randrange(2, VOCABULARY) for _ in range(r.randint(1, 12))] for _ in range(9)]
    how = {
        "num_beams": 3,
        "n": 3,
        "max_new_tokens": 10,
        "eos_token_ids": {4, 5, 6, 7, 8, 9},
        "early_stopping": early_stopping,
    }
    how |= {"no_repeat_ngram_size": 2, "bad_words_ids": [[10, 11], [12, 13, 14], [15]]}
    together = search(ours, prompts, how)
    assert len({len(beam.tokens) for found in together for beam in found}) > 1
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = search(ours, [prompt], how)
        assert [beam.tokens for beam in found] == [beam.tokens for beam in alone]
        assert [beam.score for beam in found] == pytest.approx([beam.score for beam in alone], abs=1e-4)
        assert [beam.finish_reason for beam in found] == [beam.finish_reason for beam in alone]


def log_probability(ours: Any, prompt: list[int], answer: list[int]) -> float:
    with torch.no_grad():
        log_p = ours(torch.tensor([prompt + answer]))[0].log_softmax(-1)
    return sum(log_p[len(prompt) - 1 + place, token].item() for place, token in enumerate(answer))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("eos", [set(), {2}, {0, 3}])
def test_with_enough_beams_it_is_the_whole_tree(length_penalty: float, eos: set[int]) -> None:
    """Every answer of a vocabulary of five, scored one by one."""
    config = ct.config("tiny-gpt").model_dump() | {"vocab_size": 5}
    ours, prompt, most = ct.build(config, seed=1), [1, 4, 2], 3
    whole = []
    for length in range(1, most + 1):
        for answer in itertools.product(range(5), repeat=length):
            if not eos & set(answer[:-1]) and (length == most or answer[-1] in eos):
                score = log_probability(ours, prompt, list(answer)) / length**length_penalty
                whole.append((list(answer), score, "stop" if answer[-1] in eos else "length"))
    whole.sort(key=lambda each: -each[1])
    how: dict[str, Any] = {
        "num_beams": 130,
        "n": 130,
        "max_new_tokens": most,
        "eos_token_ids": eos,
        "early_stopping": "never",
    }
    (found,) = beam_search(ours, [prompt], length_penalty=length_penalty, **how)
    assert len(found) == len(whole)  # and not the 130 that were asked for
    by_tokens = {tuple(answer): (score, reason) for answer, score, reason in whole}
    for beam, (_, score, _) in zip(found, whole, strict=True):
        assert beam.score == pytest.approx(score, abs=1e-4)
        assert by_tokens[tuple(beam.tokens)] == (pytest.approx(beam.score, abs=1e-4), beam.finish_reason)


def test_one_beam_without_ends_is_greedy(pairs: dict[str, Pair]) -> None:
    theirs, ours = pairs["llama"]
    prompt = torch.tensor([[5, 9, 3]])
    expected = theirs.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    ((beam,),) = beam_search(ours, prompt.tolist(), num_beams=1, max_new_tokens=8)
    assert beam.tokens == expected[0, 3:].tolist()


def test_several_forced_ends_are_equally_good(pairs: dict[str, Pair]) -> None:
    (found,) = beam_search(
        pairs["gpt2"][1], [[5]], num_beams=2, n=2, max_new_tokens=1, eos_token_ids={1, 4}, forced_eos_token_ids=[1, 4]
    )
    assert sorted(found) == [([1], 0.0, "length"), ([4], 0.0, "length")]


def test_half_precision_is_summed_in_single(pairs: dict[str, Pair]) -> None:
    ours = copy.deepcopy(pairs["llama"][1]).bfloat16()
    ((beam,),) = beam_search(ours, [[5, 9, 3]], num_beams=3, max_new_tokens=6)
    assert beam.score == pytest.approx(log_probability(ours.float(), [5, 9, 3], beam.tokens) / 6, abs=0.05)
    assert beam.score != torch.tensor(beam.score).bfloat16().item()


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("num_beams is 0", {"num_beams": 0}),
    ("num_beams is True", {"num_beams": True}),
    ("max_new_tokens is 0", {"max_new_tokens": 0}),
    ("min_new_tokens is -1", {"min_new_tokens": -1}),
    ("no_repeat_ngram_size is 1.5", {"no_repeat_ngram_size": 1.5}),
    ("ask for more beams", {"n": 3}),
    ("early_stopping is 1", {"early_stopping": 1}),
    ("length_penalty is nan", {"length_penalty": float("nan")}),
    ("length_penalty is '1'", {"length_penalty": "1"}),
    ("eos_token_ids holds the id 24", {"eos_token_ids": {24}}),
    ("forced_bos_token_id holds the id -1", {"forced_bos_token_id": -1}),
    ("bad_words_ids holds an empty sequence", {"bad_words_ids": [[]]}),
    ("bad_words_ids is 5", {"bad_words_ids": [5]}),
    ("suppress_tokens is", {"suppress_tokens": ["a"]}),
    ("prompt 1 is empty", {"prompts": [[5], []]}),
    ("prompt 0 holds the id 99", {"prompts": [[99]]}),
    ("prompt 0 is 'text'", {"prompts": ["text"]}),
    ("decoder_start_token_id is for encoder-decoders", {"decoder_start_token_id": 3}),
    ("prompt 0 cannot be continued", {"suppress_tokens": list(range(VOCABULARY))}),
    ("position 40", {"max_new_tokens": 50}),
]


@pytest.mark.unchecked
@pytest.mark.parametrize(("sentence", "wrong"), WRONG)
def test_what_cannot_be_searched_is_said(sentence: str, wrong: dict[str, Any], pairs: dict[str, Pair]) -> None:
    how: dict[str, Any] = {"prompts": [[5, 6]], "num_beams": 2, "max_new_tokens": 4, "eos_token_ids": {1}} | wrong
    with pytest.raises(InputError, match=sentence):
        beam_search(pairs["gpt2"][1], how.pop("prompts"), **how)


@pytest.mark.unchecked
def test_a_model_that_cannot_search_is_said(pairs: dict[str, Pair]) -> None:
    with pytest.raises(InputError, match="give it as decoder_start_token_id"):
        beam_search(pairs["t5"][1], [[5]], num_beams=2, max_new_tokens=4)
    with pytest.raises(InputError, match="needs a decoder"):
        beam_search(ct.build("tiny-bert"), [[5]], num_beams=2, max_new_tokens=4)


def test_no_prompts_give_no_beams(pairs: dict[str, Pair]) -> None:
    assert beam_search(pairs["gpt2"][1], [], num_beams=2, max_new_tokens=4) == []


def test_logits_that_are_not_numbers_are_noticed() -> None:
    """Of the one prompt that has them, with its number."""
    config = ct.config("tiny-gpt").model_dump()
    ours = ct.build(config | {"head": config["head"] | {"tied": False}}, seed=0)
    table = next(p for p in ours.parameters() if p.shape == (config["vocab_size"], config["d_model"]))
    with torch.no_grad():
        table[9] = torch.nan
    with pytest.raises(WeightError, match="prompt 1 are not numbers") as raised:
        beam_search(ours, [[5, 6], [9]], num_beams=2, max_new_tokens=4)
    assert "damaged" in str(raised.value)
