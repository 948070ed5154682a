"""Route /classify, in the form of vLLM: the most likely label of each text, and the probability of each label."""

import threading
import time
import uuid
from contextlib import nullcontext
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from cutaway.config.head import SequenceClassificationHead
from cutaway.generate.classify import label_probabilities
from cutaway.generate.text_batches import run_on_texts
from cutaway.serve.errors import APIError
from cutaway.serve.openai import protocol, request_mapping
from cutaway.serve.openai.served_models import ServedModels
from cutaway.serve.openai.serving_engine import ServingEngine, check_encoded_texts
from cutaway.serve.openai.sse import with_cancellation
from cutaway.tokenizer.text_encoder import EncodedText


class DisconnectedError(Exception):
    """The client is gone, so the computation stops."""


def add_classify_route(router: APIRouter, models: ServedModels) -> None:
    """Add the route /classify."""

    @router.post("/classify")
    async def classify(request: protocol.ClassificationRequest, raw_request: Request) -> Response:
        """Classify texts with the classification head of the model."""
        serving = models.find(request.model)
        request.check_unsupported_fields()
        head = require_classification_head(serving)
        prompts = request_mapping.as_prompt_list(request.input, "input", serving.limits.max_embedding_inputs)
        encode_prompts = request_mapping.build_prompt_encoder(prompts, serving, "input")
        disconnected = threading.Event()
        adapter = serving.adapter_of(request.model)

        def compute() -> tuple[list[Tensor], int]:
            rows = encode_prompts()
            total = check_encoded_texts(serving, rows)
            texts = [EncodedText(row, [0] * len(row), [], False) for row in rows]

            def check_connection(done: int, count: int) -> None:
                if disconnected.is_set():
                    raise DisconnectedError

            pad_id = 0 if serving.tokenizer is None else serving.tokenizer.pad_token_id or 0
            try:
                with serving.model.use_adapters([adapter]) if serving.model.adapters else nullcontext():
                    return run_on_texts(serving.model, serving.model, texts, pad_id, progress=check_connection), total
            except DisconnectedError:
                return [], total

        work = serving.run_in_pool(compute, use_embedding_pool=True)
        try:
            logits, total = await with_cancellation(raw_request, work, serving.limits)
        finally:
            disconnected.set()
        serving.record_prompt_tokens(total)
        return JSONResponse(
            {
                "id": f"classify-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": request.model or serving.served_model_name,
                "data": [_to_item(index, row, head) for index, row in enumerate(logits)],
                "usage": {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0},
            }
        )


def require_classification_head(serving: ServingEngine) -> SequenceClassificationHead:
    """The classification head of the served model. Raises APIError if it has none."""
    head = serving.model.config.head
    if isinstance(head, SequenceClassificationHead):
        return head
    instead = {
        "lm": "use /v1/completions" if serving.engine is not None else "use /v1/embeddings",
        "embedding": "use /v1/embeddings",
        "none": "use /v1/embeddings",
    }.get(head.kind, "use ct.classify in Python")
    raise APIError(
        400,
        f"/classify needs a model with a sequence classification head, but this one has a head of kind '{head.kind}';"
        f" {instead}, or serve a classifier, such as a run of `cutaway train classify`",
        code="no_classification_head",
    )


def _to_item(index: int, logits: Tensor, head: SequenceClassificationHead) -> dict[str, Any]:
    probabilities = label_probabilities(logits, head.problem_type).tolist()
    label = None if head.problem_type == "regression" else head.label_names[int(logits.argmax())]
    return {"index": index, "label": label, "probs": probabilities, "num_classes": head.num_labels}
