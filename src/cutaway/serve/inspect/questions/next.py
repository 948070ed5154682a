"""What comes next after a token: the distribution that generation draws from, exact over the whole vocabulary."""

from typing import Annotated

from pydantic import Field

from cutaway.generate.distribution import probabilities
from cutaway.generate.sampling import Sampler
from cutaway.generate.settings import Settings
from cutaway.measure import equations
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.question import OfText, Place
from cutaway.serve.inspect.questions.stage import final
from cutaway.serve.inspect.wire import Answer

BEST = 5


class Next(OfText):
    """The likeliest tokens as the model says them, and with a temperature, top-k and top-p."""

    at: Place
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    def answer(self, of: Inspector, job: Job) -> Answer:
        name = final(of)
        kept = of.with_values(self.look, [name], job)
        logits = of.logits(kept[name][of.place(self.look, self.at)])
        plain = logits.softmax(-1)
        settings = Settings(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        sampler = Sampler(1, len(logits), logits.device)
        sampler.set(0, settings, (), 0)
        drawn = probabilities(logits[None], sampler.all, sampler.needs(1))[0]
        best = plain.topk(min(BEST, len(plain)))
        shares = zip(best.indices.tolist(), best.values.tolist(), drawn[best.indices].tolist(), strict=True)
        rows = [{"token": t, "text": of.words.of(t), "share": a, "drawn": b} for t, a, b in shares]
        bits = float(equations.entropy(plain)) / equations.UNITS["bits"]
        held = int((drawn > 0).sum())
        return Answer({"top": rows, "entropy": bits, "kept": held, "of": len(plain), "sum": float(plain.sum())})
