"""Query: effect of interventions on a prediction, i.e. attention knockout by token and ablation by component."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.analysis.attention_knockout import knocked_out_logits
from cutaway.lens.analysis.component_effects import AblationMethod, ablated_logits
from cutaway.lens.analysis.inputs import AnalysisInputs
from cutaway.model import EncoderOnly
from cutaway.serve.inspect.inspector import check_position
from cutaway.serve.inspect.model_input import TokenId
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, QueryJob, QueryResult, TokenIndex

MAX_INPUT_TOKENS = 256
"""Longer texts would need a forward pass of the whole text for each of many tokens."""
MIN_MEAN_TOKENS = 4
"""Minimum number of tokens for mean ablation, which replaces an output by its mean over the tokens of the text."""
MAX_HEADS_FLOPS = 2e11
"""The heads are ablated one by one only if this takes at most this number of FLOPs, unless the query asks for it."""

Effect = dict[str, object]


class Interventions(InputQuery):
    """Probability of a token, and the top-1 token, after each intervention.

    `tokens`: without the attention from the position to one token, in all blocks; `source_tokens`: to one token of the
    source of an encoder-decoder. `occurrences` and `source_occurrences`: to all other tokens with the same text as the
    measured one, jointly. `zero` and `mean`: without one attention or FFN sublayer, by zero ablation and by mean
    ablation. `heads`: without one head, by zero ablation. Partial results are sent after each of these steps.
    """

    position: TokenIndex
    token: TokenId | None = None
    """The token whose probability is measured; by default the predicted one."""
    heads: bool = False
    """Ablate the heads in any case. By default they are ablated if this is fast."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        check_position(self.position, self.input.tokens)
        inspector.check_token(self.token)
        if len(self.input.tokens) > MAX_INPUT_TOKENS:
            raise InputError(
                f"the text has {len(self.input.tokens)} tokens, and interventions are measured for up to"
                f" {MAX_INPUT_TOKENS}; use a shorter text"
            )
        if self.input.edits:
            raise InputError("interventions are measured on the unedited model; remove the edits")
        if inspector.head is None:
            raise InputError("this model has no LM head, so it predicts no token; inspect its activations instead")
        tokens, source = inspector.to_tensors(self.input)
        tokenizer, decode = inspector.tokenizer.tokenizer, inspector.tokenizer.decode_token
        inputs = AnalysisInputs(inspector.model, tokenizer, tokens, source)
        with inspector.edited_model(self.input):
            clean = inputs.logits_at(self.position)[0]
        predicted = int(clean.argmax())
        answer = predicted if self.token is None else self.token

        def is_answer(token: int) -> bool:
            """Whether a token is the answer, up to spaces around it and case, such as "Max" for " Max"."""
            text = decode(token).strip().casefold()
            return token == answer or (text != "" and text == decode(answer).strip().casefold())

        data: dict[str, object] = {
            "token": answer,
            "predicted": predicted,
            "text": decode(answer),
            "probability": float(clean.softmax(-1)[answer]),
            "is_special": tokenizer is not None and answer in tokenizer.all_special_ids,
            "is_own_token": is_answer(self.input.tokens[self.position]),
        }

        def effects(logits: Tensor) -> list[Effect]:
            probabilities, tops = logits.softmax(-1)[:, answer].tolist(), logits.argmax(-1).tolist()
            return [
                {"probability": probability, "top": top, "top_text": decode(top)}
                for probability, top in zip(probabilities, tops, strict=True)
            ]

        def by_component(ablation: AblationMethod, *, by_head: bool = False) -> dict[str, Effect]:
            logits: Mapping[str, Tensor] = ablated_logits(inputs, self.position, ablation, by_head=by_head)
            return dict(zip(logits, effects(torch.stack([*logits.values()])), strict=True))

        def by_token(tokens: Sequence[int], end: int, *, to_source: bool) -> tuple[list[Effect], Effect]:
            """Effects of each token, and the joint effect of the occurrences of the answer before position `end`."""
            own = None if to_source else self.position
            found = [key for key, token in enumerate(tokens[:end]) if key != own and is_answer(token)]
            key_sets = [[key] for key in range(len(tokens))] + ([found] if found else [])
            by_set = effects(
                knocked_out_logits(inputs, self.position, to_source=to_source, progress=False, key_sets=key_sets)
            )
            return by_set[: len(tokens)], {"positions": found, "effect": by_set[-1] if found else None}

        job.report_progress(0, 4, "attention knockout")
        with inspector.edited_model(self.input):
            end = len(self.input.tokens) if isinstance(inspector.model, EncoderOnly) else self.position
            data["tokens"], data["occurrences"] = by_token(self.input.tokens, end, to_source=False)
            if self.input.source is not None:
                data["source_tokens"], data["source_occurrences"] = by_token(
                    self.input.source, len(self.input.source), to_source=True
                )
        job.send_partial(QueryResult(data))
        job.report_progress(1, 4, "zero ablation")
        with inspector.edited_model(self.input):
            data["zero"] = by_component("zero")
        job.send_partial(QueryResult(data))
        job.report_progress(2, 4, "mean ablation")
        if len(self.input.tokens) >= MIN_MEAN_TOKENS:
            with inspector.edited_model(self.input):
                data["mean"] = by_component("mean")
        if self.heads or self._heads_flops(inspector) <= MAX_HEADS_FLOPS:
            job.send_partial(QueryResult(data))
            job.report_progress(3, 4, "ablation of heads")
            with inspector.edited_model(self.input):
                data["heads"] = by_component("zero", by_head=True)
        return QueryResult(data)

    def _heads_flops(self, inspector: Inspector) -> float:
        """FLOPs of one forward pass for each head, by the rule 2·parameters·tokens."""
        num_heads = sum(site.num_heads or 0 for name, site in inspector.sites.items() if name.endswith(".z"))
        num_parameters = sum(parameter.numel() for parameter in inspector.model.parameters())
        return 2.0 * num_parameters * len(self.input.tokens) * num_heads
