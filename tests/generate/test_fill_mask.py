"""Filled masks ≡ transformers' fill-mask pipeline; what cannot be filled is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.family_parity import randomize_weights
from support.tokenizer_files import write_bert_files, write_roberta_files

import cutaway as ct
from cutaway.errors import CutawayError, InputError, WeightError
from cutaway.families.checkpoint import Checkpoint
from cutaway.generate.fill_mask import BATCH_SIZE, fill_mask
from cutaway.tokenizer import byte_tokenizer

SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 60,
}  # fmt: skip
KINDS: dict[str, Any] = {
    "bert": (write_bert_files, transformers.BertConfig, {}, "[MASK]"),
    "roberta": (write_roberta_files, transformers.RobertaConfig, {"pad_token_id": 1}, "<mask>"),
}
TEXTS = [
    "The quick brown {} jumps over the lazy dog.",
    "{}",
    "In the {} there was a model, and the {} was without {}.",
    "the model {}{} form",
    "{} runs away from it",
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Any, list[str]]:
    """Ours, the peer's pipeline, and texts with masks."""
    write, config, more, mask = KINDS[request.param]
    directory: Path = tmp_path_factory.mktemp(request.param)
    write(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    settings = config(vocab_size=len(tokenizer) + 7, **SMALL, **more)  # a padded vocabulary, as published ones are
    model = transformers.AutoModelForMaskedLM.from_config(settings).eval()
    randomize_weights(model, 3)
    model.save_pretrained(directory)
    pipeline = transformers.FillMaskPipeline(model=model, tokenizer=tokenizer)
    return ct.load(directory), pipeline, [text.replace("{}", mask) for text in TEXTS]


def test_filled_masks_are_the_peers(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    """All texts side by side here, one by one there."""
    ours, pipeline, texts = kind
    assert ours.tokenizer is not None
    found = fill_mask(ours.model, ours.tokenizer, texts, top_k=7)
    assert [len(masks) for masks in found] == [1, 1, 3, 2, 1]
    for text, masks in zip(texts, found, strict=True):
        theirs = pipeline(text, top_k=7)
        alone = len(masks) == 1
        for mine, expected in zip(masks, [theirs] if alone else theirs, strict=True):
            assert [filled.id for filled in mine] == [each["token"] for each in expected]
            assert [filled.token for filled in mine] == [each["token_str"] for each in expected]
            for filled, each in zip(mine, expected, strict=True):
                assert filled.probability == pytest.approx(each["score"], abs=1e-5)
                if alone and filled.id not in ours.tokenizer.all_special_ids:
                    assert filled.text == each["sequence"]


def test_a_model_in_training_fills_without_dropout(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    checkpoint, _, texts = kind
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    assert tokenizer is not None
    expected = fill_mask(model, tokenizer, texts)
    try:
        assert fill_mask(model.train(), tokenizer, texts) == expected
        assert model.training
    finally:
        model.eval()


def test_the_other_masks_stay(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    ours, pipeline, texts = kind
    assert ours.tokenizer is not None
    mask = pipeline.tokenizer.mask_token
    masks = fill_mask(ours.model, ours.tokenizer, [texts[2]], top_k=3)[0]
    for filled in (one for proposals in masks for one in proposals):
        assert filled.text.count(mask) == 2 + (filled.token == mask)
        assert pipeline.tokenizer.cls_token not in filled.text.replace(filled.token, "", 1)


def test_all_probabilities_make_one(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    ours, _, texts = kind
    assert ours.tokenizer is not None
    everything = fill_mask(ours.model, ours.tokenizer, texts[:1], top_k=ours.config.vocab_size)[0][0]
    assert sum(filled.probability for filled in everything) == pytest.approx(1.0, abs=1e-5)
    assert {filled.id for filled in everything} == set(range(ours.config.vocab_size))


def test_many_texts_keep_their_order(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    ours, _, texts = kind
    assert ours.tokenizer is not None
    alone = {text: fill_mask(ours.model, ours.tokenizer, [text])[0] for text in texts}
    many = [texts[number % len(texts)] for number in range(2 * BATCH_SIZE + 3)]
    for text, masks in zip(many, fill_mask(ours.model, ours.tokenizer, many), strict=True):
        for mine, expected in zip(masks, alone[text], strict=True):
            assert [filled.id for filled in mine] == [filled.id for filled in expected]
            assert [filled.text for filled in mine] == [filled.text for filled in expected]
    assert fill_mask(ours.model, ours.tokenizer, []) == []


@pytest.mark.unchecked
def test_what_cannot_be_filled_is_said(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    ours, _, texts = kind
    own: Any = ours.tokenizer
    bare = ct.build(ours.config.model_dump() | {"head": {"kind": "none"}})
    cases: list[tuple[str, Any, Any, Any, dict[str, Any]]] = [
        ("no head", bare, own, texts, {}),
        ("no head", ct.build("tiny-gpt"), own, texts, {}),
        ("no mask token", ours.model, byte_tokenizer(), texts, {}),
        ("text 1 has no mask", ours.model, own, [texts[0], "nothing here"], {}),
        ("into a list", ours.model, own, texts[0], {}),
        ("top_k is 0", ours.model, own, texts, {"top_k": 0}),
        ("ask for fewer", ours.model, own, texts, {"top_k": 10_000}),
        ("is a string", ours.model, own, [3], {}),
        ("position", ours.model, own, [texts[0] * 20], {}),
    ]
    for sentence, model, tokenizer, given, how in cases:
        with pytest.raises(InputError, match=sentence):
            fill_mask(model, tokenizer, given, **how)


def test_weights_that_are_not_numbers_are_noticed(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    ours, _, texts = kind
    assert ours.tokenizer is not None
    parameter: Any = next(p for p in ours.model.parameters() if p.ndim == 1)
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.fill_(torch.nan)
    try:
        with pytest.raises(CutawayError, match="not numbers") as raised:
            fill_mask(ours.model, ours.tokenizer, texts[:1])
        assert isinstance(raised.value, WeightError)
    finally:
        with torch.no_grad():
            parameter.copy_(kept)
