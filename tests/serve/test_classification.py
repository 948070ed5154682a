"""Route /classify and embeddings of models with a task head, over HTTP."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.server import RunningServer, byte_checkpoint, start_server

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.replace_head import replace_head
from cutaway.generate.classify import Classification

pytestmark = pytest.mark.unchecked
TEXTS = ["a text", "b", "another text, longer than the others"]


def with_head(preset: str, kind: str, **options: Any) -> Checkpoint:
    return replace_head(byte_checkpoint(preset), kind, seed=0, **options)


@pytest.fixture(scope="module")
def classifier() -> Iterator[RunningServer]:
    with start_server(with_head("tiny-bert", "sequence-classification", labels=("ham", "spam"))) as running:
        yield running


def post(server: RunningServer, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    status, _, content = server.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return status, json.loads(content)


def test_classify_has_the_form_of_vllm(classifier: RunningServer) -> None:
    status, response = post(classifier, "/classify", {"model": "tiny", "input": TEXTS})
    assert status == 200
    assert response["object"] == "list"
    assert response["model"] == "tiny"
    assert response["id"].startswith("classify-")
    expected = ct.classify(classifier.checkpoint, TEXTS)
    for index, (item, result) in enumerate(zip(response["data"], expected, strict=True)):
        assert isinstance(result, Classification)
        assert item["index"] == index
        assert item["label"] == result.label
        assert item["probs"] == pytest.approx(list(result.probabilities.values()), abs=1e-6)
        assert item["num_classes"] == 2
    count = sum(map(len, TEXTS))
    assert response["usage"] == {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
    assert post(classifier, "/classify", {"input": TEXTS[1]})[1]["data"][0]["probs"] == pytest.approx(
        response["data"][1]["probs"], abs=1e-5
    )


@pytest.mark.parametrize(("problem_type", "label"), [("multi_label_classification", "spam"), ("regression", None)])
def test_probabilities_by_problem_type(problem_type: str, label: str | None) -> None:
    num_labels = 1 if problem_type == "regression" else 2
    checkpoint = with_head("tiny-bert", "sequence-classification", num_labels=num_labels, problem_type=problem_type)
    with start_server(checkpoint) as server:
        [item] = post(server, "/classify", {"input": "b"})[1]["data"]
    logits = checkpoint.model(torch.tensor([list(b"b")]))[0]
    expected = logits if problem_type == "regression" else logits.sigmoid()
    assert item["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert (item["label"] is None) == (label is None)


@pytest.mark.parametrize(
    ("body", "message"),
    [({"input": []}, "pass at least one"), ({"input": ""}, "empty"), ({"input": "x" * 5000}, "maximum is")],
)
def test_invalid_requests(classifier: RunningServer, body: dict[str, Any], message: str) -> None:
    status, response = post(classifier, "/classify", body)
    assert status == 400
    assert message in response["error"]["message"]


def test_classifier_does_not_generate(classifier: RunningServer) -> None:
    status, response = post(classifier, "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1})
    assert status == 400
    assert "use /classify" in response["error"]["message"]


@pytest.mark.parametrize(
    ("checkpoint", "instead"),
    [
        (lambda: byte_checkpoint("tiny-llama"), "/v1/completions"),
        (lambda: with_head("tiny-bert", "embedding"), "/v1/embeddings"),
        (lambda: with_head("tiny-bert", "token-classification"), "ct.classify"),
    ],
)
def test_models_without_a_classification_head_say_what_to_use(checkpoint: Any, instead: str) -> None:
    with start_server(checkpoint()) as server:
        status, response = post(server, "/classify", {"input": "a"})
    assert status == 400
    assert response["error"]["code"] == "no_classification_head"
    assert instead in response["error"]["message"]
    assert "cutaway train classify" in response["error"]["message"]


def test_a_decoder_with_a_classification_head_is_served() -> None:
    with start_server(with_head("tiny-llama", "sequence-classification", labels=("a", "b"))) as server:
        response = post(server, "/classify", {"input": TEXTS})[1]
        for item, result in zip(response["data"], ct.classify(server.checkpoint, TEXTS), strict=True):
            assert isinstance(result, Classification)
            assert item["probs"] == pytest.approx(list(result.probabilities.values()), abs=1e-5)


def test_adapters_are_selected_by_the_name_of_the_model() -> None:
    checkpoint = with_head("tiny-bert", "sequence-classification", labels=("a", "b"))
    checkpoint.model.add_adapter({"rank": 4}, "sql", seed=0)
    for name, parameter in checkpoint.model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    checkpoint.model.set_adapter(None).requires_grad_(False)
    with start_server(checkpoint, adapters=("sql",)) as server:
        responses = {name: post(server, "/classify", {"model": name, "input": TEXTS})[1] for name in ("tiny", "sql")}
    for name, adapter in (("tiny", None), ("sql", "sql")):
        assert responses[name]["model"] == name
        with checkpoint.model.use_adapter(adapter):
            expected = ct.classify(checkpoint, TEXTS)
        for item, result in zip(responses[name]["data"], expected, strict=True):
            assert isinstance(result, Classification)
            assert item["probs"] == pytest.approx(list(result.probabilities.values()), abs=1e-5)
    assert responses["tiny"]["data"][0]["probs"] != pytest.approx(responses["sql"]["data"][0]["probs"], abs=1e-3)


@pytest.mark.parametrize("normalize", [True, False])
def test_embeddings_are_the_output_of_the_head(normalize: bool) -> None:
    checkpoint = with_head(
        "tiny-bert", "embedding", pooling="max", normalize=normalize, projection={"dim": 12, "activation": "tanh"}
    )
    with start_server(checkpoint) as server:
        response = post(server, "/v1/embeddings", {"model": "tiny", "input": TEXTS})[1]
    vectors = torch.tensor([item["embedding"] for item in response["data"]])
    torch.testing.assert_close(vectors, ct.embed(checkpoint, TEXTS), atol=1e-5, rtol=0)
    assert vectors.shape == (3, 12)
    assert bool(((vectors.norm(dim=-1) - 1).abs() < 1e-5).all()) == normalize
