"""Output of `cutaway generate`: streamed completions, beam search results, mask predictions, throughput."""

import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cutaway.cli.json_output import print_json
from cutaway.cli.prompts import PromptInput
from cutaway.cli.timed_generation import GenerateOptions, TimedGeneration, start_generation
from cutaway.cli.views.terminal import (
    TerminalWriter,
    borderless_table,
    escape_control_characters,
    print_without_wrapping,
    spinner,
)
from cutaway.errors import InputError
from cutaway.generate.api import generate
from cutaway.generate.engine.output import Completion, CompletionChunk
from cutaway.generate.fill_mask import FillMaskPrediction, fill_mask
from cutaway.generate.generation_config import unpack_checkpoint
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.generate.search.beam_generation import default_num_beams

if TYPE_CHECKING:
    from cutaway.families.checkpoint import Checkpoint


class OutputWriter:
    """Output options of `cutaway generate`, and the streams it writes to."""

    def __init__(self, *, echo: bool | None = None, show_stats: bool | None = None, as_json: bool = False) -> None:
        self.as_json = as_json
        self.stdout = TerminalWriter(sys.stdout)
        err = sys.stderr
        self.echo = self.stdout.is_terminal if echo is None else echo
        self.show_stats = (err is not None and err.isatty() and not as_json) if show_stats is None else show_stats
        self.stderr = TerminalWriter(err) if err is not None else None
        self.echo_requested = echo

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
    engine_options: GenerateOptions,
    output: OutputWriter,
    *,
    as_messages: bool,
    system: str | None,
) -> None:
    """Generate the completions of all prompts in one batch, and print them in the order of the prompts."""
    prompts = [_build_messages(prompt, system, checkpoint) if as_messages else prompt for prompt in inputs]
    prompt_of_completion = [prompt for prompt in inputs for _ in range(params.n)]
    is_continuation = not as_messages and "encoder" not in checkpoint.model.stacks

    def show_text(index: int, chunks: Iterable[CompletionChunk]) -> None:
        prompt = _prompt_text(prompt_of_completion[index], checkpoint)
        position = None if len(prompt_of_completion) == 1 else index
        _print_completion(output, prompt, iter_text(chunks, checkpoint), position, is_continuation=is_continuation)

    model, _, generation_config = unpack_checkpoint(checkpoint)
    if search_options or default_num_beams(model, generation_config, params):
        start_time = time.perf_counter()
        sampling_options = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
        with spinner("searching", quiet=output.as_json):
            results = generate(checkpoint, prompts, **search_options, **engine_options, **sampling_options)
        num_tokens, seconds = sum(len(result.tokens) for result in results), time.perf_counter() - start_time
        for index, result in enumerate(results):
            show_text(index, [CompletionChunk(result.text or "", result.tokens)])
            print_result_details(output, prompt_of_completion[index], result, num_tokens / seconds, checkpoint)
        if output.show_stats:
            output.write_note(f"{num_tokens:,} tokens, {num_tokens / seconds:,.3g} tokens/s, beam search")
        return
    generation, requests = start_generation(checkpoint, prompts, params, **engine_options)
    try:
        for index, request in enumerate(requests):
            show_text(index, generation.stream_chunks(request))
            throughput = generation.tokens_per_second(request)
            print_result_details(output, prompt_of_completion[index], request.result(), throughput, checkpoint)
    except KeyboardInterrupt:
        output.stdout.end_line()
        raise
    if output.show_stats:
        output.write_note(format_stats(generation))


def _build_messages(text: PromptInput, system: str | None, checkpoint: "Checkpoint") -> list[dict[str, str]]:
    """Return the messages of a chat: the system message, if there is one, and the text as user message."""
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
    """Return the text of a prompt. Token ids are decoded, or listed if there is no tokenizer."""
    if isinstance(prompt, str):
        return prompt
    tokenizer = checkpoint.tokenizer
    return ",".join(map(str, prompt)) if tokenizer is None else tokenizer.decode(prompt)


def iter_text(chunks: Iterable[CompletionChunk], checkpoint: "Checkpoint") -> Iterable[str]:
    """Yield the text of each chunk, or its token ids if there is no tokenizer."""
    separator, has_tokenizer = "", checkpoint.tokenizer is not None
    for chunk in chunks:
        if has_tokenizer:
            yield chunk.text
        for token in () if has_tokenizer else chunk.tokens:
            yield f"{separator}{token}"
            separator = ","


