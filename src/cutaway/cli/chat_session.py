"""Chat in the terminal. The engine caches the conversation, so that only new tokens are prefilled."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from cutaway.cli.prompts import MAX_PROMPT_BYTES, decode_utf8
from cutaway.cli.timed_generation import GenerateOptions, TimedGeneration
from cutaway.cli.views.generation_output import (
    OutputWriter,
    check_chat_template,
    format_stats,
    iter_text,
    print_result_details,
)
from cutaway.errors import CutawayError
from cutaway.generate.engine.config import build_engine_config
from cutaway.generate.engine.engine import Engine
from cutaway.generate.engine.request import Request
from cutaway.generate.generation_config import apply_generation_config, unpack_checkpoint
from cutaway.generate.sampling.sampling_params import SamplingParams, completion_seeds

if TYPE_CHECKING:
    from cutaway.families.checkpoint import Checkpoint

DEFAULT_MAX_NEW_TOKENS = 1024
"""Default max_new_tokens of a reply."""
DEFAULT_MAX_MODEL_LEN = 8192
"""Default maximum number of tokens of a conversation, for models with a longer context."""
CHAT_HELP = "Ctrl-C stops a reply, /reset starts a new conversation, /quit or Ctrl-D exits."


def run_chat(
    checkpoint: "Checkpoint",
    initial_messages: Sequence[str],
    system: str | None,
    params: SamplingParams,
    engine_options: GenerateOptions,
    output: OutputWriter,
) -> None:
    """Print the replies to the initial messages, then to the lines of standard input until it ends."""
    check_chat_template(checkpoint)
    session = ChatSession(checkpoint, system, params, engine_options)
    interactive = sys.stdin is not None and sys.stdin.isatty() and not output.as_json
    if interactive:
        output.write_note(CHAT_HELP)
    for message in _read_messages(initial_messages, output, interactive):
        if message == "/reset":
            session.reset()
            continue
        try:
            _run_turn(session, message, output)
        except CutawayError as error:  # the conversation is unchanged, so it can continue
            if not interactive:
                raise
            output.write_note(f"{error} (/reset starts a new conversation)")


class ChatSession:
    """Message history, and an engine whose KV cache holds the tokens of the conversation."""

    def __init__(
        self, checkpoint: "Checkpoint", system: str | None, params: SamplingParams, engine_options: GenerateOptions
    ) -> None:
        model, tokenizer, self.generation_config = unpack_checkpoint(checkpoint)
        assert tokenizer is not None
        params.check_vocab(model.config.vocab_size)
        self.checkpoint, self.tokenizer, self.params = checkpoint, tokenizer, params
        default_len = min(model.config.context or DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_MODEL_LEN)
        cache = engine_options.get("cache_implementation", "auto")
        engine_config = build_engine_config(
            model,
            self.generation_config,
            max_num_seqs=1,
            max_model_len=engine_options.get("max_model_len") or default_len,
            cache_implementation="paged" if cache == "auto" else cache,
            kv_cache_dtype=engine_options.get("kv_cache_dtype"),
            weight_bits=engine_options.get("weight_bits"),
            compile=engine_options.get("compile"),
        )
        self.engine = Engine(engine_config, tokenizer=tokenizer, max_waiting=1)
        self.system_messages = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        self.messages = list(self.system_messages)

    def submit(self, message: str) -> tuple[TimedGeneration, Request]:
        """Submit the conversation and a new user message to the engine. The message is not added to the history."""
        prompt = self.tokenizer.encode_chat([*self.messages, {"role": "user", "content": message}])
        params = apply_generation_config(self.params, self.generation_config, len(prompt))
        if self.params.max_new_tokens is None and self.generation_config.max_new_tokens_for(len(prompt)) is None:
            params = replace(params, max_new_tokens=max(DEFAULT_MAX_NEW_TOKENS, params.min_new_tokens))
        generation = TimedGeneration(self.engine)
        return generation, generation.submit(prompt, params, seed=completion_seeds(self.params)[0])

    def append_turn(self, message: str, reply: str) -> None:
        self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": reply}]


def _run_turn(session: ChatSession, message: str, output: OutputWriter) -> None:
    """Generate and print the reply to a message. Append both to the history, even if the reply was interrupted."""
    generation, request = session.submit(message)
    with _cancel_on_interrupt(request):
        for text in iter_text(generation.stream_chunks(request), session.checkpoint):
            if not output.as_json:
                output.stdout.write(text)
        output.stdout.end_line()
        result = request.result()
        session.append_turn(message, result.text or "")
        print_result_details(output, message, result, generation.tokens_per_second(request), session.checkpoint)
        if output.show_stats:
            output.write_note(format_stats(generation))


@contextmanager
def _cancel_on_interrupt(request: Request) -> Iterator[None]:
    """Context manager in which Ctrl-C aborts the request. A second Ctrl-C ends the program."""

    def on_interrupt(signal_number: int, frame: object) -> None:
        request.abort()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous_handler = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _read_messages(initial_messages: Sequence[str], output: OutputWriter, interactive: bool) -> Iterator[str]:
    """Yield the initial messages, then the lines of standard input that are not empty, until /quit or its end."""
    for message in initial_messages:
        if interactive:
            output.stdout.write_dim(f"> {message}\n")
        yield message
    if sys.stdin is None:
        return
    if interactive:
        with suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  # gives input() line editing and history
    while (line := _read_line(output, interactive)) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/help":
            output.write_note(CHAT_HELP)
        elif line:
            yield line


def _read_line(output: OutputWriter, interactive: bool) -> str | None:
    """Read the next line, or None at the end of input. Ctrl-C discards the line, not the conversation."""
    if not interactive:
        data = sys.stdin.buffer.readline(MAX_PROMPT_BYTES + 1)
        return decode_utf8("this line of standard input", data).strip() if data else None
    try:
        return input("> ").strip()
    except UnicodeDecodeError as error:
        output.write_note(f"the input is not UTF-8 text at byte {error.start}; type it again")
        return ""
    except KeyboardInterrupt:
        output.stdout.write("\n")
        return ""
    except EOFError:
        output.stdout.write("\n")
        return None
