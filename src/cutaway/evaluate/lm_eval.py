"""Adapter for EleutherAI's lm-evaluation-harness. Install with `pip install cutaway[eval]`.

    python -m cutaway.evaluate.lm_eval --model cutaway --model_args pretrained=DIRECTORY --tasks hellaswag

In Python, call `lm_eval.simple_evaluate(model=CutawayLM(checkpoint), tasks=[…])`. Texts are tokenized in the same way
as by the harness's "hf" model, so that results are comparable.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import lm_eval.models  # noqa: F401 (the harness registers its own models only while none are registered)
import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from cutaway.argument_checks import check_positive_int
from cutaway.errors import InputError
from cutaway.evaluate.loglikelihood import LoglikelihoodRequest, compute_loglikelihoods, rolling_windows
from cutaway.evaluate.token_loss import require_tokenizer, resolve_context
from cutaway.generate.api import generate
from cutaway.generate.generation_config import CheckpointLike, unpack_checkpoint
from cutaway.model import DecoderOnly

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_GenerationKwargs = dict[str, Any]
"""A task's generation settings, or arguments of `generate`."""
DEFAULT_MAX_NEW_TOKENS = 256
"""Default maximum number of generated tokens, for tasks that do not set it."""
_MAX_TOKENS_ALIASES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks use for the maximum number of generated tokens."""


@register_model("cutaway")
class CutawayLM(LM):
    """A decoder and its tokenizer with the `LM` interface of lm-evaluation-harness."""

    def __init__(
        self,
        pretrained: str | CheckpointLike,
        *,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
    ) -> None:
        """`pretrained` is a checkpoint, or a directory or name that `load` takes.

        `batch_size` is a number, or "auto" to choose it by the length of the texts.
        """
        super().__init__()
        self.checkpoint = _load_checkpoint(pretrained, device, dtype) if isinstance(pretrained, str) else pretrained
        model, tokenizer, _ = unpack_checkpoint(self.checkpoint)
        if not isinstance(model, DecoderOnly):
            raise InputError("this model is not a decoder, but the harness's tasks need one; pass a decoder")
        self.model, self.tokenizer = model, require_tokenizer(tokenizer)
        self.max_length = resolve_context(model, max_length)
        is_auto = batch_size is None or str(batch_size).startswith("auto")
        self.batch_size = None if is_auto else int(batch_size or 0)
        if self.batch_size is not None:
            check_positive_int("batch_size", self.batch_size)
        first = self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.tokenizer.eos_token_id
        if first is None:
            raise InputError(
                "this tokenizer has no bos or eos token, which must precede a text's first token; use another tokenizer"
            )
        self.prefix_token_id = first
        self._device = model.device

    # Interface of the harness

    def loglikelihood(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return, per request, log p(continuation | context) and whether greedy decoding generates the continuation."""
        return self._loglikelihood_tokens([self.encode_pair(*request.args) for request in requests], disable_tqdm)

    def loglikelihood_rolling(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each whole text after the prefix token. The tokenizer's BOS is scored too, as with "hf"."""
        windows_per_text = [
            list(rolling_windows([self.prefix_token_id, *self.tok_encode(request.args[0])], self.max_length))
            for request in requests
        ]
        windows = [window for text_windows in windows_per_text for window in text_windows]
        results = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        return [sum(next(results)[0] for _ in text_windows) for text_windows in windows_per_text]

    def generate_until(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[str]:
        """Return the generated continuation of each context, up to the first stop string."""
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}  # requests with equal generation settings run in one call
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        with _progress_bar("generating", len(requests), disable_tqdm) as update:
            for indices in groups.values():
                settings = parse_generation_kwargs(requests[indices[0]].args[1])
                max_prompt_len = self.max_length - settings["max_new_tokens"]
                if max_prompt_len < 1:
                    problem = f"max_gen_toks {settings['max_new_tokens']} leaves no space for a prompt"
                    raise InputError(f"{problem} in max_length {self.max_length}; set max_gen_toks lower")
                prompts = [self.tok_encode(requests[index].args[0])[-max_prompt_len:] for index in indices]
                outputs = generate(
                    self.checkpoint, prompts, max_num_seqs=self.batch_size, max_model_len=self.max_length, **settings
                )
                texts |= {index: output.text or "" for index, output in zip(indices, outputs, strict=True)}
                update(len(texts), len(requests))
        return [texts[index] for index in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise InputError("add_generation_prompt=False is not supported; use a task without a prefilled answer")
        return self.tokenizer.render_chat(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        own = self.tokenizer.chat_template
        name = chat_template if isinstance(chat_template, str) else "default"
        return own.get(name) if isinstance(own, dict) else own

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, which distinguishes the entries of the harness's cache of prompts."""
        return f"cutaway-{self.tokenizer.vocab_size}"

    # Implementation

    def tok_encode(self, text: str, special: bool | None = None) -> list[int]:
        """Tokenize with special tokens, unless the text (a rendered chat) already starts with the prefix token."""
        if special is None:
            special = not text.startswith(self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False))
        return self.tokenizer.encode(text, add_special_tokens=special)

    def encode_pair(self, context: str, continuation: str) -> LoglikelihoodRequest:
        """Tokenize context and continuation as one text, and split the ids. Spaces between them belong to the
        continuation."""
        if not context:
            ids = self.tok_encode(continuation, special=False)
            ids = ids if ids[:1] == [self.prefix_token_id] else [self.prefix_token_id, *ids]
            return LoglikelihoodRequest(ids[:1], ids[1:])
        context_ids = self.tok_encode(context.rstrip())
        return LoglikelihoodRequest(context_ids, self.tok_encode(context + continuation)[len(context_ids) :])

    def _loglikelihood_tokens(
        self, requests: list[LoglikelihoodRequest], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        for request in requests:
            if not request.continuation or len(request.continuation) > self.max_length:
                problem = f"a continuation has {len(request.continuation)} tokens, not 1 to {self.max_length}"
                raise InputError(f"{problem}; fix the task, or raise max_length")
        with _progress_bar("loglikelihoods", len(requests), disable_tqdm) as update:
            results = compute_loglikelihoods(
                self.model, requests, max_length=self.max_length, batch_size=self.batch_size, progress=update
            )
        return [(-result.nll, result.is_greedy) for result in results]


def _load_checkpoint(source: str, device: str | None, dtype: str | None) -> CheckpointLike:
    """Load a checkpoint. `load` is looked up by name, because the package `evaluate` does not import `families`."""
    torch_dtype = None if dtype in (None, "auto") else getattr(torch, str(dtype), None)
    if dtype not in (None, "auto") and not isinstance(torch_dtype, torch.dtype):
        raise InputError(f"dtype is '{dtype}', which is not a PyTorch dtype; use float32, bfloat16 or float16")
    return resolve_name("cutaway.families.load:load")(source, device=device, dtype=torch_dtype)


def parse_generation_kwargs(gen_kwargs: _GenerationKwargs) -> _GenerationKwargs:
    """Convert a task's generation settings to arguments of `generate`. Unknown settings make `generate` raise."""
    rest = dict(gen_kwargs)
    until = rest.pop("until", None) or []
    limits = [rest.pop(name) for name in _MAX_TOKENS_ALIASES if name in rest]
    settings: _GenerationKwargs = {
        "stop": tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop),
        "max_new_tokens": int(limits[0]) if limits else DEFAULT_MAX_NEW_TOKENS,
    }
    do_sample = rest.pop("do_sample", bool(rest.get("temperature")))
    temperature = rest.pop("temperature", 1.0)
    if not do_sample:
        return settings | {"temperature": 0.0} | {key: value for key, value in rest.items() if key[:4] != "top_"}
    return settings | {"temperature": float(temperature)} | rest


@contextmanager
def _progress_bar(description: str, total: int, disable: bool) -> Iterator[Callable[[int, int], None]]:
    with tqdm(total=total, desc=description, disable=disable) as bar:
        yield lambda done, _: bar.update(done - bar.n)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
