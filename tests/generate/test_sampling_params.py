"""SamplingParams: one-line errors for invalid values; integers and floats of other libraries are accepted."""

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
    ({"max_new_tokens": 0}, "max_new_tokens is 0; pass an integer, 1 or more"),
    ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0; pass an integer"),
    ({"max_new_tokens": True}, "max_new_tokens is True"),
    ({"min_new_tokens": -1}, "min_new_tokens is -1; pass an integer, 0 or more"),
    ({"min_new_tokens": None}, "min_new_tokens is None"),
    ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens is 5, but max_new_tokens is 4; lower min_new_tokens"),
    ({"temperature": -0.1}, "temperature is -0.1; pass a number 0 (greedy) or more"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": True}, "temperature is True"),
    ({"temperature": "0.7"}, "temperature is '0.7'"),
    ({"temperature": None}, "temperature is None"),
    ({"temperature": 10**400}, "temperature is 1000"),
    ({"temperature": 1j}, "temperature is 1j"),
    ({"temperature": np.bool_(True)}, "temperature is np.True_"),
    ({"top_k": 0}, "top_k is 0; pass an integer, 1 or more"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_k": 40.0}, "top_k is 40.0"),
    ({"top_k": True}, "top_k is True"),
    ({"top_k": np.array([1, 2])}, "top_k is array([1, 2])"),
    ({"top_p": 0}, "top_p is 0; pass a number above 0 and at most 1 (1 keeps all)"),
    ({"top_p": 1.01}, "top_p is 1.01"),
    ({"top_p": math.nan}, "top_p is nan"),
    ({"min_p": -0.1}, "min_p is -0.1; pass a number from 0 (keeps all) to 1"),
    ({"min_p": 1.5}, "min_p is 1.5"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0; pass a number from 0.001 to 1000"),
    ({"repetition_penalty": -1.2}, "repetition_penalty is -1.2"),
    ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1; pass a number from -2 to 2 (0 changes nothing)"),
    ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
    ({"logit_bias": [1, 2]}, "logit_bias is [1, 2]; pass a dict from token ids to numbers"),
    ({"logit_bias": {1: math.nan}}, "logit_bias of token 1 is nan; pass a number of at most 1e+06, or -inf"),
    ({"logit_bias": {1: math.inf}}, "logit_bias of token 1 is inf"),
    ({"logit_bias": {1: "5"}}, "logit_bias of token 1 is '5'"),
    ({"logit_bias": {"1": 5}}, "logit_bias contains '1'; token ids are integers, 0 or more"),
    ({"logit_bias": {-1: 5}}, "logit_bias contains -1"),
    ({"suppress_tokens": 5}, "suppress_tokens is 5; pass a list of token ids, such as [0, 2]"),
    ({"suppress_tokens": "12"}, "suppress_tokens is '12'; pass a list"),
    ({"suppress_tokens": [1.5]}, "suppress_tokens contains 1.5; token ids are integers, 0 or more"),
    ({"suppress_tokens": [True]}, "suppress_tokens contains True"),
    ({"suppress_tokens": {1: 2}}, "suppress_tokens is {1: 2}; pass a list"),
    ({"stop_token_ids": [-3]}, "stop_token_ids contains -3"),
    ({"stop": ["a", ""]}, "stop contains an empty string, which matches everywhere; leave it out"),
    ({"stop": ""}, "stop contains an empty string"),
    ({"stop": [5]}, "stop contains 5; pass strings here, and token ids as stop_token_ids"),
    ({"stop": b"x"}, "stop is b'x'; pass a string or a list of strings"),
    ({"stop": ["x"] * 257}, "stop has 257 strings; pass at most 256"),
    ({"stop": ["x" * 20_000]}, "the strings in stop have more than 16384 characters in total"),
    ({"ignore_eos": 1}, "ignore_eos is 1; pass True or False"),
    ({"seed": -1}, "seed is -1; pass an integer from 0 to 2**63 - 1"),
    ({"seed": 2**63}, "seed is 9223372036854775808"),
    ({"seed": 1.0}, "seed is 1.0"),
    ({"logprobs": -1}, "logprobs is -1; pass an integer from 0 to 50"),
    ({"logprobs": 51}, "logprobs is 51"),
    ({"logprobs": True}, "logprobs is True"),
    ({"n": 0}, "n is 0; pass an integer from 1 to 128"),
    ({"n": 129}, "n is 129"),
    ({"n": None}, "n is None"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_invalid_values_raise_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        SamplingParams(**arguments)  # type: ignore[arg-type]
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logit_bias": {10: 1.0}}, "logit_bias contains token 10; the vocabulary has ids 0 to 9"),
        ({"suppress_tokens": [3, 99]}, "suppress_tokens contains token 99"),
        ({"stop_token_ids": [10]}, "stop_token_ids contains token 10"),
        ({"logit_bias": dict.fromkeys(range(11), 0.0)}, "logit_bias has 11 entries, but vocab_size is 10"),
        ({"suppress_tokens": [1] * 11}, "suppress_tokens has 11 entries"),
        ({"suppress_tokens": range(10)}, "suppress_tokens and logit_bias suppress the whole"),
        (
            {"suppress_tokens": range(5), "logit_bias": dict.fromkeys(range(5, 10), -math.inf)},
            "suppress_tokens and logit_bias suppress the whole",
        ),
        (
            {"suppress_tokens": range(9), "stop_token_ids": [9], "min_new_tokens": 1},
            "min_new_tokens suppresses the stop tokens",
        ),
    ],
)
def test_check_vocab_errors(arguments: dict[str, object], message: str) -> None:
    params = SamplingParams(**arguments)  # type: ignore[arg-type]
    with pytest.raises(InputError) as error:
        params.check_vocab(10)
    assert str(error.value).startswith(message)


def test_numpy_and_torch_numbers_are_accepted() -> None:
    params = SamplingParams(
        max_new_tokens=np.int32(5),
        temperature=np.float32(0.5),
        top_k=torch.tensor(3),  # type: ignore[arg-type]
        top_p=Fraction(1, 2),  # type: ignore[arg-type]
        suppress_tokens=np.array([1, 2]),  # type: ignore[arg-type]
        stop_token_ids={4},  # type: ignore[arg-type]
        logit_bias={np.int64(3): np.float64(-1)},  # type: ignore[dict-item]
        stop="end",
    )
    params.check_vocab(10)
    assert params == SamplingParams(
        max_new_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        suppress_tokens=(1, 2),
        stop_token_ids=(4,),
        logit_bias={3: -1.0},
        stop=("end",),
    )
    for value in (params.max_new_tokens, params.top_k, *params.suppress_tokens, *params.logit_bias):
        assert type(value) is int
    for number in (params.temperature, params.top_p, *params.logit_bias.values()):
        assert type(number) is float


def test_default_is_greedy() -> None:
    params = SamplingParams()
    params.check_vocab(1)
    assert params.temperature == 0
    assert params.max_new_tokens is None
    assert hash(params) == hash(SamplingParams())
    assert dataclasses.replace(params, temperature=1).temperature == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
