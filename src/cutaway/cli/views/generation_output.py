"""What `cutaway generate` shows: answers as they come, fillings of masks, and how fast it went."""

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from cutaway.cli.prompts import PromptInput
from cutaway.cli.timed_generation import TimedGeneration, completion_to_dict, start_generation
from cutaway.cli.views.terminal import TerminalWriter, escape_control_characters, print_without_wrapping
from cutaway.errors import InputError
from cutaway.generate.api import generate
from cutaway.generate.engine.output import Completion, CompletionChunk
from cutaway.generate.generation_config import unpack_checkpoint
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.generate.search.beam_generation import default_num_beams

if TYPE_CHECKING:
    from cutaway.families.checkpoint import Checkpoint


class OutputWriter:
    """What the user wants to see, and where it is written."""

    def __init__(self, *, echo: bool | None = None, show_stats: bool | None = None, as_json: bool = False) -> None:
        self.as_json = as_json
        self.stdout = TerminalWriter(sys.stdout)
        err = sys.stderr
        self.echo = self.stdout.is_terminal if echo is None else echo
        self.show_stats = (err is not None and err.isatty() and not as_json) if show_stats is None else show_stats
        self.stderr = TerminalWriter(err) if err is not None else None
        self.echo_requested = echo

    def write_json(self, data: Any) -> None:
        self.stdout.out.write(json.dumps(data, allow_nan=False) + "\n")
        self.stdout.out.flush()

    def write_note(self, text: str) -> None:
        """A line that is not part of the answer."""
        if self.stderr is not None:
            self.stderr.write_dim(text)
            self.stderr.end_line()


