"""EleutherAI's evaluation harness over a checkpoint: its tasks, our model. It comes with `pip install cutaway[eval]`.

    python -m cutaway.evaluate.lm_eval --model cutaway --model_args pretrained=DIRECTORY --tasks hellaswag

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
from cutaway.evaluate.loglikelihood import LoglikelihoodRequest, compute_loglikelihoods, rolling_windows
from cutaway.evaluate.token_loss import require_tokenizer, resolve_context, resolve_positive_int
from cutaway.generate.api import generate
from cutaway.generate.generation_config import CheckpointLike, unpack_checkpoint
from cutaway.model import DecoderOnly

DEFAULT_MAX_NEW_TOKENS = 256
"""Tokens of an answer, unless a task says how many."""
MAX_TOKENS_ALIASES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call that number."""


@register_model("cutaway")
class CutawayLM(LM):
    """A decoder and its tokenizer, as the harness asks for them."""

    def __init__(
        self,
        pretrained: str | CheckpointLike,
        *,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
    ) -> None:
        """`pretrained`: a checkpoint, or what `load` opens. As many rows as fit, unless `batch_size` is a number."""
        super().__init__()
        self.checkpoint = _load_checkpoint(pretrained, device, dtype) if isinstance(pretrained, str) else pretrained
        model, tokenizer, _ = unpack_checkpoint(self.checkpoint)
        if not isinstance(model, DecoderOnly):
            raise InputError("the harness's tasks continue texts, and this model is no decoder; give one that is")
        self.model, self.tokenizer = model, require_tokenizer(tokenizer)
        self.max_length = resolve_context(model, max_length)
        fitting = batch_size is None or str(batch_size).startswith("auto")
        self.batch_size = None if fitting else resolve_positive_int("batch_size", int(batch_size or 0), 1, None, "")
        first = self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.tokenizer.eos_token_id
        if first is None:
            raise InputError(
                "a text's first token is told behind a bos or eos, and this tokenizer has none; use another"
            )
        self.prefix_token_id = first
        self._device = model.device

    # What the harness asks for

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context), and whether greedy decoding would say it."""
        return self._loglikelihood_tokens([self.encode_pair(*each.args) for each in requests], disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts behind a first token. A tokenizer's own first token is told too, as with "hf"."""
        every = [
            list(rolling_windows([self.prefix_token_id, *self.tok_encode(each.args[0])], self.max_length))
            for each in requests
        ]
        found = iter(self._loglikelihood_tokens([window for text in every for window in text], disable_tqdm))
        return [sum(next(found)[0] for _ in text) for text in every]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model says behind a context, up to the first of some strings."""
        answers: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for number, each in enumerate(requests):
            groups.setdefault(repr(each.args[1]), []).append(number)
        with _progress_bar("answers", len(requests), disable_tqdm) as at:
            for numbers in groups.values():
                settings = parse_generation_kwargs(requests[numbers[0]].args[1])
                room = self.max_length - settings["max_new_tokens"]
                if room < 1:
                    raise InputError(
                        f"the task asks for {settings['max_new_tokens']} tokens, and the model reads "
                        f"{self.max_length}; set max_gen_toks lower"
                    )
                prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
                made = generate(
                    self.checkpoint, prompts, max_num_seqs=self.batch_size, max_model_len=self.max_length, **settings
                )
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

    def tok_encode(self, text: str, special: bool | None = None) -> list[int]:
        """With the tokenizer's own special tokens, unless a text (a chat, say) brings its first one itself."""
        if special is None:
            special = not text.startswith(self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False))
        return self.tokenizer.encode(text, add_special_tokens=special)

    def encode_pair(self, context: str, continuation: str) -> LoglikelihoodRequest:
        """Both as they are in one text: a space between them is the continuation's."""
        if not context:
            told = self.tok_encode(continuation, special=False)
            return (
                LoglikelihoodRequest(told[:1], told[1:])
                if told[:1] == [self.prefix_token_id]
                else LoglikelihoodRequest([self.prefix_token_id], told)
            )
        bare = context.rstrip()
        before = self.tok_encode(bare)
        return LoglikelihoodRequest(before, self.tok_encode(context + continuation)[len(before) :])

    def _loglikelihood_tokens(
        self, requests: list[LoglikelihoodRequest], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        for each in requests:
            if not each.continuation or len(each.continuation) > self.max_length:
                raise InputError(
                    f"a continuation has {len(each.continuation)} tokens, and 1 to {self.max_length} can be told; "
                    "mend the task, or raise max_length"
                )
        with _progress_bar("continuations", len(requests), disable_tqdm) as at:
            found = compute_loglikelihoods(
                self.model, requests, max_length=self.max_length, batch_size=self.batch_size, progress=at
            )
        return [(-each.nll, each.is_greedy) for each in found]


def _load_checkpoint(source: str, device: str | None, dtype: str | None) -> CheckpointLike:
    """By name: `evaluate` does not import the room that opens files."""
    numbers = None if dtype in (None, "auto") else getattr(torch, str(dtype), None)
    if dtype not in (None, "auto") and not isinstance(numbers, torch.dtype):
        raise InputError(f"dtype is '{dtype}', which PyTorch does not know; use float32, bfloat16 or float16")
    return resolve_name("cutaway.families.load:load")(source, device=device, dtype=numbers)


def parse_generation_kwargs(gen_kwargs: dict[str, Any]) -> dict[str, Any]:
    """A task's settings under our names; those that there is no such thing for are refused by `generate`."""
    rest = dict(gen_kwargs)
    until = rest.pop("until", None) or []
    limits = [rest.pop(name) for name in MAX_TOKENS_ALIASES if name in rest]
    settings: dict[str, Any] = {
        "stop": tuple(each for each in ([until] if isinstance(until, str) else until) if each),
        "max_new_tokens": int(limits[0]) if limits else DEFAULT_MAX_NEW_TOKENS,
    }
    sampled = rest.pop("do_sample", bool(rest.get("temperature")))
    heat = rest.pop("temperature", 1.0)
    if not sampled:
        return settings | {"temperature": 0.0} | {key: value for key, value in rest.items() if key[:4] != "top_"}
    return settings | {"temperature": float(heat)} | rest


@contextmanager
def _progress_bar(description: str, total: int, disable: bool) -> Iterator[Callable[[int, int], None]]:
    with tqdm(total=total, desc=description, disable=disable) as bar:
        yield lambda done, _: bar.update(done - bar.n)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
