"""fill_mask equals transformers' fill-mask pipeline; invalid input is an error."""

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
    """A checkpoint, transformers' pipeline with the same weights, and texts with masks."""
    write_tokenizer, config, options, mask = KINDS[request.param]
    directory: Path = tmp_path_factory.mktemp(request.param)
    write_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    hf_config = config(vocab_size=len(tokenizer) + 7, **SMALL, **options)  # a padded vocabulary, as published ones are
    model = transformers.AutoModelForMaskedLM.from_config(hf_config).eval()
    randomize_weights(model, 3)
    model.save_pretrained(directory)
    pipeline = transformers.FillMaskPipeline(model=model, tokenizer=tokenizer)
    return ct.load(directory), pipeline, [text.replace("{}", mask) for text in TEXTS]


def test_predictions_equal_transformers(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    """A batch of texts against single texts in transformers."""
    checkpoint, pipeline, texts = kind
    assert checkpoint.tokenizer is not None
    predictions = fill_mask(checkpoint.model, checkpoint.tokenizer, texts, top_k=7)
    assert [len(masks) for masks in predictions] == [1, 1, 3, 2, 1]
    for text, masks in zip(texts, predictions, strict=True):
        pipeline_output = pipeline(text, top_k=7)
        single_mask = len(masks) == 1
        for actual, expected in zip(masks, [pipeline_output] if single_mask else pipeline_output, strict=True):
            assert [prediction.id for prediction in actual] == [reference["token"] for reference in expected]
            assert [prediction.token for prediction in actual] == [reference["token_str"] for reference in expected]
            for prediction, reference in zip(actual, expected, strict=True):
                assert prediction.probability == pytest.approx(reference["score"], abs=1e-5)
                if single_mask and prediction.id not in checkpoint.tokenizer.all_special_ids:
                    assert prediction.text == reference["sequence"]


def test_training_mode_model_predicts_without_dropout(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    checkpoint, _, texts = kind
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    assert tokenizer is not None
    expected = fill_mask(model, tokenizer, texts)
    try:
        assert fill_mask(model.train(), tokenizer, texts) == expected
        assert model.training
    finally:
        model.eval()


def test_other_masks_stay_in_the_text(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    checkpoint, pipeline, texts = kind
    assert checkpoint.tokenizer is not None
    mask = pipeline.tokenizer.mask_token
    masks = fill_mask(checkpoint.model, checkpoint.tokenizer, [texts[2]], top_k=3)[0]
    for prediction in (p for predictions in masks for p in predictions):
        assert prediction.text.count(mask) == 2 + (prediction.token == mask)
        assert pipeline.tokenizer.cls_token not in prediction.text.replace(prediction.token, "", 1)


def test_probabilities_sum_to_one(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    checkpoint, _, texts = kind
    assert checkpoint.tokenizer is not None
    predictions = fill_mask(checkpoint.model, checkpoint.tokenizer, texts[:1], top_k=checkpoint.config.vocab_size)[0][0]
    assert sum(prediction.probability for prediction in predictions) == pytest.approx(1.0, abs=1e-5)
    assert {prediction.id for prediction in predictions} == set(range(checkpoint.config.vocab_size))


def test_batches_keep_the_order_of_texts(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    checkpoint, _, texts = kind
    assert checkpoint.tokenizer is not None
    alone = {text: fill_mask(checkpoint.model, checkpoint.tokenizer, [text])[0] for text in texts}
    many = [texts[i % len(texts)] for i in range(2 * BATCH_SIZE + 3)]
    for text, masks in zip(many, fill_mask(checkpoint.model, checkpoint.tokenizer, many), strict=True):
        for actual, expected in zip(masks, alone[text], strict=True):
            assert [prediction.id for prediction in actual] == [prediction.id for prediction in expected]
            assert [prediction.text for prediction in actual] == [prediction.text for prediction in expected]
    assert fill_mask(checkpoint.model, checkpoint.tokenizer, []) == []


@pytest.mark.unchecked
def test_invalid_arguments_raise_errors(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    checkpoint, _, texts = kind
    tokenizer: Any = checkpoint.tokenizer
    headless = ct.build(checkpoint.config.model_dump() | {"head": {"kind": "none"}})
    cases: list[tuple[str, Any, Any, Any, dict[str, Any]]] = [
        ("no masked-LM head", headless, tokenizer, texts, {}),
        ("no masked-LM head", ct.build("tiny-gpt"), tokenizer, texts, {}),
        ("no mask token", checkpoint.model, byte_tokenizer(), texts, {}),
        ("text 1 has no mask", checkpoint.model, tokenizer, [texts[0], "nothing here"], {}),
        ("pass a list", checkpoint.model, tokenizer, texts[0], {}),
        ("top_k is 0", checkpoint.model, tokenizer, texts, {"top_k": 0}),
        ("pass a smaller top_k", checkpoint.model, tokenizer, texts, {"top_k": 10_000}),
        ("not str", checkpoint.model, tokenizer, [3], {}),
        ("position", checkpoint.model, tokenizer, [texts[0] * 20], {}),
    ]
    for message, model, case_tokenizer, case_texts, options in cases:
        with pytest.raises(InputError, match=message):
            fill_mask(model, case_tokenizer, case_texts, **options)


def test_nan_weights_raise_weight_error(kind: tuple[Checkpoint, Any, list[str]]) -> None:
    checkpoint, _, texts = kind
    assert checkpoint.tokenizer is not None
    parameter: Any = next(p for p in checkpoint.model.parameters() if p.ndim == 1)
    original = parameter.detach().clone()
    with torch.no_grad():
        parameter.fill_(torch.nan)
    try:
        with pytest.raises(CutawayError, match="contain NaN") as raised:
            fill_mask(checkpoint.model, checkpoint.tokenizer, texts[:1])
        assert isinstance(raised.value, WeightError)
    finally:
        with torch.no_grad():
            parameter.copy_(original)
