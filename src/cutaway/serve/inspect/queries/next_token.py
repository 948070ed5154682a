"""Query: next-token distribution at a position, computed over the whole vocabulary."""

from typing import Annotated

from pydantic import Field

from cutaway.evaluate import functional
from cutaway.generate.sampling.logits_processing import logits_to_probs
from cutaway.generate.sampling.sampler import Sampler
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.model import EncoderOnly
from cutaway.serve.inspect.inspector import check_position
from cutaway.serve.inspect.queries.activation import final_norm_site
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, QueryJob, QueryResult, TokenIndex
from cutaway.serve.inspect.recording_sampler import SamplingStep


class NextToken(InputQuery):
    """Top next tokens with their probabilities, before and after temperature, top-k and top-p.

    At the last position, `continuation` is the text that appends the token, or None if there is none.
    """

    position: TokenIndex
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        name = final_norm_site(inspector)
        activations = inspector.get_activations_at(self.input, [name], job)
        logits = inspector.logits(activations[name][check_position(self.position, self.input.tokens)])
        params = SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        sampler = Sampler(1, len(logits), logits.device)
        sampler.set_row(0, params, (), 0)
        sampling_probs = logits_to_probs(logits[None], sampler.sampling_state, sampler.features(1))[0]
        step, probabilities = SamplingStep(logits, sampling_probs, {}), logits.softmax(-1)
        bits = float(functional.entropy(probabilities)) / functional.NATS_PER_UNIT["bits"]
        top_tokens = step.top_tokens(inspector.tokenizer)
        if self.position == len(self.input.tokens) - 1 and not isinstance(inspector.model, EncoderOnly):
            for row in top_tokens:
                row["continuation"] = inspector.tokenizer.continuation_text(self.input.tokens, row["token"])
        data = {"top_tokens": top_tokens, "entropy": bits}
        data |= {"num_candidates": int((sampling_probs > 0).sum()), "vocab_size": len(probabilities)}
        data["probability_sum"] = float(probabilities.sum())
        return QueryResult(data)
