"""`cutaway generate`: text generation, chat, mask filling."""

import re
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.model_loading import DType, load_checkpoint
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.generate.sampling.sampling_params import SamplingParams


class CacheKind(StrEnum):
    auto = "auto"
    full = "full"
    ring = "ring"
    paged = "paged"


class CacheDType(StrEnum):
    int8 = "int8"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class EarlyStopping(StrEnum):
    true = "true"
    false = "false"
    never = "never"


PROMPTS, SAMPLING, STOPPING = "Prompts", "Sampling", "Stopping"
BEAM_SEARCH, MODEL_OPTIONS, OUTPUT = "Beam search", "Engine", "Output"
FILL_MASK_OPTIONS = {
    "source",
    "prompts",
    "file",
    "lines",
    "token_ids",
    "top_k",
    "device",
    "dtype",
    "echo",
    "show_stats",
    "as_json",
}
"""Options that apply to mask filling with an encoder; the others are for text generation."""


def _panel_option(*names: str, panel: str, **kwargs: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, show_default=False, **kwargs)


def generate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Model directory, .gguf file or hub id.")],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; - reads standard input.", show_default=False)
    ] = None,
    file: Annotated[
        list[Path] | None,
        _panel_option("--file", "-f", panel=PROMPTS, metavar="FILE", help="File with a prompt; repeatable."),
    ] = None,
    lines: Annotated[
        bool, _panel_option("--lines", panel=PROMPTS, help="Treat each line of files and standard input as a prompt.")
    ] = False,
    token_ids: Annotated[
        list[str] | None,
        _panel_option("--token-ids", panel=PROMPTS, metavar="1,2,3", help="Prompt as token ids; repeatable."),
    ] = None,
    message: Annotated[
        bool,
        _panel_option(
            "--message", "-m", panel=PROMPTS, help="Treat each prompt as a chat message and generate a reply."
        ),
    ] = False,
    chat: Annotated[bool, _panel_option("--chat", "-c", panel=PROMPTS, help="Interactive chat; /quit exits.")] = False,
    system: Annotated[
        str | None, _panel_option("--system", panel=PROMPTS, metavar="TEXT", help="System message of a chat.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        _panel_option(
            "--max-new-tokens", "-n", panel=STOPPING, help="Maximum tokens to generate; default 256, in a chat 1,024."
        ),
    ] = None,
    min_new_tokens: Annotated[
        int | None,
        _panel_option("--min-new-tokens", panel=STOPPING, help="Minimum tokens to generate before stopping."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        _panel_option(
            "--stop", panel=STOPPING, metavar="TEXT", help="Stop string, not part of the output; repeatable."
        ),
    ] = None,
    stop_token_ids: Annotated[
        list[str] | None,
        _panel_option("--stop-token-ids", panel=STOPPING, metavar="1,2", help="Token ids that stop generation."),
    ] = None,
    ignore_eos: Annotated[
        bool, _panel_option("--ignore-eos", panel=STOPPING, help="Continue after the end-of-sequence token.")
    ] = False,
    temperature: Annotated[
        float | None,
        _panel_option(
            "--temperature",
            "-t",
            panel=SAMPLING,
            help="Sampling temperature; default 0 (greedy), or 1 with top-k, top-p, min-p or --num-samples.",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        _panel_option(
            "--top-k", panel=SAMPLING, help="Sample from the K most likely tokens; for encoders, predictions per mask."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        _panel_option("--top-p", panel=SAMPLING, help="Nucleus sampling: most likely tokens with total probability P."),
    ] = None,
    min_p: Annotated[
        float | None,
        _panel_option("--min-p", panel=SAMPLING, help="Minimum probability relative to the most likely token."),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        _panel_option(
            "--repetition-penalty", panel=SAMPLING, help="Penalty on tokens of the prompt and the output; 1.1 is usual."
        ),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        _panel_option("--presence-penalty", panel=SAMPLING, help="Penalty on tokens that are in the output."),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        _panel_option("--frequency-penalty", panel=SAMPLING, help="Penalty on output tokens per occurrence."),
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        _panel_option(
            "--logit-bias", panel=SAMPLING, metavar="ID=X", help="Bias added to the logit of a token id; repeatable."
        ),
    ] = None,
    suppress_tokens: Annotated[
        list[str] | None,
        _panel_option("--suppress-tokens", panel=SAMPLING, metavar="1,2", help="Token ids that are never generated."),
    ] = None,
    seed: Annotated[int | None, _panel_option("--seed", panel=SAMPLING, help="Random seed of sampling.")] = None,
    num_samples: Annotated[
        int | None, _panel_option("--num-samples", panel=SAMPLING, help="Number of completions per prompt.")
    ] = None,
    beams: Annotated[
        int | None, _panel_option("--beams", panel=BEAM_SEARCH, help="Beam search with this number of beams.")
    ] = None,
    length_penalty: Annotated[
        float | None,
        _panel_option(
            "--length-penalty",
            panel=BEAM_SEARCH,
            help="Exponent of the length in beam scores; above 1 favors longer outputs.",
        ),
    ] = None,
    early_stopping: Annotated[
        EarlyStopping | None,
        _panel_option(
            "--early-stopping", panel=BEAM_SEARCH, help="Stop when there are as many finished candidates as beams."
        ),
    ] = None,
    device: Annotated[
        str | None,
        _panel_option("--device", panel=MODEL_OPTIONS, help="Device: cpu or cuda; default cuda if available."),
    ] = None,
    dtype: Annotated[
        DType | None, _panel_option("--dtype", panel=MODEL_OPTIONS, help="Data type of the weights; default as stored.")
    ] = None,
    weight_bits: Annotated[
        int | None,
        _panel_option(
            "--weight-bits",
            panel=MODEL_OPTIONS,
            metavar="16|8|4",
            help="Weight quantization during decode; 4 requires a GPU.",
        ),
    ] = None,
    compile_model: Annotated[
        bool,
        _panel_option("--compile", panel=MODEL_OPTIONS, help="Compile decode steps on a CPU; faster for long outputs."),
    ] = False,
    draft_model: Annotated[
        str | None,
        _panel_option(
            "--draft-model",
            panel=MODEL_OPTIONS,
            metavar="SOURCE",
            help="Speculative decoding: a smaller draft model, or ngram.",
        ),
    ] = None,
    cache_implementation: Annotated[
        CacheKind | None,
        _panel_option("--cache-implementation", panel=MODEL_OPTIONS, help="Layout of the KV cache."),
    ] = None,
    kv_cache_dtype: Annotated[
        CacheDType | None, _panel_option("--kv-cache-dtype", panel=MODEL_OPTIONS, help="Data type of the KV cache.")
    ] = None,
    max_model_len: Annotated[
        str | None,
        _panel_option(
            "--max-model-len",
            panel=MODEL_OPTIONS,
            metavar="N",
            help="Maximum length of prompt and output; 8Ki is 8,192.",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        _panel_option(
            "--max-num-seqs", panel=MODEL_OPTIONS, help="Maximum number of sequences per batch; default up to 32."
        ),
    ] = None,
    logprobs: Annotated[
        int | None, _panel_option("--logprobs", panel=OUTPUT, help="Show token probabilities and N alternatives.")
    ] = None,
    echo: Annotated[
        bool | None, _panel_option("--echo/--no-echo", panel=OUTPUT, help="Print the prompt; default on a terminal.")
    ] = None,
    show_stats: Annotated[
        bool | None, _panel_option("--stats/--no-stats", panel=OUTPUT, help="Print throughput; default on a terminal.")
    ] = None,
    as_json: Annotated[
        bool, _panel_option("--json", panel=OUTPUT, help="Print one JSON object per completion.")
    ] = False,
) -> None:
    """Generate text from prompts or chat messages, chat interactively, or fill masks.

    Example: cutaway generate ./gpt2 "Once upon a time" --max-new-tokens 100 --temperature 0.8 --seed 1

    Example: cutaway generate SmolLM2.gguf --message "What is the capital of Italy"

    Example: cutaway generate SmolLM2.gguf --chat --system "You are brief."

    Example: cutaway generate ./bert "Paris is the [MASK] of France."

    Example: cat questions.txt | cutaway generate SmolLM2.gguf --message --lines --json
    """
    options = dict(locals())
    _check_options(options)
    from cutaway.cli.prompts import collect_prompts, parse_logit_bias, parse_token_ids

    inputs = (
        []
        if chat and not (prompts or file)
        else collect_prompts(prompts or [], file or [], token_ids or [], split_lines=lines)
    )
    from cutaway.cli.views import generation_output
    from cutaway.generate.sampling.sampling_params import SamplingParams, resolve_temperature
    from cutaway.size.units import parse_count

    fields = {name: options.get(name) for name in SamplingParams.__dataclass_fields__} | {"n": num_samples}
    sampling_options: dict[str, Any] = {
        name: value for name, value in fields.items() if value is not None and value != []
    }
    sampling_options |= {"logit_bias": parse_logit_bias(logit_bias)} if logit_bias else {}
    for name, flag in (("suppress_tokens", "--suppress-tokens"), ("stop_token_ids", "--stop-token-ids")):
        if name in sampling_options:
            sampling_options[name] = [
                number for token_list in sampling_options[name] for number in parse_token_ids(flag, token_list)
            ]
    params = _build_sampling_params(sampling_options if beams is not None else resolve_temperature(sampling_options))
    max_len = None if max_model_len is None else parse_count(max_model_len)
    import torch

    engine_options: dict[str, Any] = {
        "max_model_len": max_len,
        "cache_implementation": cache_implementation or "auto",
        "kv_cache_dtype": None if kv_cache_dtype is None else getattr(torch, kv_cache_dtype),
    }
    engine_options |= {
        name: value for name, value in (("weight_bits", weight_bits), ("compile", compile_model)) if value
    }
    if weight_bits is not None and weight_bits not in (16, 8, 4):
        raise InputError(f"--weight-bits is {weight_bits}; use 16, 8 or 4")
    checkpoint = load_checkpoint(source, device, dtype, quiet=as_json)
    if draft_model is not None:
        engine_options["draft_model"] = (
            draft_model if draft_model == "ngram" else load_checkpoint(draft_model, device, dtype, quiet=as_json)
        )
    output = generation_output.OutputWriter(echo=echo, show_stats=show_stats, as_json=as_json)
    beam_options = {
        "beams": beams,
        "length_penalty": length_penalty,
        "early_stopping": _parse_early_stopping(early_stopping),
    }
    search_options = {name: value for name, value in beam_options.items() if value is not None}
    if temperature is None and beams is None:
        params = _resolve_temperature(params, checkpoint)
    if "decoder" not in checkpoint.model.stacks:
        set_options = (
            name for name, value in options.items() if value is not None and value is not False and value != []
        )
        generation_output.fill_masks(
            checkpoint, inputs, [name for name in set_options if name not in FILL_MASK_OPTIONS], top_k or 5, output
        )
    elif chat:
        from cutaway.cli.chat_session import run_chat

        run_chat(checkpoint, [str(prompt) for prompt in inputs], system, params, engine_options, output)
    else:
        generation_output.generate_and_print(
            checkpoint,
            inputs,
            params,
            search_options,
            engine_options | {"max_num_seqs": max_num_seqs},
            output,
            as_messages=message,
            system=system,
        )


def _check_options(options: dict[str, Any]) -> None:
    """Raise for invalid combinations of options, before loading the model."""
    if options["chat"]:
        for name in (
            "message",
            "token_ids",
            "beams",
            "length_penalty",
            "early_stopping",
            "lines",
            "max_num_seqs",
            "draft_model",
        ):
            if options[name]:
                raise InputError(f"--{name.replace('_', '-')} cannot be combined with --chat; leave one of them out")
        if (options["num_samples"] or 1) > 1:
            raise InputError(
                "--num-samples generates several completions, and --chat continues from one; leave one of them out"
            )
    elif options["system"] is not None and not options["message"]:
        raise InputError("--system is the system message of a chat; add --chat or --message")
    if options["message"] and options["token_ids"]:
        raise InputError(
            "--token-ids cannot be used with --message, which applies a chat template to text; leave one of them out"
        )


def _build_sampling_params(fields: dict[str, Any]) -> "SamplingParams":
    """Build SamplingParams; errors name the options instead of the fields."""
    from cutaway.generate.sampling.sampling_params import SamplingParams

    try:
        return SamplingParams(**fields)
    except InputError as error:
        flags = {name: f"--{name.replace('_', '-')}" for name in SamplingParams.__dataclass_fields__}
        flags |= {"n": "--num-samples"}
        pattern = r"^[a-z]+\b|\b[a-z]+(_[a-z]+)+\b"  # a single word, such as stop, is a field name only at the start
        raise InputError(re.sub(pattern, lambda match: flags.get(match[0], match[0]), str(error))) from None


def _resolve_temperature(params: "SamplingParams", checkpoint: "Checkpoint") -> "SamplingParams":
    """Set temperature 1 for several completions, unless the checkpoint defaults to beam search."""
    from cutaway.generate.generation_config import unpack_checkpoint
    from cutaway.generate.search.beam_generation import default_num_beams

    model, _, generation_config = unpack_checkpoint(checkpoint)
    if params.n == 1 or params.temperature or default_num_beams(model, generation_config, params):
        return params
    return replace(params, temperature=1.0)


def _parse_early_stopping(choice: EarlyStopping | None) -> Any:
    return None if choice is None else {"true": True, "false": False, "never": "never"}[choice]
