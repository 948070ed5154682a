"""`cutaway generate`: text generation, chat, mask filling and classification."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cutaway.cli import options as opt
from cutaway.cli.model_loading import load_checkpoint
from cutaway.cli.parallel_processes import start_processes
from cutaway.errors import InputError
from cutaway.pretrained import DEFAULT_MODEL, EXAMPLE_TEXTS

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.cli.timed_generation import GenerateOptions
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.generate.sampling.sampling_params import SamplingParams


CacheKind = Literal["auto", "full", "ring", "paged"]
CacheDType = Literal["int8", "float32", "float16", "bfloat16"]
EarlyStopping = Literal["true", "false", "never"]
FILL_MASK_OPTIONS = frozenset(
    [
        "source",
        "prompts",
        "file",
        "lines",
        "token_ids",
        "top_k",
        "adapter",
        "device",
        "device_map",
        "dtype",
        "echo",
        "show_stats",
        "as_json",
    ]
)
"""Options that apply to mask filling with an encoder. The other options are for text generation."""
CLASSIFY_OPTIONS = FILL_MASK_OPTIONS - {"top_k", "token_ids"}
"""Options that apply to classification with a task head."""
NON_CHAT_OPTIONS = (
    "message", "token_ids", "beams", "length_penalty", "early_stopping", "lines", "max_num_seqs", "draft_model",
    "num_samples",
)  # fmt: skip
"""Options that cannot be combined with --chat."""


def _panel(title: str) -> Callable[..., object]:
    """Return a function like `option` that puts the option into one help panel."""
    return partial(opt.option, panel=title)


_prompt, _sampling, _stopping = _panel("Prompts"), _panel("Sampling"), _panel("Stopping")
_beam_search, _engine, _output = _panel("Beam search"), _panel("Engine"), _panel("Output")
_structured = _panel("Structured output")


def generate(
    source: Annotated[str, opt.source_argument("Model directory, .gguf file or hub id.")] = DEFAULT_MODEL,
    prompts: Annotated[
        list[str] | None, opt.argument("Prompts; - reads standard input.", metavar="PROMPT", show_default=False)
    ] = None,
    file: Annotated[list[Path] | None, _prompt("Prompt file; repeatable.", "--file", "-f", metavar="FILE")] = None,
    lines: Annotated[bool, _prompt("Treat each line of files and standard input as a prompt.", "--lines")] = False,
    token_ids: Annotated[list[str] | None, _prompt("Prompt as token ids; repeatable.", metavar="1,2,3")] = None,
    message: Annotated[bool, _prompt("Treat each prompt as a chat message to reply to.", "--message", "-m")] = False,
    chat: Annotated[bool, _prompt("Interactive chat; /quit exits.", "--chat", "-c")] = False,
    system: Annotated[str | None, _prompt("System message of a chat.", metavar="TEXT")] = None,
    max_new_tokens: Annotated[
        int | None,
        _stopping("Maximum number of tokens to generate; default 256, in a chat 1,024.", "--max-new-tokens", "-n"),
    ] = None,
    min_new_tokens: Annotated[int | None, _stopping("Minimum number of tokens to generate before stopping.")] = None,
    stop: Annotated[list[str] | None, _stopping("Stop string, not in the output; repeatable.", metavar="TEXT")] = None,
    stop_token_ids: Annotated[list[str] | None, _stopping("Token ids that stop generation.", metavar="1,2")] = None,
    ignore_eos: Annotated[bool, _stopping("Continue after the end-of-sequence token.", "--ignore-eos")] = False,
    temperature: Annotated[
        float | None,
        _sampling(
            "Sampling temperature; default 0 (greedy), or 1 with top-k, top-p, min-p or --num-samples.",
            "--temperature",
            "-t",
        ),
    ] = None,
    top_k: Annotated[
        int | None, _sampling("Sample from the K most likely tokens; for encoders, number of predictions per mask.")
    ] = None,
    top_p: Annotated[float | None, _sampling("Nucleus sampling: most likely tokens with total probability P.")] = None,
    min_p: Annotated[float | None, _sampling("Minimum probability relative to the most likely token.")] = None,
    repetition_penalty: Annotated[float | None, _sampling("Penalty on prompt and output tokens; 1.1 is usual.")] = None,
    presence_penalty: Annotated[float | None, _sampling("Penalty on tokens that are in the output.")] = None,
    frequency_penalty: Annotated[float | None, _sampling("Penalty on output tokens for each occurrence.")] = None,
    logit_bias: Annotated[list[str] | None, _sampling("Bias of a token's logit; repeatable.", metavar="ID=X")] = None,
    suppress_tokens: Annotated[list[str] | None, _sampling("Token ids that are not generated.", metavar="1,2")] = None,
    seed: Annotated[int | None, _sampling("Random seed of sampling.")] = None,
    num_samples: Annotated[int | None, _sampling("Number of completions per prompt.")] = None,
    schema: Annotated[
        str | None, _structured("JSON schema that the output must match: a file or JSON text.", metavar="FILE")
    ] = None,
    regex: Annotated[str | None, _structured("Regular expression that the output must match.")] = None,
    choice: Annotated[list[str] | None, _structured("Text that the output may be; repeatable.")] = None,
    grammar: Annotated[
        str | None, _structured("Grammar of the output, Lark or GBNF: a file or the text.", metavar="FILE")
    ] = None,
    beams: Annotated[int | None, _beam_search("Beam search with this number of beams.")] = None,
    length_penalty: Annotated[
        float | None, _beam_search("Exponent of the length in beam scores; above 1 favors longer outputs.")
    ] = None,
    early_stopping: Annotated[
        EarlyStopping | None, _beam_search("Stop when there are as many finished candidates as beams.")
    ] = None,
    adapter: Annotated[str | None, _engine(opt.ADAPTER_HELP, metavar="DIR")] = None,
    device: Annotated[str | None, _engine("Device: cpu or cuda; default cuda if available.")] = None,
    devices: Annotated[int | None, _engine(opt.DEVICES_HELP, min=1)] = None,
    device_map: Annotated[opt.DeviceMap | None, _engine(opt.DEVICE_MAP_HELP)] = None,
    dtype: Annotated[opt.DType | None, _engine("Data type of the weights; default as stored.")] = None,
    weight_bits: Annotated[int | None, _engine(opt.WEIGHT_BITS_HELP, metavar="16|8|4")] = None,
    compile_model: Annotated[bool, _engine("Compile CPU decode steps; faster for long outputs.", "--compile")] = False,
    draft_model: Annotated[str | None, _engine("Speculative decoding: draft model or ngram.", metavar="SOURCE")] = None,
    cache_implementation: Annotated[CacheKind | None, _engine("Layout of the KV cache.")] = None,
    kv_cache_dtype: Annotated[CacheDType | None, _engine("Data type of the KV cache.")] = None,
    max_model_len: Annotated[str | None, _engine(opt.MAX_MODEL_LEN_HELP, metavar="N")] = None,
    max_num_seqs: Annotated[int | None, _engine(opt.MAX_NUM_SEQS_HELP)] = None,
    logprobs: Annotated[int | None, _output("Show token probabilities and N alternatives.")] = None,
    echo: Annotated[bool | None, _output("Print the prompt; by default on a terminal.", "--echo/--no-echo")] = None,
    show_stats: Annotated[
        bool | None, _output("Print the throughput; by default on a terminal.", "--stats/--no-stats")
    ] = None,
    as_json: Annotated[bool, _output("Print one JSON object per completion.", "--json")] = False,
) -> None:
    """Generate text from prompts or chat messages, chat interactively, fill masks, or classify texts.

    Example: cutaway generate tiny-english "Once upon a time" --max-new-tokens 100 --temperature 0.8 --seed 1

    Example: cutaway generate SmolLM2.gguf --message "What is the capital of Italy"

    Example: cutaway generate SmolLM2.gguf --chat --system "You are brief."

    Example: cutaway generate SmolLM2.gguf --message "Name a city in Italy" --schema '{"type": "object"}'

    Example: cutaway generate tiny-english-encoder "The [MASK] sat on the mat."

    Example: cutaway generate runs/classify "Win a free prize now"

    Example: cat questions.txt | cutaway generate SmolLM2.gguf --message --lines --json
    """
    options: dict[str, Any] = dict(locals())
    _check_options(options)
    opt.check_weight_bits(weight_bits)
    from cutaway.cli.prompts import PromptInput, collect_prompts

    starts_empty = chat and not (prompts or file)
    inputs: list[PromptInput] = []
    if not starts_empty:
        default = EXAMPLE_TEXTS.get(source)
        inputs = collect_prompts(prompts or [], file or [], token_ids or [], split_lines=lines, default=default)
    params = _parse_sampling_params(options)
    max_len = opt.parse_length(max_model_len)
    import torch

    from cutaway.cli.views import generation_output

    num_processes = start_processes(devices, source, device, dtype)
    checkpoint = load_checkpoint(
        source,
        device,
        dtype,
        quiet=as_json,
        adapters=adapter,
        device_map=device_map,
        tensor_parallel_size=num_processes,
        dequantize=weight_bits is not None or compile_model,
    )
    draft: Checkpoint | str | None = draft_model
    if draft_model is not None and draft_model != "ngram":
        draft = load_checkpoint(draft_model, device, dtype, quiet=as_json, dequantize=False)
    engine_options: GenerateOptions = {
        "max_model_len": max_len,
        "max_num_seqs": max_num_seqs,
        "cache_implementation": cache_implementation or "auto",
        "kv_cache_dtype": None if kv_cache_dtype is None else getattr(torch, kv_cache_dtype),
        "weight_bits": weight_bits,
        "compile": compile_model or None,
        "draft_model": draft,
    }
    output = generation_output.OutputWriter(echo=echo, show_stats=show_stats, as_json=as_json)
    if temperature is None and beams is None:
        params = _resolve_temperature(params, checkpoint)
    is_set = {name: value is not None and value is not False and value != [] for name, value in options.items()}
    if checkpoint.config.head.kind != "lm":
        from cutaway.cli.views.classification_output import print_labels

        unsupported = [name for name in options if is_set[name] and name not in CLASSIFY_OPTIONS]
        print_labels(checkpoint, inputs, unsupported, output)
    elif "decoder" not in checkpoint.model.stacks:
        unsupported = [name for name in options if is_set[name] and name not in FILL_MASK_OPTIONS]
        generation_output.fill_masks(checkpoint, inputs, unsupported, top_k or 5, output)
    elif chat:
        from cutaway.cli.chat_session import run_chat

        run_chat(checkpoint, [str(prompt) for prompt in inputs], system, params, engine_options, output)
    else:
        stopping = {None: None, "true": True, "false": False, "never": "never"}[early_stopping]
        beam_options = {"beams": beams, "length_penalty": length_penalty, "early_stopping": stopping}
        search_options = {name: value for name, value in beam_options.items() if value is not None}
        generation_output.generate_and_print(
            checkpoint, inputs, params, search_options, engine_options, output, as_messages=message, system=system
        )


def _check_options(options: dict[str, Any]) -> None:
    """Raise for invalid combinations of options. This is called before the model is loaded."""
    if options["chat"]:
        for name in NON_CHAT_OPTIONS:
            if options[name]:
                raise InputError(f"--{name.replace('_', '-')} cannot be combined with --chat; leave one of them out")
    elif options["system"] is not None and not options["message"]:
        raise InputError("--system is the system message of a chat; add --chat or --message")
    if options["message"] and options["token_ids"]:
        raise InputError("--token-ids cannot be used with --message, which needs text; leave one of them out")


def _parse_sampling_params(options: dict[str, Any]) -> "SamplingParams":
    """Build SamplingParams from the options. A field has the name of its option, except n, which is --num-samples."""
    from cutaway.cli.prompts import parse_logit_bias, parse_token_ids, read_text_file
    from cutaway.generate.sampling.sampling_params import SamplingParams, resolve_temperature

    fields = {name: options.get(name) for name in SamplingParams.__dataclass_fields__} | {"n": options["num_samples"]}
    given = {name: value for name, value in fields.items() if value is not None and value != []}
    if "logit_bias" in given:
        given["logit_bias"] = parse_logit_bias(given["logit_bias"])
    for name, marks in (("schema", ("{",)), ("grammar", ("start:", "::="))):  # marks of a text; else it is a file
        if name in given and not any(mark in given[name] for mark in marks):
            given[name] = read_text_file(Path(given[name]))
    for name, flag in (("suppress_tokens", "--suppress-tokens"), ("stop_token_ids", "--stop-token-ids")):
        if name in given:
            given[name] = [number for token_list in given[name] for number in parse_token_ids(flag, token_list)]
    return _build_sampling_params(given if options["beams"] is not None else resolve_temperature(given))


def _build_sampling_params(fields: dict[str, Any]) -> "SamplingParams":
    """Build SamplingParams. Error messages name the options instead of the fields."""
    from cutaway.generate.sampling.sampling_params import SamplingParams

    try:
        return SamplingParams(**fields)
    except InputError as error:
        flags = {name: f"--{name.replace('_', '-')}" for name in SamplingParams.__dataclass_fields__}
        flags |= {"n": "--num-samples"}
        pattern = r"^[a-z]+\b|\b[a-z]+(_[a-z]+)+\b"  # a single word, such as stop, is a field name only at the start
        raise InputError(re.sub(pattern, lambda match: flags.get(match[0], match[0]), str(error))) from None


def _resolve_temperature(params: "SamplingParams", checkpoint: "Checkpoint") -> "SamplingParams":
    """Return `params` with temperature 1 instead of 0 if n > 1, unless the checkpoint defaults to beam search."""
    from cutaway.generate.generation_config import unpack_checkpoint
    from cutaway.generate.search.beam_generation import default_num_beams

    model, _, generation_config = unpack_checkpoint(checkpoint)
    if params.n == 1 or params.temperature or default_num_beams(model, generation_config, params):
        return params
    return replace(params, temperature=1.0)
