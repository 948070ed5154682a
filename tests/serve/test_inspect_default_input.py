"""Default input of the page: greedy output of an encoder-decoder, mask of an encoder, the selected position."""

import time

import pytest
import torch
from support.inspector import open_inspector, run_query
from support.server import byte_checkpoint

import cutaway as ct
from cutaway.serve.inspect import default_input
from cutaway.serve.inspect.inspector import build_inspector

pytestmark = pytest.mark.unchecked


def test_default_target_is_the_greedy_output_for_the_source() -> None:
    checkpoint = ct.load("tiny-dates", dtype=torch.float32)
    for source in (None, "12 Nisan 1832"):
        inspector = build_inspector(checkpoint, source, name="tiny-dates")
        info = run_query(inspector, "model_info")[0]
        expected = ct.generate(checkpoint, info["default_source"], temperature=0)[0].text
        assert info["default_text"] == expected
        tokens = run_query(inspector, "tokenize", text=expected)[0]["tokens"]
        assert info["default_position"] == len(tokens) - 2, "the position that predicts the last token of the output"
    assert info["default_text"] == "1832-04-12"


def test_default_target_is_bounded_in_length_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = byte_checkpoint("tiny-t5")  # random weights: the output has no end
    inspector = build_inspector(checkpoint, "a source")
    tokens = inspector.tokenizer.encode(inspector.tokenizer.default_text)
    assert 1 < len(tokens) <= 1 + 4 * default_input.MAX_NEW_TOKENS  # a byte that is not UTF-8 decodes to three bytes
    monkeypatch.setattr(default_input, "MAX_SECONDS", 0.0)
    start = time.monotonic()
    assert build_inspector(checkpoint, "a source").tokenizer.default_text
    assert time.monotonic() - start < 5


def test_untrained_encoder_decoder_has_a_short_target() -> None:
    inspector = open_inspector("tiny-t5")
    info = run_query(inspector, "model_info")[0]
    assert info["default_text"] == default_input.UNTRAINED_TARGET
    assert info["default_source"]
    assert info["is_untrained"]


def test_default_position_of_an_encoder_is_the_mask() -> None:
    inspector = open_inspector("tiny-english-encoder")
    info = run_query(inspector, "model_info")[0]
    tokens = run_query(inspector, "tokenize", text=info["default_text"])[0]["tokens"]
    assert info["mask_token_id"] is not None
    assert tokens[info["default_position"]] == info["mask_token_id"]
    assert open_inspector("tiny-bert").tokenizer.mask_token_id is None


def test_default_text_of_another_encoder_has_its_mask_token() -> None:
    checkpoint = ct.load("tiny-english-encoder", dtype=torch.float32)
    inspector = build_inspector(checkpoint, name="./some-directory")
    assert inspector.tokenizer.default_text == "The [MASK] sat on the mat."
    assert build_inspector(checkpoint, "no mask here").tokenizer.default_text == "no mask here"


def test_decoder_has_no_default_position() -> None:
    info = run_query(open_inspector("tiny-python"), "model_info")[0]
    assert info["default_position"] is None
    assert info["mask_token_id"] is None
