"""Output of `cutaway generate`: streamed completions, beam search results, mask predictions, throughput."""

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
    """Output options and streams."""

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
        """Write a line to standard error."""
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
    """Generate completions of all prompts in one batch and print them in order."""
    prompts = [build_messages(prompt, system, checkpoint) if as_messages else prompt for prompt in inputs]
    has_several = len(inputs) * params.n > 1
    is_continuation = not as_messages and "encoder" not in checkpoint.model.stacks
    model, _, generation_config = unpack_checkpoint(checkpoint)
    prompt_texts = [_prompt_text(prompt, checkpoint) for prompt in inputs for _ in range(params.n)]
    if search_options or default_num_beams(model, generation_config, params):
        results, seconds = _run_beam_search(checkpoint, prompts, params, search_options, engine_options, output)
        for index, result in enumerate(results):
            text = iter_text([CompletionChunk(result.text or "", result.tokens)], checkpoint)
            _print_completion(
                output,
                prompt_texts[index],
                text,
                is_continuation=is_continuation,
                has_several=has_several,
                is_first=index == 0,
            )
            print_result_details(output, inputs[index // params.n], result, _throughput(results, seconds), checkpoint)
        if output.show_stats:
            num_tokens = sum(len(result.tokens) for result in results)
            output.write_note(f"{num_tokens:,} tokens, {_throughput(results, seconds) or 0:,.3g} tokens/s, beam search")
        return
    generation, requests = start_generation(checkpoint, prompts, params, **engine_options)
    try:
        for index, request in enumerate(requests):
            text = iter_text(generation.stream_chunks(request), checkpoint)
            _print_completion(
                output,
                prompt_texts[index],
                text,
                is_continuation=is_continuation,
                has_several=has_several,
                is_first=index == 0,
            )
            print_result_details(
                output, inputs[index // params.n], request.result(), generation.tokens_per_second(request), checkpoint
            )
    except KeyboardInterrupt:
        output.stdout.end_line()
        raise
    if output.show_stats:
        output.write_note(format_stats(generation))


def build_messages(text: PromptInput, system: str | None, checkpoint: "Checkpoint") -> list[dict[str, str]]:
    """Return a text as the first user message of a chat."""
    check_chat_template(checkpoint)
    system_messages = [] if system is None else [{"role": "system", "content": system}]
    return [*system_messages, {"role": "user", "content": str(text)}]


def check_chat_template(checkpoint: "Checkpoint") -> None:
    tokenizer = checkpoint.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise InputError(
            f"this checkpoint has no {missing}, so it has no chat format; leave out --chat and --message to generate"
            " from plain text, or load an instruction-tuned checkpoint"
        )


def _prompt_text(prompt: PromptInput, checkpoint: "Checkpoint") -> str:
    """Return the text of a prompt."""
    if isinstance(prompt, str):
        return prompt
    tokenizer = checkpoint.tokenizer
    return ",".join(map(str, prompt)) if tokenizer is None else tokenizer.decode(prompt)


def iter_text(chunks: Iterable[CompletionChunk], checkpoint: "Checkpoint") -> Iterable[str]:
    """Yield the text of chunks; without a tokenizer, token ids."""
    separator, has_tokenizer = "", checkpoint.tokenizer is not None
    for chunk in chunks:
        if has_tokenizer:
            yield chunk.text
        for token in () if has_tokenizer else chunk.tokens:
            yield f"{separator}{token}"
            separator = ","


def _print_completion(
    output: OutputWriter, prompt: str, texts: Iterable[str], *, is_continuation: bool, has_several: bool, is_first: bool
) -> None:
    """Print one completion while it is generated, after its prompt; a chat message is printed on its own line."""
    if output.as_json:
        for _ in texts:
            pass  # print_result_details prints the JSON object at the end
        return
    stdout = output.stdout
    if output.echo and (is_continuation or has_several or output.echo_requested):
        if has_several and not is_first:
            stdout.write("\n")
        stdout.write_dim(prompt if is_continuation else f"{prompt}\n")
    for text in texts:
        stdout.write(text)
    stdout.end_line()


def print_result_details(
    output: OutputWriter,
    prompt: PromptInput,
    result: Completion,
    tokens_per_second: float | None,
    checkpoint: "Checkpoint",
) -> None:
    """Print a finished completion as JSON, or its log-probabilities."""
    if output.as_json:
        output.write_json(completion_to_dict(prompt, result, tokens_per_second))
    elif result.logprobs is not None:
        _render_logprobs(result, checkpoint)


def _render_logprobs(result: Completion, checkpoint: "Checkpoint") -> None:
    """Print each token with its probability and the alternatives."""
    from rich.text import Text

    from cutaway.cli.views.terminal import borderless_table

    tokenizer = checkpoint.tokenizer

    def token_text(token: int) -> str:
        return (
            escape_control_characters(repr(tokenizer.decode([token], skip_special_tokens=False)))
            if tokenizer
            else str(token)
        )

    table = borderless_table("lrl", ["token", "probability", "most likely" if result.top_logprobs else ""])
    for index, (token, logprob) in enumerate(zip(result.tokens, result.logprobs or [], strict=False)):
        alternatives = result.top_logprobs[index] if result.top_logprobs else {}
        alternatives_text = "  ".join(
            f"{token_text(other)} {math.exp(value):.1%}" for other, value in alternatives.items()
        )
        table.add_row(Text(token_text(token)), f"{math.exp(logprob):.1%}", Text(alternatives_text))
    print_without_wrapping(table)


# ---------------------------------------------------------------------------------------- beam search


def _run_beam_search(
    checkpoint: "Checkpoint",
    prompts: Sequence[Any],
    params: SamplingParams,
    search_options: dict[str, Any],
    engine_options: Any,
    output: OutputWriter,
) -> tuple[list[Completion], float]:
    """Run beam search, with a spinner on a terminal; return the completions and the seconds."""
    from rich.console import Console

    unsupported = next((name for name in ("weight_bits", "compile", "draft_model") if name in engine_options), None)
    if unsupported is not None:
        raise InputError(f"beam search does not support {unsupported}; leave it out")
    start_time = time.perf_counter()
    sampling_options = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    console = Console(stderr=True)
    spinner = console.status("searching") if console.is_terminal and not output.as_json else nullcontext()
    with spinner:
        results = generate(checkpoint, prompts, **search_options, **engine_options, **sampling_options)
    return results, time.perf_counter() - start_time


def _throughput(results: Sequence[Completion], seconds: float) -> float | None:
    return sum(len(result.tokens) for result in results) / seconds if seconds > 0 else None


# ---------------------------------------------------------------------------------------- mask filling


def fill_masks(
    checkpoint: "Checkpoint",
    inputs: Sequence[PromptInput],
    unsupported_options: Sequence[str],
    top_k: int,
    output: OutputWriter,
) -> None:
    """Print the predictions of an encoder for each mask."""
    from cutaway.generate.fill_mask import fill_mask

    if unsupported_options:
        option = f"--{unsupported_options[0].replace('_', '-')}".replace("compile-model", "compile")
        raise InputError(
            f"this model is an encoder, which fills masks, and {option} does not apply to that; leave it out"
        )
    texts = [prompt for prompt in inputs if isinstance(prompt, str)]
    if checkpoint.tokenizer is None or len(texts) < len(inputs) or not texts:
        raise InputError(
            "this model is an encoder, which fills masks; pass texts with a mask, and a checkpoint with a tokenizer"
        )
    predictions = fill_mask(checkpoint.model, checkpoint.tokenizer, texts, top_k=top_k)
    for text, masks in zip(texts, predictions, strict=True):
        if output.as_json:
            output.write_json(
                {"prompt": text, "masks": [[prediction._asdict() for prediction in mask] for mask in masks]}
            )
        else:
            _render_mask_predictions(text, masks, output)


def _render_mask_predictions(text: str, predictions: Sequence[Sequence[Any]], output: OutputWriter) -> None:
    from rich.text import Text

    from cutaway.cli.views.terminal import borderless_table

    if output.echo:
        output.stdout.write_dim(f"{text}\n")
    for mask in predictions:
        table = borderless_table("rll")
        for prediction in mask:
            probability = f"{prediction.probability:.1%}"
            table.add_row(
                probability,
                Text(escape_control_characters(prediction.token), "bold"),
                Text(escape_control_characters(prediction.text)),
            )
        print_without_wrapping(table)


# ---------------------------------------------------------------------------------------- throughput


def format_stats(generation: TimedGeneration) -> str:
    """Format the number of tokens, throughput, time to first token and bandwidth utilization in one line."""
    parts = [f"{generation.num_tokens:,} tokens"]
    truncated = [request for request in generation.requests if request.output.finish_reason == "length"]
    if truncated:
        context_full = all(
            request.output.max_tokens < (request.sampling_params.max_new_tokens or math.inf) for request in truncated
        )
        parts[0] += " (truncated; the context is full)" if context_full else " (truncated; increase --max-new-tokens)"
    if generation.decode_seconds > 0 and generation.num_steps > 0:
        parts.append(f"{generation.num_decoded_tokens / generation.decode_seconds:,.3g} tokens/s")
    if generation.first_token_times:
        parts.append(f"{generation.time_to_first_token * 1e3:,.0f} ms to first token")
    bandwidth_utilization = _bandwidth_utilization(generation)
    if bandwidth_utilization is not None:
        parts.append(f"{bandwidth_utilization:.0%} of memory bandwidth")
    return ", ".join(parts)


def _bandwidth_utilization(generation: TimedGeneration) -> float | None:
    """Return the achieved fraction of the memory bandwidth of a copy, for reading weights and KV cache."""
    from cutaway.bench.throughput import DTYPE_NAMES, estimate_inference_size, get_copy_bandwidth

    config = generation.engine.config
    dtype = DTYPE_NAMES.get(config.model.dtype)
    if dtype is None or generation.num_steps < 2 or generation.decode_seconds <= 0:
        return None
    bandwidth = get_copy_bandwidth(config.model.device)
    if bandwidth is None:
        return None
    batch_size = max(1, round(generation.num_tokens / (generation.num_steps + 1)))
    bytes_per_step = (
        estimate_inference_size(
            config.model.config, dtype, config.weight_bits, batch_size, generation.mean_context_length
        )
        .decode_workload(batch_size)
        .min_bytes
    )
    return generation.num_steps * bytes_per_step / bandwidth / generation.decode_seconds
