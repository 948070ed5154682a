"""Routes /v1/score and /v1/rerank (the forms of vLLM, Jina and Cohere): how well pairs of texts fit together.

A cross-encoder, which is a classifier with one label, reads both texts at once. Other models embed each text, and the
score is the cosine similarity of the embeddings.
"""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Annotated, Literal

import torch
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from cutaway.config.head import EmbeddingHead, NoHead, SequenceClassificationHead
from cutaway.generate.embed import default_prompt, named_prompt
from cutaway.generate.text_batches import max_text_len, run_on_texts
from cutaway.serve.errors import APIError
from cutaway.serve.limits import Limits
from cutaway.serve.openai import request_mapping
from cutaway.serve.openai.classification import DisconnectedError
from cutaway.serve.openai.embeddings import compute_embeddings
from cutaway.serve.openai.protocol import OpenAIBaseModel
from cutaway.serve.openai.served_models import ServedModels
from cutaway.serve.openai.serving_engine import ServingEngine, check_encoded_texts, context_length_error
from cutaway.serve.openai.sse import with_cancellation
from cutaway.tokenizer.text_encoder import TextEncoder

Pair = tuple[str, str]
Scores = tuple[list[float], int]
"""Score of each pair, and the number of tokens."""
Texts = Annotated[list[str], Field(min_length=1, max_length=Limits.max_embedding_inputs, fail_fast=True)]


class TextDocument(BaseModel):
    """A document as an object, as in the API of Jina."""

    model_config = ConfigDict(strict=True)
    text: str


class ScoreRequest(OpenAIBaseModel):
    """Body of /v1/score. One text is paired with each text of the other list; lists of equal length, in order."""

    text_1: str | Texts
    text_2: str | Texts
    truncate_prompt_tokens: Literal[-1] | None = None
    """-1: the ends of texts that are longer than the context are left out. Otherwise they are an error."""


class RerankRequest(OpenAIBaseModel):
    """Body of /v1/rerank."""

    query: str
    documents: Annotated[
        list[str | TextDocument], Field(min_length=1, max_length=Limits.max_embedding_inputs, fail_fast=True)
    ]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Number of results; 0 and null: all."""
    return_documents: bool | None = None
    truncate_prompt_tokens: Literal[-1] | None = None


def add_scoring_routes(router: APIRouter, models: ServedModels) -> None:
    """Add the routes /v1/score and /v1/rerank, also under the other paths that vLLM has."""
    encoders: dict[ServingEngine, TextEncoder] = {}

    def encoder_of(serving: ServingEngine) -> TextEncoder:
        if serving not in encoders:  # building one takes long with a large vocabulary
            tokenizer = serving.get_tokenizer()
            max_len = min(serving.max_model_len, max_text_len(serving.model.config, tokenizer))
            encoders[serving] = TextEncoder(tokenizer, max_len)
        return encoders[serving]

    @router.post("/score", include_in_schema=False)
    @router.post("/v1/score")
    async def score(request: ScoreRequest, raw_request: Request) -> Response:
        """Score pairs of texts: with a cross-encoder, or as the cosine similarity of their embeddings."""
        serving = models.find(request.model)
        request.check_unsupported_fields()
        firsts, seconds = _as_list(request.text_1), _as_list(request.text_2)
        if 1 not in (len(firsts), len(seconds)) and len(firsts) != len(seconds):
            message = f"text_1 has {len(firsts)} texts and text_2 has {len(seconds)}; send one, or equally many"
            raise APIError(400, message, param="text_2")
        count = max(len(firsts), len(seconds))
        firsts, seconds = (texts * count if len(texts) == 1 else texts for texts in (firsts, seconds))
        prompts = (default_prompt(serving.sentence_transformers_config),) * 2
        pairs = list(zip(firsts, seconds, strict=True))
        scores, total = await compute(serving, raw_request, request, pairs, prompts)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        return JSONResponse(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": request.model or serving.served_model_name,
                "data": data,
                "usage": {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0},
            }
        )

    @router.post("/rerank", include_in_schema=False)
    @router.post("/v1/rerank")
    @router.post("/v2/rerank", include_in_schema=False)
    async def rerank(request: RerankRequest, raw_request: Request) -> Response:
        """Sort documents by their relevance to a query, the most relevant one first."""
        serving = models.find(request.model)
        request.check_unsupported_fields()
        documents = [document if isinstance(document, str) else document.text for document in request.documents]
        settings = serving.sentence_transformers_config
        prompts = named_prompt(settings, "query"), named_prompt(settings, "document")
        pairs = [(request.query, document) for document in documents]
        scores, total = await compute(serving, raw_request, request, pairs, prompts)
        order = sorted(range(len(documents)), key=lambda index: -scores[index])[: request.top_n or None]
        with_documents = request.return_documents is not False
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": documents[index]}} if with_documents else {})
            for index in order
        ]
        return JSONResponse(
            {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": request.model or serving.served_model_name,
                "usage": {"prompt_tokens": total, "total_tokens": total},
                "results": results,
            }
        )

    async def compute(
        serving: ServingEngine,
        raw_request: Request,
        request: ScoreRequest | RerankRequest,
        pairs: Sequence[Pair],
        prompts: tuple[str, str],
    ) -> Scores:
        """Scores of pairs and number of tokens. `prompts` precede the first and second texts of a bi-encoder."""
        score_pairs = _select_scorer(serving)
        request_mapping.check_limit("pairs", len(pairs), serving.limits.max_embedding_inputs)
        serving.check_text_length([text for pair in pairs for text in pair], "text")
        disconnected = threading.Event()
        adapter = serving.adapter_of(request.model)

        def work() -> Scores:
            with serving.model.use_adapters([adapter]) if serving.model.adapters else nullcontext():
                may_truncate = request.truncate_prompt_tokens is not None
                return score_pairs(serving, encoder_of(serving), pairs, prompts, disconnected, may_truncate)

        future = serving.run_in_pool(work, use_embedding_pool=True)
        try:
            scores, total = await with_cancellation(raw_request, future, serving.limits)
        finally:
            disconnected.set()
        serving.record_prompt_tokens(total)
        return scores, total


Scorer = Callable[[ServingEngine, TextEncoder, Sequence[Pair], tuple[str, str], threading.Event, bool], Scores]


def _select_scorer(serving: ServingEngine) -> Scorer:
    """The function that scores pairs with this model. Raise if there is none."""
    head = serving.model.config.head
    if isinstance(head, SequenceClassificationHead) and head.num_labels == 1:
        _activation(serving)
        return _score_with_cross_encoder
    if isinstance(head, EmbeddingHead | NoHead) or (serving.engine is None and head.kind == "lm"):
        return _score_with_embeddings
    if isinstance(head, SequenceClassificationHead):
        problem = f"this classifier has {head.num_labels} labels, but the score of a pair needs one; use /classify"
    elif serving.engine is not None:
        problem = "this model generates text; use /v1/completions"
    else:
        problem = f"this model has a head of kind '{head.kind}'; use it in Python"
    message = f"{problem}, or serve a cross-encoder or an embedding model"
    raise APIError(400, message, code="no_score")


def _activation(serving: ServingEngine) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function from the logit of a cross-encoder to its score: as in sentence-transformers, by default the sigmoid."""
    settings = serving.hf_config.get("sentence_transformers")
    name = settings.get("activation_fn") if isinstance(settings, dict) else None
    name = str(name or serving.hf_config.get("sbert_ce_default_activation_function") or "Sigmoid")
    known = {"Identity": lambda x: x, "Sigmoid": torch.sigmoid}
    kind = name.rpartition(".")[2]
    if kind not in known:
        problem = f"config.json of this model has the activation function '{name[:60]}'"
        raise APIError(400, f"{problem}; only Sigmoid and Identity are supported, change it there", code="no_score")
    return known[kind]


