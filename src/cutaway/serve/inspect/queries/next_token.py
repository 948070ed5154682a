"""What comes next after a token: the distribution that generation draws from, exact over the whole vocabulary."""

from typing import Annotated

from pydantic import Field

from cutaway.evaluate import functional
from cutaway.generate.sampling.logits_processing import logits_to_probs
from cutaway.generate.sampling.sampler import Sampler
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.activation import final_norm_site
from cutaway.serve.inspect.queries.base import InputQuery, TokenIndex

NUM_TOP_TOKENS = 5


class NextToken(InputQuery):
    """The likeliest tokens as the model says them, and with a temperature, top-k and top-p."""

    position: TokenIndex
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        name = final_norm_site(inspector)
        kept = inspector.get_activations_at(self.input, [name], job)
        logits = inspector.logits(kept[name][inspector.check_position(self.input, self.position)])
        plain = logits.softmax(-1)
        settings = SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        sampler = Sampler(1, len(logits), logits.device)
        sampler.set_row(0, settings, (), 0)
        drawn = logits_to_probs(logits[None], sampler.sampling_state, sampler.features(1))[0]
        best = plain.topk(min(NUM_TOP_TOKENS, len(plain)))
        shares = zip(best.indices.tolist(), best.values.tolist(), drawn[best.indices].tolist(), strict=True)
        rows = [
            {"token": t, "text": inspector.tokenizer.decode_token(t), "probability": a, "sampling_probability": b}
            for t, a, b in shares
        ]
        bits = float(functional.entropy(plain)) / functional.NATS_PER_UNIT["bits"]
        held = int((drawn > 0).sum())
        return QueryResult(
            {
                "top_tokens": rows,
                "entropy": bits,
                "num_candidates": held,
                "vocab_size": len(plain),
                "probability_sum": float(plain.sum()),
            }
        )