def generate_and_print(
    checkpoint: "Checkpoint",
    inputs: Sequence[PromptInput],
    params: SamplingParams,
    search_options: dict[str, Any],
    engine_options: dict[str, Any],
    output: OutputWriter,
    *,
    as_messages: bool,
    system: str | None,
) -> None:
    """Answers to all prompts, one after another in their order, while the engine works on all of them."""
    prompts = [build_messages(each, system, checkpoint) if as_messages else each for each in inputs]
    several = len(inputs) * params.n > 1
    continues = not as_messages and "encoder" not in checkpoint.model.stacks
    model, _, start = unpack_checkpoint(checkpoint)
    shown = [_prompt_text(each, checkpoint) for each in inputs for _ in range(params.n)]
    if search_options or default_num_beams(model, start, params):
        found, took = _run_beam_search(checkpoint, prompts, params, search_options, engine_options, output)
        for number, result in enumerate(found):
            text = iter_text([CompletionChunk(result.text or "", result.tokens)], checkpoint)
            _print_completion(
                output, shown[number], text, is_continuation=continues, has_several=several, is_first=number == 0
            )
            print_result_details(output, inputs[number // params.n], result, _throughput(found, took), checkpoint)
        if output.show_stats:
            count = sum(len(result.tokens) for result in found)
            output.write_note(f"{count:,} tokens, {_throughput(found, took) or 0:,.3g} tokens/s, searched with beams")
        return
    flow, tickets = start_generation(checkpoint, prompts, params, **engine_options)
    try:
        for number, ticket in enumerate(tickets):
            text = iter_text(flow.stream_chunks(ticket), checkpoint)
            _print_completion(
                output, shown[number], text, is_continuation=continues, has_several=several, is_first=number == 0
            )
            print_result_details(
                output, inputs[number // params.n], ticket.result(), flow.tokens_per_second(ticket), checkpoint
            )
    except KeyboardInterrupt:
        output.stdout.end_line()
        raise
    if output.show_stats:
        output.write_note(format_stats(flow))


def build_messages(text: PromptInput, system: str | None, checkpoint: "Checkpoint") -> list[dict[str, str]]:
    """A message as the beginning of a chat."""
    check_chat_template(checkpoint)
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": str(text)}]


def check_chat_template(checkpoint: "Checkpoint") -> None:
    tokenizer = checkpoint.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise InputError(
            f"this checkpoint has no {missing}, so it knows no chats; leave --chat or --message out to continue plain"
            " text, or load the version that was trained to answer"
        )


def _prompt_text(prompt: PromptInput, checkpoint: "Checkpoint") -> str:
    """A prompt as it is shown."""
    if isinstance(prompt, str):
        return prompt
    tokenizer = checkpoint.tokenizer
    return ",".join(map(str, prompt)) if tokenizer is None else tokenizer.decode(prompt)


def iter_text(chunks: Iterable[CompletionChunk], checkpoint: "Checkpoint") -> Iterable[str]:
    """An answer's text, bit by bit; its ids, where there is no tokenizer."""
    before, reads = "", checkpoint.tokenizer is not None
    for piece in chunks:
        if reads:
            yield piece.text
        for token in () if reads else piece.tokens:
            yield f"{before}{token}"
            before = ","


def _print_completion(
    output: OutputWriter, prompt: str, texts: Iterable[str], *, is_continuation: bool, has_several: bool, is_first: bool
) -> None:
    """Write one answer while it comes. A text that is continued stands before it, a question above it."""
    if output.as_json:
        for _ in texts:
            """The whole is told at its end."""
        return
    screen = output.stdout
    if output.echo and (is_continuation or has_several or output.echo_requested):
        if has_several and not is_first:
            screen.write("\n")
        screen.write_dim(prompt if is_continuation else f"{prompt}\n")
    for piece in texts:
        screen.write(piece)
    screen.end_line()


def print_result_details(
    output: OutputWriter,
    prompt: PromptInput,
    result: Completion,
    tokens_per_second: float | None,
    checkpoint: "Checkpoint",
) -> None:
    """What there is to say about a finished answer."""
    if output.as_json:
        output.write_json(completion_to_dict(prompt, result, tokens_per_second))
    elif result.logprobs is not None:
        _render_logprobs(result, checkpoint)


def _render_logprobs(result: Completion, checkpoint: "Checkpoint") -> None:
    """Each token with its probability, and what might have stood in its place."""
    from rich.text import Text

    from cutaway.cli.views.terminal import borderless_table

    tokenizer = checkpoint.tokenizer

    def named(token: int) -> str:
        return (
            escape_control_characters(repr(tokenizer.decode([token], skip_special_tokens=False)))
            if tokenizer
            else str(token)
        )

    table = borderless_table("lrl", ["token", "probability", "likeliest" if result.top_logprobs else ""])
    for place, (token, logprob) in enumerate(zip(result.tokens, result.logprobs or [], strict=False)):
        others = result.top_logprobs[place] if result.top_logprobs else {}
        listed = "  ".join(f"{named(other)} {math.exp(value):.1%}" for other, value in others.items())
        table.add_row(Text(named(token)), f"{math.exp(logprob):.1%}", Text(listed))
    print_without_wrapping(table)


# ---------------------------------------------------------------------------------------- beams


def _run_beam_search(
    checkpoint: "Checkpoint",
    prompts: Sequence[Any],
    params: SamplingParams,
    search_options: dict[str, Any],
    engine_options: Any,
    output: OutputWriter,
) -> tuple[list[Completion], float]:
    """Beams come all at the end; on a terminal something turns until then."""
    from rich.console import Console

    quick = next((name for name in ("weight_bits", "compile", "draft_model") if name in engine_options), None)
    if quick is not None:
        raise InputError(f"beams are searched with the model as it is, so {quick} has no part in it; leave it out")
    began = time.perf_counter()
    settings = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    console = Console(stderr=True)
    waiting = console.status("searching") if console.is_terminal and not output.as_json else nullcontext()
    with waiting:
        found = generate(checkpoint, prompts, **search_options, **engine_options, **settings)
    return found, time.perf_counter() - began


def _throughput(results: Sequence[Completion], seconds: float) -> float | None:
    return sum(len(each.tokens) for each in results) / seconds if seconds > 0 else None


# ---------------------------------------------------------------------------------------- masks


def fill_masks(
    checkpoint: "Checkpoint",
    inputs: Sequence[PromptInput],
    unsupported_options: Sequence[str],
    top_k: int,
    output: OutputWriter,
) -> None:
    """What an encoder would put in the place of each mask."""
    from cutaway.generate.fill_mask import fill_mask

    if unsupported_options:
        option = f"--{unsupported_options[0].replace('_', '-')}".replace("compile-model", "compile")
        raise InputError(f"this model is an encoder and fills masks, for which {option} has no meaning; leave it out")
    texts = [each for each in inputs if isinstance(each, str)]
    if checkpoint.tokenizer is None or len(texts) < len(inputs) or not texts:
        raise InputError(
            "this model is an encoder: give it texts with a mask to fill, and a tokenizer beside its weights"
        )
    found = fill_mask(checkpoint.model, checkpoint.tokenizer, texts, top_k=top_k)
    for text, masks in zip(texts, found, strict=True):
        if output.as_json:
            output.write_json({"prompt": text, "masks": [[each._asdict() for each in mask] for mask in masks]})
        else:
            _render_mask_predictions(text, masks, output)


def _render_mask_predictions(text: str, predictions: Sequence[Sequence[Any]], output: OutputWriter) -> None:
    from rich.text import Text

    from cutaway.cli.views.terminal import borderless_table

    if output.echo:
        output.stdout.write_dim(f"{text}\n")
    for mask in predictions:
        table = borderless_table("rll")
        for each in mask:
            share = f"{each.probability:.1%}"
            table.add_row(
                share, Text(escape_control_characters(each.token), "bold"), Text(escape_control_characters(each.text))
            )
        print_without_wrapping(table)


# ---------------------------------------------------------------------------------------- how fast


def format_stats(generation: TimedGeneration) -> str:
    """One line: how much, how fast, and how near to what the memory allows."""
    parts = [f"{generation.num_tokens:,} tokens"]
    cut = [ticket for ticket in generation.requests if ticket.output.finish_reason == "length"]
    if cut:
        full = all(ticket.output.max_tokens < (ticket.sampling_params.max_new_tokens or math.inf) for ticket in cut)
        parts[0] += " (cut; the context is full)" if full else " (cut; --max-new-tokens gives more)"
    if generation.decode_seconds > 0 and generation.num_steps > 0:
        parts.append(f"{generation.num_decoded_tokens / generation.decode_seconds:,.3g} tokens/s")
    if generation.first_token_times:
        parts.append(f"{generation.time_to_first_token * 1e3:,.0f} ms to the first")
    reached = _bandwidth_utilization(generation)
    if reached is not None:
        parts.append(f"{reached:.0%} of memory bandwidth")
    return ", ".join(parts)


def _bandwidth_utilization(generation: TimedGeneration) -> float | None:
    """The time that reading weights and caches would take at the speed of a bare copy, of the time that it took."""
    from cutaway.bench.throughput import DTYPE_NAMES, estimate_inference_size, get_copy_bandwidth

    plan = generation.engine.config
    dtype = DTYPE_NAMES.get(plan.model.dtype)
    if dtype is None or generation.num_steps < 2 or generation.decode_seconds <= 0:
        return None
    bandwidth = get_copy_bandwidth(plan.model.device)
    if bandwidth is None:
        return None
    batch = max(1, round(generation.num_tokens / (generation.num_steps + 1)))
    moved = (
        estimate_inference_size(plan.model.config, dtype, plan.weight_bits, batch, generation.mean_context_length)
        .decode_workload(batch)
        .min_bytes
    )
    return generation.num_steps * moved / bandwidth / generation.decode_seconds
