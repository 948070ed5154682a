"""EleutherAI's evaluation harness over a checkpoint: its tasks, our model. It comes with `pip install cutaway[eval]`.

    python -m cutaway.measure.lm_eval --model cutaway --model_args pretrained=DIRECTORY --tasks hellaswag

In Python, `lm_eval.simple_evaluate(model=CutawayLM(checkpoint), tasks=[…])`. Texts become tokens as with the harness's
own "hf" model, so that figures can be compared.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import lm_eval.models  # noqa: F401 (the harness puts in its own models only while there are none)
import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from cutaway.errors import InputError
from cutaway.generate.texts import Source, generate, opened
from cutaway.measure.continuation import Asked, tell, windows
from cutaway.measure.surprise import context_of, size_of, tokenizer_of
from cutaway.model import DecoderOnly

UNASKED = 256
"""Tokens of an answer, unless a task says how many."""
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call that number."""


@register_model("cutaway")
class CutawayLM(LM):
    """A decoder and its tokenizer, as the harness asks for them."""

    def __init__(
        self,
        pretrained: str | Source,
        *,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
    ) -> None:
        """`pretrained`: a checkpoint, or what `load` opens. As many rows as fit, unless `batch_size` is a number."""
        super().__init__()
        self.checkpoint = load(pretrained, device, dtype) if isinstance(pretrained, str) else pretrained
        model, tokenizer, _ = opened(self.checkpoint)
        if not isinstance(model, DecoderOnly):
            raise InputError("the harness's tasks continue texts, and this model is no decoder; give one that is")
        self.model, self.tokenizer = model, tokenizer_of(tokenizer)
        self.limit = context_of(model, max_length)
        fitting = batch_size is None or str(batch_size).startswith("auto")
        self.batch = None if fitting else size_of("batch_size", int(batch_size or 0), 1, None, "")
        first = self.tokenizer.bos_id if self.tokenizer.bos_id is not None else self.tokenizer.eos_id
        if first is None:
            raise InputError(
                "a text's first token is told behind a bos or eos, and this tokenizer has none; use another"
            )
        self.first = first
        self._device = model.device

    # What the harness asks for

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context), and whether greedy decoding would say it."""
        return self._tell([self.split(*each.args) for each in requests], disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts behind a first token. A tokenizer's own first token is told too, as with "hf"."""
        every = [list(windows([self.first, *self.encode(each.args[0])], self.limit)) for each in requests]
        found = iter(self._tell([window for text in every for window in text], disable_tqdm))
        return [sum(next(found)[0] for _ in text) for text in every]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model says behind a context, up to the first of some strings."""
        answers: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for number, each in enumerate(requests):
            groups.setdefault(repr(each.args[1]), []).append(number)
        with progress_bar("answers", len(requests), disable_tqdm) as at:
            for numbers in groups.values():
                settings = settings_of(requests[numbers[0]].args[1])
                room = self.limit - settings["max_new_tokens"]
                if room < 1:
                    raise InputError(
                        f"the task asks for {settings['max_new_tokens']} tokens, and the model reads {self.limit}; set"
                        " max_gen_toks lower"
                    )
                prompts = [self.encode(requests[number].args[0])[-room:] for number in numbers]
                made = generate(self.checkpoint, prompts, rows=self.batch, context=self.limit, **settings)
                answers |= {number: answer.text or "" for number, answer in zip(numbers, made, strict=True)}
                at(len(answers), len(requests))
        return [answers[number] for number in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise InputError(
                "this task begins the answer itself, which chat templates have no way to say; leave it out"
            )
        return self.tokenizer.render_chat(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        own = self.tokenizer.chat_template
        name = chat_template if isinstance(chat_template, str) else "default"
        return own.get(name) if isinstance(own, dict) else own

    @property
    def tokenizer_name(self) -> str:
        """Tells one way of making prompts from another, for the harness's cache of them."""
        return f"cutaway-{self.tokenizer.vocab_size}"

    # How

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """With the tokenizer's own special tokens, unless a text (a chat, say) brings its first one itself."""
        if special is None:
            special = not text.startswith(self.tokenizer.decode([self.first], skip_special=False))
        return self.tokenizer.encode(text, special=special)

    def split(self, context: str, continuation: str) -> Asked:
        """Both as they are in one text: a space between them is the continuation's."""
        if not context:
            told = self.encode(continuation, special=False)
            return Asked(told[:1], told[1:]) if told[:1] == [self.first] else Asked([self.first], told)
        bare = context.rstrip()
        before = self.encode(bare)
        return Asked(before, self.encode(context + continuation)[len(before) :])

    def _tell(self, asked: list[Asked], quiet: bool) -> list[tuple[float, bool]]:
        for each in asked:
            if not each.told or len(each.told) > self.limit:
                raise InputError(
                    f"a continuation has {len(each.told)} tokens, and 1 to {self.limit} can be told; mend the task, or"
                    " raise max_length"
                )
        with progress_bar("continuations", len(asked), quiet) as at:
            found = tell(self.model, asked, limit=self.limit, batch=self.batch, progress=at)
        return [(-each.nats, each.greedy) for each in found]


def load(source: str, device: str | None, dtype: str | None) -> Source:
    """By name: `measure` does not import the room that opens files."""
    numbers = None if dtype in (None, "auto") else getattr(torch, str(dtype), None)
    if dtype not in (None, "auto") and not isinstance(numbers, torch.dtype):
        raise InputError(f"dtype is '{dtype}', which PyTorch does not know; use float32, bfloat16 or float16")
    return resolve_name("cutaway.families.load:load")(source, device=device, dtype=numbers)


def settings_of(given: dict[str, Any]) -> dict[str, Any]:
    """A task's settings under our names; those that there is no such thing for are refused by `generate`."""
    rest = dict(given)
    until = rest.pop("until", None) or []
    limits = [rest.pop(name) for name in LIMITS if name in rest]
    settings: dict[str, Any] = {
        "stop": tuple(each for each in ([until] if isinstance(until, str) else until) if each),
        "max_new_tokens": int(limits[0]) if limits else UNASKED,
    }
    sampled = rest.pop("do_sample", bool(rest.get("temperature")))
    heat = rest.pop("temperature", 1.0)
    if not sampled:
        return settings | {"temperature": 0.0} | {key: value for key, value in rest.items() if key[:4] != "top_"}
    return settings | {"temperature": float(heat)} | rest


@contextmanager
def progress_bar(what: str, total: int, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    with tqdm(total=total, desc=what, disable=quiet) as bar:
        yield lambda done, _: bar.update(done - bar.n)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
