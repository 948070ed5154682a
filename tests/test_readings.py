"""Readings: parts add up to what they are parts of, and planted facts are found."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from strategies import SEEDS, configs, lively, tokens_for
from torch import nn

import cutaway as ct
from cutaway import config as c
from cutaway.errors import InputError
from cutaway.lens.readings import Reading, attribution
from cutaway.model import Transformer

TINY = [name for name in ct.presets() if name.startswith("tiny-")]


def text_for(config: c.Config, seed: int = 0, length: int = 9) -> dict[str, Any]:
    """A text, and a source beside it where the model reads one."""
    given: dict[str, Any] = {"tokens": tokens_for(config, 1, length, seed)}
    if config.form == "encoder-decoder":
        given["source"] = tokens_for(config, 1, 5, seed + 1, "source")
    return given


def logits_of(model: Transformer, text: dict[str, Any]) -> torch.Tensor:
    both = [text["source"], text["tokens"]] if "source" in text else [text["tokens"]]
    return model(*both).detach()[0]


def is_sum(config: c.Config) -> bool:
    stack = getattr(config, "decoder", None) or config.encoder
    return not isinstance(stack.placement, c.Post) and config.head.transform is None


def check_sums(config: c.Config, seed: int) -> None:
    """However it is parted, Σ parts ≡ logit."""
    model, text = lively(config, torch.float64, seed), text_for(config, seed)
    if not is_sum(config):
        with pytest.raises(InputError, match="no sum of parts"):
            attribution(model, **text)
        return
    logits = logits_of(model, text)
    cap = config.head.softcap or float("inf")
    uncapped = logits if config.head.softcap is None else cap * torch.atanh(logits / cap)
    at = 5
    bound = 1e-9 * max(1.0, float(uncapped[at].abs().max()))
    if config.head.softcap is not None:  # atanh of what is near the cap loses digits; the cap itself loses none
        bound = 1e-7 * max(1.0, float(uncapped[at].abs().max()))
    for by_head, by_token in ((False, False), (True, False), (False, True), (True, True)):
        how = {"position": at, "by_head": by_head, "by_token": by_token}
        one = attribution(model, **text, of=3, **how)
        assert abs(float(one.values.sum() - uncapped[at, 3])) <= bound
        if cap != float("inf"):
            assert abs(float(cap * torch.tanh(one.values.sum() / cap) - logits[at, 3])) <= 1e-9 * cap
        two = attribution(model, **text, of=3, against=4, **how)
        assert abs(float(two.values.sum() - uncapped[at, 3] + uncapped[at, 4])) <= 2 * bound


@pytest.mark.parametrize("name", TINY)
def test_attributions_add_up_to_the_logit(name: str) -> None:
    check_sums(ct.config(name), 1)


@given(configs(), SEEDS)
def test_attributions_add_up_whatever_the_model(config: c.Config, seed: int) -> None:
    check_sums(config, seed)


def test_parts_are_what_they_are_called() -> None:
    """A head's part is what the logit loses, norms frozen, when the head's slice of o is zero; a causal part looks back."""
    config = ct.config("tiny-gpt")
    model, text = lively(config, torch.float64), text_for(config)
    heads = attribution(model, **text, of=7, by_head=True)
    coarse = attribution(model, **text, of=7)
    rows = [label for label in heads.labels[0] if label.startswith("1.attn.")]
    assert torch.allclose(heads[[*rows]].values.sum(), coarse["1.attn"].values)
    spread = attribution(model, **text, of=7, position=4, by_token=True)
    assert not spread.values[:, 5:].any()
    assert torch.allclose(spread.sum("token").at(part="0.ffn").values, attribution(model, **text, of=7, position=4)["0.ffn"].values)
