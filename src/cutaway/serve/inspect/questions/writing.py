"""A text that is written on token by token, with all that each choice was made from; and masks that are filled."""

import time
from typing import Annotated, Any

from pydantic import Field

from cutaway.errors import InputError
from cutaway.generate.engine import Engine
from cutaway.generate.fill_mask import fill_mask
from cutaway.generate.settings import Settings
from cutaway.generate.start import Start
from cutaway.generate.texts import drawing, make_plan, make_settings, own_limits
from cutaway.model import EncoderOnly
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.listener import Choice, Listener, compared
from cutaway.serve.inspect.look import MOST_TOKENS
from cutaway.serve.inspect.question import OfText, Place, Question
from cutaway.serve.inspect.questions.about import MOST_LETTERS
from cutaway.serve.inspect.wire import Answer

MOST_NEW, AT_ONCE = 512, 64
CHUNK = 16, 512
"""Tokens of a prompt that are read at once: few where windows are small, so that their rings are small too."""


class Write(OfText):
    """Go on with a text, exactly as `generate` does; each token is a part of the answer as it comes.

    The look's tokens are the prompt and what has been written already: of an encoder-decoder, behind its first token.
    At the end the same positions are read once more, all at once, and the two are compared.
    """

    prompt: Annotated[int, Field(strict=True, ge=1, le=MOST_TOKENS)]
    """How many of the look's tokens were given, not written."""
    count: Annotated[int, Field(strict=True, ge=1, le=AT_ONCE)] = 1
    """Tokens to write now."""
    most: Annotated[int, Field(strict=True, ge=1, le=MOST_NEW)] = 64
    """Tokens of the whole answer: what the cache has room for."""
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(strict=True, ge=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**53)] = 0

    def answer(self, of: Inspector, job: Job) -> Answer:
        of.refuse(self.look)
        if self.prompt > len(self.look.tokens):
            raise InputError(f"prompt is {self.prompt}, and there are {len(self.look.tokens)} tokens")
        if isinstance(of.model, EncoderOnly):
            raise InputError("this model is an encoder: it reads a text and does not write on; it can fill masks")
        work = Writing(of, self)
        with of.changed(self.look):  # one pass after another for as long as it writes: its cache is of this model
            for choice in work.choices(job):
                job.part(Answer({"choice": choice}))
            return work.end(job)


class Writing:
    """An engine at work on one text, and what was heard of it."""

    def __init__(self, of: Inspector, asked: Write) -> None:
        self.of, self.asked = of, asked
        self.two = asked.look.source is not None
        self.begin: Start = of.words.begin or Start(decoder_start=of.words.start)
        tokens = list(asked.look.tokens)
        self.begun = tokens[asked.prompt :]
        self.prompt = list(asked.look.source or ()) if self.two else tokens[: asked.prompt]
        if self.two and not self.begun and self.begin.forced_bos is not None:
            self.begun = [self.begin.forced_bos]
        self.settings = self.make_settings()
        self.plan = self.make_plan()
        self.engine = Engine(self.plan, tokenizer=of.words.tokenizer)
        self.listener = Listener(self.engine.runner, of.config.vocab_size)
        self.engine.runner.sampler = self.listener
        self.ticket = self.engine.submit(self.prompt, self.settings, seed=asked.seed, begun=self.begun)
        self.ticket.arrived()  # what was begun with is known
        self.heard: list[Choice] = []

    def make_settings(self) -> Settings:
        asked = self.asked
        given = {"temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p, "seed": asked.seed}
        made = make_settings(drawing({**given, "max_new_tokens": asked.most}))
        made.check(self.of.config.vocab_size)
        return own_limits(made, self.begin, 1 if self.two else len(self.prompt))

    def make_plan(self) -> Any:
        model, asked = self.of.model, self.asked
        windows = [window for window in model.stacks["decoder"].windows if window is not None]
        chunk = min(max(min(windows, default=CHUNK[1]), CHUNK[0]), CHUNK[1])
        if self.two and asked.prompt != 1:
            raise InputError("an encoder-decoder's answer is begun with one token of its own; prompt must be 1")
        length = 1 if self.two else len(self.prompt)
        how: dict[str, Any] = {"rows": 1, "chunk": chunk, "compiled": False, "source": max(1, len(self.prompt))}
        return make_plan(model, self.begin, needed=length + asked.most, **how)

    def choices(self, job: Job) -> Any:
        """Each choice as it is made, as the page is told of it."""
        began = time.perf_counter()
        while not self.ticket.done.is_set() and len(self.heard) < self.asked.count:
            job.check()
            self.engine.turn()
            for piece in self.ticket.arrived():
                for token in piece.tokens:
                    choice = self.listener.heard.popleft()
                    self.heard.append(choice)
                    now = time.perf_counter()
                    yield self.told(choice, token, piece.text, 1000 * (now - began))
                    began = now
        if self.ticket.error is not None:
            raise self.ticket.error

    def told(self, choice: Choice, token: int, text: str, ms: float) -> dict[str, Any]:
        return {
            "token": token,
            "word": self.of.words.of(token),
            "text": text,
            **choice.of(token),
            "top": [{**each, "text": self.of.words.of(each["token"])} for each in choice.top],
            "ms": ms,
            "cache": choice.cache,
            "end": self.ticket.answer.reason if self.ticket.done.is_set() else None,
        }

    def end(self, job: Job) -> Answer:
        """Why it stopped, if it did; the cache; and the proof that one at a time is all at once."""
        answer = self.ticket.answer
        self.engine.runner.let_go()
        reason = answer.reason if self.ticket.done.is_set() else None
        facts: dict[str, Any] = {"reason": reason, "slots": self.plan.slots, "kind": self.plan.kind}
        if not self.heard:
            return Answer({**facts, "check": None})
        job.check()
        tokens = self.asked.look.tokens[: self.asked.prompt] + tuple(answer.tokens[:-1])
        found, arrays = compared(self.of, self.asked.look.model_copy(update={"tokens": tokens}), self.heard)
        return Answer({**facts, "check": found}, arrays)


class Fill(Question):
    """What an encoder would put in the place of each mask; without one, how a mask is written."""

    text: Annotated[str, Field(max_length=MOST_LETTERS)]
    top: Place = 5

    def answer(self, of: Inspector, job: Job) -> Answer:
        tokenizer, model = of.words.tokenizer, of.model
        if not isinstance(model, EncoderOnly):
            raise InputError("this model writes on from a text, and fills no masks")
        mask = None if tokenizer is None or tokenizer.mask_id is None else tokenizer.named["mask_token"]
        able = mask is not None and model.head is not None
        if not able or tokenizer.mask_id not in tokenizer.encode(self.text):
            return Answer({"mask": mask, "able": able, "masks": []})
        with of.alone:
            found = fill_mask(model, tokenizer, [self.text], top=min(max(1, self.top), of.config.vocab_size))
        masks = [
            [{"token": each.id, "text": each.token, "share": each.probability} for each in one] for one in found[0]
        ]
        return Answer({"mask": mask, "able": True, "masks": masks})
