"""Exported page: the stored results equal those of the queries; limit of size."""

from typing import Any

import numpy as np
import pytest
from support.exported_page import read_exported_results
from support.inspector import open_inspector, run_query
from support.nightly import nightly_except

from cutaway.serve.inspect.export import export_html
from cutaway.serve.inspect.export_bundle import result_key
from cutaway.serve.inspect.inspector import Inspector

pytestmark = pytest.mark.unchecked

MAX_BYTES = 4_000_000
STORY = "Once upon a time, there was a girl named Sue. She had a friend named Ben. They liked to play with a ball. "


def export(inspector: Inspector) -> str:
    page, is_complete = export_html(inspector, lambda done, total: None)
    assert is_complete
    return page


@pytest.mark.nightly
def test_a_page_of_64_tokens_has_at_most_4_megabytes() -> None:
    tokenizer = open_inspector("tiny-english").tokenizer
    assert tokenizer.tokenizer is not None
    text = tokenizer.tokenizer.decode(tokenizer.encode(STORY * 3)[:64])
    inspector = open_inspector("tiny-english", text)
    assert len(inspector.tokenizer.encode(text)) == 64
    assert len(export(inspector).encode()) <= MAX_BYTES


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    nightly_except(
        ("tiny-english-encoder", "tiny-t5"),
        ["tiny-python", "tiny-dates", "tiny-english-encoder", "tiny-t5", "tiny-bert"],
    ),
)
def test_stored_results_equal_the_queries(name: str) -> None:
    inspector = open_inspector(name)
    results = read_exported_results(export(inspector))
    tokenizer = inspector.tokenizer
    model_input = {"tokens": tokenizer.encode(tokenizer.default_text)}
    source = {} if tokenizer.default_source is None else {"source": tokenizer.encode_source(tokenizer.default_source)}
    model_input |= source
    prefix = "decoder." if source else ""
    last = len(model_input["tokens"]) - 1
    for position in (0, last):
        for site in ("embed", "blocks.1.attn.pattern", "blocks.1.attn.scores", "blocks.0.ffn.hidden", "final_norm"):
            check(
                inspector,
                results,
                "activation",
                {"input": model_input, "position": position, "site": f"{prefix}{site}"},
            )
        if source:
            params = {"input": model_input, "source_position": position % len(source["source"])}
            for site in ("encoder.blocks.0.attn.k", "decoder.blocks.0.cross.v"):
                check(inspector, results, "activation", {**params, "site": site}, position=0)
        check(inspector, results, "journey", {"input": model_input, "position": position, "source_position": 0})
    check(
        inspector, results, "attention_head", {"input": model_input, "attention": f"{prefix}blocks.1.attn", "head": 1}
    )
    position = last if tokenizer.default_position is None else tokenizer.default_position
    params = {"input": model_input, "attention": f"{prefix}blocks.0.attn", "head": 0, "position": position}
    check(inspector, results, "worked_attention", params)
    if source:
        params |= {"attention": "encoder.blocks.0.attn", "position": len(source["source"]) - 1}
        check(inspector, results, "worked_attention", params)
    check(inspector, results, "interventions", {"input": model_input, "position": position})
    check(inspector, results, "architecture", {})
    check(inspector, results, "attention_thumbnails", {"input": model_input, "attention": f"{prefix}blocks.0.attn"})


def check(inspector: Inspector, results: dict[str, Any], name: str, params: dict[str, Any], **defaults: int) -> None:
    data, tensors = run_query(inspector, name, **params, **defaults)
    stored_data, stored_tensors = results[result_key(name, params)]
    assert_close(stored_data, data)
    assert stored_tensors.keys() == tensors.keys()
    for key, value in tensors.items():
        np.testing.assert_allclose(stored_tensors[key], value.numpy(), rtol=2**-8, atol=1e-6)


def assert_close(stored: object, value: object) -> None:
    """Floats are equal up to rounding, everything else exactly."""
    if isinstance(value, float):
        assert stored == pytest.approx(value, rel=1e-4, abs=1e-5)
    elif isinstance(value, dict):
        assert isinstance(stored, dict)
        assert stored.keys() == value.keys()
        for name, inner in value.items():
            assert_close(stored[name], inner)
    elif isinstance(value, list):
        assert isinstance(stored, list)
        assert len(stored) == len(value)
        for one, other in zip(stored, value, strict=True):
            assert_close(one, other)
    else:
        assert stored == value
