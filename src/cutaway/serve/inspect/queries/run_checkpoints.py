"""Queries: the saved models of a run, and the attention patterns, predictions and loss of one of them on a text."""

from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from cutaway.errors import CutawayError, InputError
from cutaway.serve.inspect.inspector import check_position
from cutaway.serve.inspect.model_catalog import CHECKPOINT_PREFIX
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.queries.activation import final_norm_site
from cutaway.serve.inspect.queries.attention import AttentionLayers, AttentionThumbnails, HeadTypes
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, Query, QueryJob, QueryResult, TokenIndex
from cutaway.serve.inspect.queries.next_token import NextToken
from cutaway.serve.inspect.queries.run_metrics import require_run

MAX_CHECKPOINT_TOKENS = 256
"""Maximum number of tokens of a text that is compared over checkpoints. It limits the time per checkpoint."""
NUM_TOP_TOKENS = 5


class RunCheckpoints(Query):
    """Snapshots, checkpoints and the exported model of a run by step, and the step of the next one."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        run = require_run(inspector)
        saved_models = run.list_saved_models()
        with run.lock:
            step = max((row["step"] for row in run.metrics.read()), default=0)
        num_parameters = sum(parameter.numel() for parameter in inspector.model.parameters())
        checkpoints = [
            {
                "id": saved.id,
                "model_id": f"{CHECKPOINT_PREFIX}{saved.id}",
                "kind": saved.kind,
                "step": saved.step,
                "num_bytes": saved.num_bytes,
            }
            for saved in saved_models
        ]
        data = {
            "checkpoints": checkpoints,
            "open_step": inspector.run_step,
            "next_step": run.find_next_save(step, num_parameters) if step < run.max_steps else None,
            "can_open": inspector.catalog is not None,
        }
        return QueryResult(data)


class CheckpointActivations(InputQuery):
    """Attention thumbnails, head scores, top next tokens and loss of a saved model of the run, without edits."""

    id: Annotated[str, Field(max_length=200)]
    position: TokenIndex

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        run, model_input = require_run(inspector), self.input.without_edits
        if len(model_input.tokens) > MAX_CHECKPOINT_TOKENS:
            limit = f"a text compared over checkpoints is limited to {MAX_CHECKPOINT_TOKENS}"
            raise InputError(f"the text has {len(model_input.tokens):,} tokens; {limit}, so shorten it")
        inspector.validate_input(model_input)
        check_position(self.position, model_input.tokens)
        saved = run.find_saved_model(self.id)
        key = (saved.path, saved.modified_time, model_input.cache_key, self.position)
        result = run.get_result(key)
        if result is None:
            with run.load_model(self.id, inspector.model.device) as (checkpoint, _):
                job.check_cancelled()
                other = Inspector(checkpoint.model, inspector.tokenizer, name=inspector.name)
                result = summarize_model(other, model_input, self.position, job)
            run.cache_result(key, result)
        return QueryResult({**result.data, "id": self.id, "step": saved.step}, result.tensors)


def summarize_model(inspector: Inspector, model_input: ModelInput, position: int, job: QueryJob) -> QueryResult:
    """Return thumbnails of all heads, head scores, and, if the model has a head, top tokens and loss."""
    layers = AttentionLayers().run(inspector, job).data["layers"]
    assert isinstance(layers, list)
    data: dict[str, object] = {"layers": layers, "head_types": [], "score_note": "", "top_tokens": [], "loss": None}
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        name = layer["name"]
        result = AttentionThumbnails(input=model_input, attention=name).run(inspector, job)
        tensors |= {f"{name}.{part}": result.tensors[part] for part in ("thumbnails", "visible")}
    try:
        scores = HeadTypes().run(inspector, job)
        data |= {name: scores.data[name] for name in ("head_types", "attention_names")}
        data["score_note"] = scores.data["note"]
        tensors["scores"] = scores.tensors["scores"]
    except CutawayError as error:  # such as an encoder-decoder
        data["score_note"] = str(error)
    if inspector.head is not None:
        top_tokens = NextToken(input=model_input, position=position).run(inspector, job).data["top_tokens"]
        assert isinstance(top_tokens, list)
        data |= {"top_tokens": top_tokens[:NUM_TOP_TOKENS], "loss": compute_loss(inspector, model_input, job)}
    return QueryResult(data, tensors)


def compute_loss(inspector: Inspector, model_input: ModelInput, job: QueryJob) -> float | None:
    """Mean cross-entropy of the next tokens of the text in nats. None for an encoder and for a text of one token."""
    if not inspector.output_stack.causal or len(model_input.tokens) < 2:
        return None
    name = final_norm_site(inspector)
    hidden = inspector.get_activations_at(model_input, [name], job)[name]
    targets = inspector.to_tensors(model_input)[0][0, 1:]
    return float(F.cross_entropy(inspector.logits(hidden[:-1]), targets))