def _score_with_cross_encoder(
    serving: ServingEngine,
    encoder: TextEncoder,
    pairs: Sequence[Pair],
    prompts: tuple[str, str],
    disconnected: threading.Event,
    may_truncate: bool,
) -> Scores:
    """Scores of a classifier with one label, whose input is a pair. It has no prompts."""
    encoded = [encoder.encode(first, second) for first, second in pairs]
    if not may_truncate and any(text.is_truncated for text in encoded):
        raise context_length_error("a pair of texts is longer", encoder.max_len)
    total = check_encoded_texts(serving, [text.ids for text in encoded])

    def check_connection(done: int, count: int) -> None:
        if disconnected.is_set():
            raise DisconnectedError

    pad_id = serving.get_tokenizer().pad_token_id or 0
    try:
        logits = run_on_texts(serving.model, serving.model, encoded, pad_id, progress=check_connection)
    except DisconnectedError:
        return [], total
    return _activation(serving)(torch.stack(logits)[:, 0]).tolist(), total


def _score_with_embeddings(
    serving: ServingEngine,
    encoder: TextEncoder,
    pairs: Sequence[Pair],
    prompts: tuple[str, str],
    disconnected: threading.Event,
    may_truncate: bool,
) -> Scores:
    """Cosine similarities of the embeddings. A text that is in several pairs is embedded once."""
    texts = list(dict.fromkeys(prompt + text for pair in pairs for prompt, text in zip(prompts, pair, strict=True)))
    encoded = [encoder.encode(text) for text in texts]
    if not may_truncate and any(text.is_truncated for text in encoded):
        raise context_length_error("a text is longer", encoder.max_len)
    rows = [text.ids for text in encoded]
    total = check_encoded_texts(serving, rows)
    vectors = compute_embeddings(serving.model, rows, serving.pooling, lambda: not disconnected.is_set())
    if not vectors:
        return [], total
    unit = torch.nn.functional.normalize(torch.tensor(vectors, dtype=torch.float64), dim=-1)
    position = {text: index for index, text in enumerate(texts)}
    first, second = ([position[prompts[i] + pair[i]] for pair in pairs] for i in range(2))
    return (unit[first] * unit[second]).sum(-1).tolist(), total


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
