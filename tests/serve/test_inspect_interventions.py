"""The interventions query: each reported effect equals a forward pass of the edited model."""

from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.serve.inspect.inspector import Inspector, build_inspector
from cutaway.serve.inspect.model_input import ModelInput, TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries.find_token import FindToken
from cutaway.serve.inspect.queries.interventions import Interventions

pytestmark = pytest.mark.unchecked


@torch.no_grad()
def test_effects_equal_forward_passes_of_the_edited_model() -> None:
    inspector = build_inspector(ct.load("tiny-english", dtype=torch.float32), name="tiny-english")
    tokens = inspector.tokenizer.encode("The birds in the park")
    data = Interventions(input=ModelInput(tokens=tuple(tokens)), position=4).run(inspector, QueryJob()).data
    assert data["text"] == " were"
    model, ids, answer = inspector.model, torch.tensor([tokens]), data["token"]
    for name, site in (("3.attn", "blocks.3.attn.out"), ("5.ffn", "blocks.5.ffn.out")):
        for method in ("zero", "mean"):
            with ct.edit(model, {site: method}):
                probabilities = model(ids)[0, -1].softmax(-1)
            effect = data[method][name]
            assert effect["probability"] == pytest.approx(float(probabilities[answer]), abs=1e-5)
            assert effect["top"] == int(probabilities.argmax())
    with ct.edit(model, {"blocks.5.attn.z": {"do": "zero", "heads": [0]}}):
        probabilities = model(ids)[0, -1].softmax(-1)
    assert data["heads"]["5.attn.0"]["probability"] == pytest.approx(float(probabilities[answer]), abs=1e-5)
    by_token = [effect["probability"] for effect in data["tokens"]]
    assert min(range(5), key=by_token.__getitem__) == 1  # birds
    assert data["tokens"][1]["top_text"] == " was"


@torch.no_grad()
def test_occurrences_are_knocked_out_jointly() -> None:
    """The joint effect equals a forward pass with scores of −∞ on all earlier occurrences of the predicted token."""
    inspector = build_inspector(ct.load("tiny-english", dtype=torch.float32), name="tiny-english")
    tokens = inspector.tokenizer.encode("Max was sad. Lily met Max. Lily said hi to")
    texts = [inspector.tokenizer.decode_token(token) for token in tokens]
    data = run_interventions(inspector, tokens)
    positions = [index for index, text in enumerate(texts) if text.strip() == "Max"]
    assert (data["text"], texts[0], len(positions)) == (" Max", "Max", 2)
    assert (data["is_own_token"], data["is_special"]) == (False, False)

    def mask(scores: torch.Tensor) -> torch.Tensor:
        scores[:, :, -1, positions] = -torch.inf
        return scores

    with ct.edit(inspector.model, {"blocks.*.attn.scores": mask}):
        probabilities = inspector.model(torch.tensor([tokens]))[0, -1].softmax(-1)
    assert data["occurrences"]["positions"] == positions
    effect = data["occurrences"]["effect"]
    assert effect["probability"] == pytest.approx(float(probabilities[data["token"]]), abs=1e-5)
    assert effect["top"] == int(probabilities.argmax()) != data["predicted"]

    assert run_interventions(inspector, tokens[:3])["occurrences"] == {"positions": [], "effect": None}
    sentence = inspector.tokenizer.encode("The girl was very")
    very = Interventions(input=ModelInput(tokens=tuple(sentence)), position=3, token=sentence[3])
    data = very.run(inspector, QueryJob()).data
    assert (data["is_own_token"], data["occurrences"]["positions"]) == (True, [])


@torch.no_grad()
def test_occurrences_in_encoders_and_in_the_source() -> None:
    inspector = build_inspector(ct.load("tiny-english-encoder", dtype=torch.float32), name="tiny-english-encoder")
    tokens = inspector.tokenizer.encode("Lily loved the [MASK] very much. Mom gave Lily the drum.")
    mask_token_id = inspector.tokenizer.mask_token_id
    assert mask_token_id is not None
    drum = next(token for token in tokens if inspector.tokenizer.decode_token(token).strip() == "drum")
    query = Interventions(input=ModelInput(tokens=tuple(tokens)), position=tokens.index(mask_token_id), token=drum)
    occurrences = query.run(inspector, QueryJob()).data["occurrences"]
    assert occurrences["positions"] == [tokens.index(drum)]  # after the position
    inspector = build_inspector(ct.load("tiny-dates", dtype=torch.float32), name="tiny-dates")
    source, target = inspector.tokenizer.encode_source("12 Nisan 1832"), inspector.tokenizer.encode("")
    data = run_interventions(inspector, target, source)
    found = data["source_occurrences"]
    assert found["positions"]
    if len(found["positions"]) == 1:
        assert found["effect"] == data["source_tokens"][found["positions"][0]]
    assert data["occurrences"]["positions"] == []