def _print_completion(
    output: OutputWriter, prompt: str, texts: Iterable[str], index: int | None, *, is_continuation: bool
) -> None:
    """Print one completion while it is generated. If the prompt is echoed, print the prompt first.

    If the completion does not continue the prompt (a reply to a chat message), it starts on a new line. `index` is the
    number of the completion, or None if there is only one.
    """
    if output.as_json:
        for _ in texts:
            pass  # print_result_details prints the JSON object at the end
        return
    stdout = output.stdout
    if output.echo and (is_continuation or index is not None or output.echo_requested):
        if index:
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
    """Print a finished completion as JSON with --json, else its log-probabilities if they were requested."""
    if output.as_json:
        print_json({"prompt": prompt, **asdict(result), "tokens_per_second": tokens_per_second}, indent=None)
    elif result.logprobs is not None:
        _render_logprobs(result, checkpoint)


def _render_logprobs(result: Completion, checkpoint: "Checkpoint") -> None:
    """Print each token of a completion with its probability, and the most likely tokens at its position."""
    tokenizer = checkpoint.tokenizer

    def entry(token: int, logprob: float) -> tuple[str, str]:
        text = str(token) if tokenizer is None else repr(tokenizer.decode([token], skip_special_tokens=False))
        return escape_control_characters(text), f"{math.exp(logprob):.1%}"

    table = borderless_table("lrl", ["token", "probability", "most likely" if result.top_logprobs else ""])
    for index, (token, logprob) in enumerate(zip(result.tokens, result.logprobs or [], strict=False)):
        top = result.top_logprobs[index] if result.top_logprobs else {}
        text, probability = entry(token, logprob)
        table.add_row(Text(text), probability, Text("  ".join(" ".join(entry(*other)) for other in top.items())))
    print_without_wrapping(table)


def fill_masks(
    checkpoint: "Checkpoint",
    inputs: Sequence[PromptInput],
    unsupported_options: Sequence[str],
    top_k: int,
    output: OutputWriter,
) -> None:
    """Print the `top_k` most likely tokens for each mask token of the input texts, with an encoder."""
    if unsupported_options:
        option = f"--{unsupported_options[0].replace('_', '-')}".replace("compile-model", "compile")
        raise InputError(f"this model is an encoder, which fills masks, so {option} does not apply; leave it out")
    texts = [prompt for prompt in inputs if isinstance(prompt, str)]
    if checkpoint.tokenizer is None or len(texts) < len(inputs) or not texts:
        raise InputError("this model is an encoder, which fills masks; pass texts with a mask, and a tokenizer")
    predictions = fill_mask(checkpoint.model, checkpoint.tokenizer, texts, top_k=top_k)
    for text, masks in zip(texts, predictions, strict=True):
        if output.as_json:
            mask_data = [[prediction._asdict() for prediction in mask] for mask in masks]
            print_json({"prompt": text, "masks": mask_data}, indent=None)
        else:
            _render_mask_predictions(text, masks, output)


def _render_mask_predictions(text: str, masks: Sequence[Sequence[FillMaskPrediction]], output: OutputWriter) -> None:
    if output.echo:
        output.stdout.write_dim(f"{text}\n")
    for mask in masks:
        table = borderless_table("rll")
        for prediction in mask:
            token, filled = map(escape_control_characters, (prediction.token, prediction.text))
            table.add_row(f"{prediction.probability:.1%}", Text(token, "bold"), Text(filled))
        print_without_wrapping(table)


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
    if generation.started_requests:
        parts.append(f"{generation.time_to_first_token * 1e3:,.0f} ms to first token")
    if (utilization := _bandwidth_utilization(generation)) is not None:
        parts.append(f"{utilization:.0%} of memory bandwidth")
    return ", ".join(parts)


def _bandwidth_utilization(generation: TimedGeneration) -> float | None:
    """Return the rate of reading weights and KV cache as a fraction of the copy bandwidth, or None if not known."""
    from cutaway.bench.throughput import DTYPE_NAMES, estimate_inference_size, get_copy_bandwidth

    config = generation.engine.config
    dtype = DTYPE_NAMES.get(config.model.dtype)
    if dtype is None or generation.num_steps < 2 or generation.decode_seconds <= 0:
        return None
    bandwidth = get_copy_bandwidth(config.model.device)
    if bandwidth is None:
        return None
    batch_size = max(1, round(generation.num_tokens / (generation.num_steps + 1)))
    estimate = estimate_inference_size(
        config.model.config, dtype, config.weight_bits, batch_size, generation.mean_context_length
    )
    num_bytes = generation.num_steps * estimate.decode_workload(batch_size).min_bytes
    return num_bytes / bandwidth / generation.decode_seconds
