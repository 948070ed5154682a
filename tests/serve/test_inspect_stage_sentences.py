"""Sentences of the trace screen state the numbers of the library."""

import re
from typing import Any

import pytest
import torch
from support.inspector import open_inspector, random_token_ids, run_query

import cutaway as ct
from cutaway.errors import InputError
from cutaway.serve.inspect.inspector import Inspector

pytestmark = pytest.mark.unchecked

MODELS = ["tiny-gpt", "tiny-llama", "tiny-gemma", "tiny-mla", "tiny-moe", "tiny-bert", "tiny-modernbert", "tiny-t5"]


def random_input(inspector: Inspector, length: int = 14) -> dict[str, Any]:
    model_input = {"tokens": random_token_ids(length, 100)}
    if len(inspector.model.stacks) > 1:
        model_input["source"] = random_token_ids(7, 100, 1)
    return model_input


def get_sentence(inspector: Inspector, model_input: dict[str, Any], site: str, position: int) -> str:
    params = {"input": model_input, "site": site, "position": position, "source_position": 3}
    sentence = run_query(inspector, "activation", **params)[0]["sentence"]
    assert isinstance(sentence, str)
    return sentence


@pytest.mark.parametrize("name", [*MODELS, "tiny-bart", "tiny-albert"])
def test_every_site_has_a_sentence(name: str) -> None:
    inspector = open_inspector(name)
    model_input = random_input(inspector)
    masks = [site.replace(".q", ".mask") for site in inspector.sites if site.endswith(".q")]
    for site in [*inspector.sites, *masks, *(["softmax"] if "logits" in inspector.sites else [])]:
        sentence = get_sentence(inspector, model_input, site, 5)
        assert re.search(r"\d.*\.$", sentence), f"{site}: {sentence}"
        assert "nan" not in sentence


def test_numbers_equal_the_library() -> None:
    inspector = open_inspector("tiny-llama")
    model_input = random_input(inspector)
    sites = ("blocks.1.resid_pre", "blocks.1.attn.pattern", "blocks.1.ffn.hidden")
    with torch.no_grad(), ct.trace(inspector.model, *sites) as t:
        inspector.model(torch.tensor([model_input["tokens"]]))
    resid, pattern, hidden = (t[site].as_subclass(torch.Tensor)[0] for site in sites)
    rms = float(resid[9].square().mean().sqrt())
    assert f"by its RMS {rms:.3f} and" in get_sentence(inspector, model_input, "blocks.1.attn.in", 9)
    weight = float(pattern[:, 9].max())
    head, key = divmod(int(pattern[:, 9].argmax()), pattern.shape[-1])
    sentence = get_sentence(inspector, model_input, "blocks.1.attn.pattern", 9)
    assert f"{100 * weight:.1f} %, is in head {head} on" in sentence
    assert f"(token {key})" in sentence
    count = int((hidden[9].abs() > 0.1).sum())
    assert get_sentence(inspector, model_input, "blocks.1.ffn.hidden", 9).startswith(f"{count} of 128 hidden units")
    logits = get_sentence(inspector, model_input, "softmax", 9)
    assert logits.startswith("Softmax turns 256 logits into probabilities that sum to 1")


def test_mask_sentences() -> None:
    gpt = open_inspector("tiny-gpt")
    model_input = random_input(gpt)
    last = get_sentence(gpt, model_input, "blocks.0.attn.mask", 13)
    assert last == "The last token sees all 14 tokens; no key is masked."
    earlier = get_sentence(gpt, model_input, "blocks.0.attn.mask", 4)
    assert earlier.endswith("sees 5 tokens (tokens 0 to 4) of 14; 9 later tokens masked (causal mask).")
    dropped = model_input | {"edits": {"mask": "drop"}}
    assert "An edit drops the causal mask" in get_sentence(gpt, dropped, "blocks.0.attn.mask", 4)

    gemma = open_inspector("tiny-gemma")
    layers = run_query(gemma, "attention_layers")[0]["layers"]
    windowed = next(layer["name"] for layer in layers if layer["window"] == 8)
    sentence = get_sentence(gemma, model_input, f"{windowed}.mask", 11)
    assert "(tokens 4 to 11) of 14; 4 earlier tokens and 2 later tokens masked" in sentence
    assert "sliding window of 8 tokens" in sentence

    bert = get_sentence(open_inspector("tiny-bert"), model_input, "blocks.0.attn.mask", 4)
    assert bert == "Bidirectional attention: every token sees all 14 tokens; no key is masked."
    t5 = open_inspector("tiny-t5")
    cross = get_sentence(t5, random_input(t5), "decoder.blocks.0.cross.mask", 4)
    assert cross.endswith("sees all 7 source tokens; no key is masked.")


def test_structural_edits_and_missing_positions() -> None:
    inspector = open_inspector("tiny-llama")
    edited = random_input(inspector) | {"edits": {"blocks.1": "no_residual"}}
    assert "structural edit" in get_sentence(inspector, edited, "blocks.1.resid_post", 3)
    with pytest.raises(InputError, match="no position embedding"):
        get_sentence(inspector, random_input(inspector), "embed.position", 3)