def run_interventions(inspector: Inspector, tokens: list[int], source: list[int] | None = None) -> dict[str, Any]:
    """Interventions on the prediction at the last token."""
    model_input = ModelInput(tokens=tuple(tokens), source=None if source is None else tuple(source))
    return Interventions(input=model_input, position=len(tokens) - 1).run(inspector, QueryJob()).data


@torch.no_grad()
def test_effects_on_another_token() -> None:
    inspector = build_inspector(ct.load("tiny-english", dtype=torch.float32), name="tiny-english")
    tokens = inspector.tokenizer.encode("The birds in the park")
    was = FindToken(text="was").run(inspector, QueryJob()).data
    assert (was["text"], was["num_tokens"]) == (" was", 1)
    query = Interventions(input=ModelInput(tokens=tuple(tokens)), position=4, token=was["token"])
    data = query.run(inspector, QueryJob()).data
    assert data["token"] == was["token"] != data["predicted"]
    probability = inspector.model(torch.tensor([tokens]))[0, -1].softmax(-1)[was["token"]]
    assert data["probability"] == pytest.approx(float(probability), abs=1e-5)
    assert data["tokens"][1]["probability"] > data["probability"]  # without attention to the plural "birds"
    with pytest.raises(InputError, match="vocabulary"):
        Interventions(input=ModelInput(tokens=tuple(tokens)), position=4, token=4096).run(inspector, QueryJob())


def test_find_token() -> None:
    inspector = build_inspector(ct.load("tiny-english", dtype=torch.float32), name="tiny-english")
    long = FindToken(text="hippopotamus").run(inspector, QueryJob()).data
    assert long["num_tokens"] > 1
    assert "hippopotamus".startswith(long["text"].strip())
    assert FindToken(text=".").run(inspector, QueryJob()).data["text"].strip() == "."
    byte_model = build_inspector(ct.build("tiny-gpt", seed=0))
    assert FindToken(text="a").run(byte_model, QueryJob()).data == {"token": 97, "text": "a", "num_tokens": 1}
    encoder = build_inspector(ct.load("tiny-english-encoder", dtype=torch.float32), name="tiny-english-encoder")
    assert FindToken(text="cat").run(encoder, QueryJob()).data["text"].strip() == "cat"


def test_source_of_an_encoder_decoder_and_copied_tokens() -> None:
    inspector = build_inspector(ct.load("tiny-dates", dtype=torch.float32), name="tiny-dates")
    source, target = inspector.tokenizer.encode_source("12 Nisan 1832"), inspector.tokenizer.encode("1832-")
    model_input = ModelInput(tokens=tuple(target), source=tuple(source))
    data = Interventions(input=model_input, position=len(target) - 1).run(inspector, QueryJob()).data
    texts = [inspector.tokenizer.decode_token(token) for token in source]
    effects = [effect["probability"] for effect in data["source_tokens"]]
    assert "Nisan" in texts[min(range(len(effects)), key=effects.__getitem__)]
    assert "4.attn" not in data["zero"] or data["zero"]["0.cross"]


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-bert", "tiny-t5", "tiny-moe", "tiny-mla", "tiny-gemma"])
def test_all_forms(preset: str) -> None:
    model = ct.build(preset, seed=0)
    adapter = TokenizerAdapter(model.config.vocab_size, decoder_start_token_id=0 if len(model.stacks) > 1 else None)
    inspector = Inspector(model, adapter, name=preset)
    model_input = ModelInput(tokens=(3, 1, 4, 1, 5), source=(2, 7) if len(model.stacks) > 1 else None)
    data = Interventions(input=model_input, position=2).run(inspector, QueryJob()).data
    assert len(data["tokens"]) == 5
    assert set(data["zero"]) == set(data["mean"])
    assert len(data["heads"]) >= len(data["zero"])


def test_edits_and_long_texts_are_rejected() -> None:
    inspector = build_inspector(ct.build("tiny-gpt", seed=0))
    query = Interventions(input=ModelInput(tokens=(1, 2), edits={"blocks.0": "skip"}), position=0)
    with pytest.raises(InputError, match="remove the edits"):
        query.run(inspector, QueryJob())
    with pytest.raises(InputError, match="for up to 256; use a shorter text"):
        Interventions(input=ModelInput(tokens=(1,) * 257), position=0).run(inspector, QueryJob())
