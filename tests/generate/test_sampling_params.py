"""Settings refuse what makes no sense, each in one sentence that names it; numbers of other libraries are welcome."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from cutaway.errors import InputError
from cutaway.generate.sampling.sampling_params import SamplingParams

pytestmark = pytest.mark.unchecked

BAD = [
    ({"max_new_tokens": 0}, "max_new_tokens is 0; give a whole number, 1 or more"),
    ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0; give a whole number"),
    ({"max_new_tokens": True}, "max_new_tokens is True"),
    ({"min_new_tokens": -1}, "min_new_tokens is -1; give a whole number, 0 or more"),
    ({"min_new_tokens": None}, "min_new_tokens is None"),
    ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens is 5, more than max_new_tokens, 4; lower it"),
    ({"temperature": -0.1}, "temperature is -0.1; give a number 0 (the most likely token) or more"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": True}, "temperature is True"),
    ({"temperature": "0.7"}, "temperature is '0.7'"),
    ({"temperature": None}, "temperature is None"),
    ({"temperature": 10**400}, "temperature is 1000"),
    ({"temperature": 1j}, "temperature is 1j"),
    ({"temperature": np.bool_(True)}, "temperature is np.True_"),
    ({"top_k": 0}, "top_k is 0; give a whole number, 1 or more"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_k": 40.0}, "top_k is 40.0"),
    ({"top_k": True}, "top_k is True"),
    ({"top_k": np.array([1, 2])}, "top_k is array([1, 2])"),
    ({"top_p": 0}, "top_p is 0; give a number above 0 and at most 1 (1 keeps all)"),
    ({"top_p": 1.01}, "top_p is 1.01"),
    ({"top_p": math.nan}, "top_p is nan"),
    ({"min_p": -0.1}, "min_p is -0.1; give a number from 0 (keeps all) to 1"),
    ({"min_p": 1.5}, "min_p is 1.5"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0; give a number from 0.001 to 1000"),
    ({"repetition_penalty": -1.2}, "repetition_penalty is -1.2"),
    ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1; give a number from -2 to 2 (0 changes nothing)"),
    ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
    ({"logit_bias": [1, 2]}, "logit_bias is [1, 2]; give a mapping from token ids to numbers"),
    ({"logit_bias": {1: math.nan}}, "logit_bias of token 1 is nan; give a number of at most 1e+06, or -inf"),
    ({"logit_bias": {1: math.inf}}, "logit_bias of token 1 is inf"),
    ({"logit_bias": {1: "5"}}, "logit_bias of token 1 is '5'"),
    ({"logit_bias": {"1": 5}}, "logit_bias holds '1'; token ids are whole numbers from 0"),
    ({"logit_bias": {-1: 5}}, "logit_bias holds -1"),
    ({"suppress_tokens": 5}, "suppress_tokens is 5; give a list of token ids, such as [0, 2]"),
    ({"suppress_tokens": "12"}, "suppress_tokens is '12'; give a list"),
    ({"suppress_tokens": [1.5]}, "suppress_tokens holds 1.5; token ids are whole numbers from 0"),
    ({"suppress_tokens": [True]}, "suppress_tokens holds True"),
    ({"suppress_tokens": {1: 2}}, "suppress_tokens is {1: 2}; give a list"),
    ({"stop_token_ids": [-3]}, "stop_token_ids holds -3"),
    ({"stop": ["a", ""]}, "stop holds an empty string, which is everywhere; leave it out"),
    ({"stop": ""}, "stop holds an empty string"),
    ({"stop": [5]}, "stop holds 5; give strings, and token ids as stop_token_ids"),
    ({"stop": b"x"}, "stop is b'x'; give a string or a list of strings"),
    ({"stop": ["x"] * 257}, "stop holds 257 strings; give at most 256"),
    ({"stop": ["x" * 20_000]}, "the strings in stop are over 16384 characters together"),
    ({"ignore_eos": 1}, "ignore_eos is 1; give True or False"),
    ({"seed": -1}, "seed is -1; give a whole number from 0 to 2**63 - 1"),
    ({"seed": 2**63}, "seed is 9223372036854775808"),
    ({"seed": 1.0}, "seed is 1.0"),
    ({"logprobs": -1}, "logprobs is -1; give a whole number from 0 to 50"),
    ({"logprobs": 51}, "logprobs is 51"),
    ({"logprobs": True}, "logprobs is True"),
    ({"n": 0}, "n is 0; give a whole number from 1 to 128"),
    ({"n": 129}, "n is 129"),
    ({"n": None}, "n is None"),
]


@pytest.mark.parametrize(("wrong", "sentence"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_settings_have_their_sentence(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        SamplingParams(**wrong)  # type: ignore[arg-type]
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"logit_bias": {10: 1.0}}, "logit_bias names token 10; the vocabulary has ids 0 to 9"),
        ({"suppress_tokens": [3, 99]}, "suppress_tokens names token 99"),
        ({"stop_token_ids": [10]}, "stop_token_ids names token 10"),
        ({"logit_bias": dict.fromkeys(range(11), 0.0)}, "logit_bias has 11 entries, but the vocabulary only 10"),
        ({"suppress_tokens": [1] * 11}, "suppress_tokens has 11 entries"),
        ({"suppress_tokens": range(10)}, "suppress_tokens and logit_bias leave no token"),
        (
            {"suppress_tokens": range(5), "logit_bias": dict.fromkeys(range(5, 10), -math.inf)},
            "suppress_tokens and logit_bias leave no",
        ),
        (
            {"suppress_tokens": range(9), "stop_token_ids": [9], "min_new_tokens": 1},
            "min_new_tokens forbids the stop tokens",
        ),
    ],
)
def test_what_the_vocabulary_refuses(wrong: dict[str, object], sentence: str) -> None:
    settings = SamplingParams(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError) as error:
        settings.check_vocab(10)
    assert str(error.value).startswith(sentence)


def test_other_libraries_numbers_are_numbers() -> None:
    settings = SamplingParams(
        max_new_tokens=np.int32(5),
        temperature=np.float32(0.5),
        top_k=torch.tensor(3),  # type: ignore[arg-type]
        top_p=Fraction(1, 2),  # type: ignore[arg-type]
        suppress_tokens=np.array([1, 2]),  # type: ignore[arg-type]
        stop_token_ids={4},  # type: ignore[arg-type]
        logit_bias={np.int64(3): np.float64(-1)},  # type: ignore[dict-item]
        stop="end",
    )
    settings.check_vocab(10)
    assert settings == SamplingParams(
        max_new_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        suppress_tokens=(1, 2),
        stop_token_ids=(4,),
        logit_bias={3: -1.0},
        stop=("end",),
    )
    for value in (settings.max_new_tokens, settings.top_k, *settings.suppress_tokens, *settings.logit_bias):
        assert type(value) is int
    for number in (settings.temperature, settings.top_p, *settings.logit_bias.values()):
        assert type(number) is float


def test_the_default_is_greedy_and_nothing_else() -> None:
    settings = SamplingParams()
    settings.check_vocab(1)
    assert settings.temperature == 0
    assert settings.max_new_tokens is None
    assert hash(settings) == hash(SamplingParams())
    assert dataclasses.replace(settings, temperature=1).temperature == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.temperature = 1.0  # type: ignore[misc]
