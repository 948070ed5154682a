"""`cutaway generate`: a prompt, and what a model makes of it."""

import re
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.model_loading import DType, load_checkpoint
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
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
"""What an encoder's user may say; all else is about answers."""


def _panel_option(*names: str, panel: str, **kwargs: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, show_default=False, **kwargs)


def generate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A model's directory, a .gguf file or a hub id.")],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Texts; - is standard input.", show_default=False)
    ] = None,
    file: Annotated[
        list[Path] | None,
        _panel_option("--file", "-f", panel=PROMPTS, metavar="FILE", help="A prompt in a file; repeatable."),
    ] = None,
    lines: Annotated[
        bool, _panel_option("--lines", panel=PROMPTS, help="Each line of files and input is a prompt.")
    ] = False,
    token_ids: Annotated[
        list[str] | None,
        _panel_option("--token-ids", panel=PROMPTS, metavar="1,2,3", help="A prompt of token ids; repeatable."),
    ] = None,
    message: Annotated[
        bool,
        _panel_option("--message", "-m", panel=PROMPTS, help="Each prompt is a chat's message, and gets one answer."),
    ] = False,
    chat: Annotated[bool, _panel_option("--chat", "-c", panel=PROMPTS, help="A conversation; /quit ends it.")] = False,
    system: Annotated[
        str | None, _panel_option("--system", panel=PROMPTS, metavar="TEXT", help="What a chat begins with.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        _panel_option("--max-new-tokens", "-n", panel=STOPPING, help="Tokens of an answer; 256, in a chat 1,024."),
    ] = None,
    min_new_tokens: Annotated[
        int | None, _panel_option("--min-new-tokens", panel=STOPPING, help="No end before so many.")
    ] = None,
    stop: Annotated[
        list[str] | None, _panel_option("--stop", panel=STOPPING, metavar="TEXT", help="End before this; repeatable.")
    ] = None,
    stop_token_ids: Annotated[
        list[str] | None,
        _panel_option("--stop-token-ids", panel=STOPPING, metavar="1,2", help="End at one of these ids."),
    ] = None,
    ignore_eos: Annotated[
        bool, _panel_option("--ignore-eos", panel=STOPPING, help="Go on after the end of text.")
    ] = False,
    temperature: Annotated[
        float | None,
        _panel_option(
            "--temperature", "-t", panel=SAMPLING, help="0, the likeliest token; 1 with filters or --num-samples."
        ),
    ] = None,
    top_k: Annotated[
        int | None, _panel_option("--top-k", panel=SAMPLING, help="Only the K likeliest; or so many fillings.")
    ] = None,
    top_p: Annotated[
        float | None, _panel_option("--top-p", panel=SAMPLING, help="Only the likeliest that sum up to P.")
    ] = None,
    min_p: Annotated[
        float | None, _panel_option("--min-p", panel=SAMPLING, help="None below this share of the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        _panel_option("--repetition-penalty", panel=SAMPLING, help="Against all tokens so far; 1.1 is usual."),
    ] = None,
    presence_penalty: Annotated[
        float | None, _panel_option("--presence-penalty", panel=SAMPLING, help="Against tokens of the answer.")
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        _panel_option("--frequency-penalty", panel=SAMPLING, help="And again for each time they are in it."),
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        _panel_option("--logit-bias", panel=SAMPLING, metavar="ID=X", help="Added to a logit."),
    ] = None,
    suppress_tokens: Annotated[
        list[str] | None, _panel_option("--suppress-tokens", panel=SAMPLING, metavar="1,2", help="Never these ids.")
    ] = None,
    seed: Annotated[
        int | None, _panel_option("--seed", panel=SAMPLING, help="The same seed draws the same answer.")
    ] = None,
    num_samples: Annotated[
        int | None, _panel_option("--num-samples", panel=SAMPLING, help="Answers to each prompt.")
    ] = None,
    beams: Annotated[
        int | None, _panel_option("--beams", panel=BEAM_SEARCH, help="Search with so many instead of drawing.")
    ] = None,
    length_penalty: Annotated[
        float | None,
        _panel_option("--length-penalty", panel=BEAM_SEARCH, help="Above 1 longer answers win, below shorter."),
    ] = None,
    early_stopping: Annotated[
        EarlyStopping | None,
        _panel_option("--early-stopping", panel=BEAM_SEARCH, help="Whether to stop at the first ends."),
    ] = None,
    device: Annotated[
        str | None, _panel_option("--device", panel=MODEL_OPTIONS, help="cpu or cuda; the GPU unless there is none.")
    ] = None,
    dtype: Annotated[
        DType | None, _panel_option("--dtype", panel=MODEL_OPTIONS, help="Of the weights; as stored unless given.")
    ] = None,
    weight_bits: Annotated[
        int | None,
        _panel_option(
            "--weight-bits", panel=MODEL_OPTIONS, metavar="16|8|4", help="Of a weight while decoding; 4 on GPUs."
        ),
    ] = None,
    compile_model: Annotated[
        bool,
        _panel_option("--compile", panel=MODEL_OPTIONS, help="Compile the steps on a CPU: long answers come faster."),
    ] = False,
    draft_model: Annotated[
        str | None,
        _panel_option(
            "--draft-model", panel=MODEL_OPTIONS, metavar="SOURCE", help="A smaller model that guesses ahead, or ngram."
        ),
    ] = None,
    cache_implementation: Annotated[
        CacheKind | None,
        _panel_option("--cache-implementation", panel=MODEL_OPTIONS, help="How keys and values are kept."),
    ] = None,
    kv_cache_dtype: Annotated[
        CacheDType | None, _panel_option("--kv-cache-dtype", panel=MODEL_OPTIONS, help="And in which type.")
    ] = None,
    max_model_len: Annotated[
        str | None,
        _panel_option("--max-model-len", panel=MODEL_OPTIONS, metavar="N", help="Prompt and answer; 8Ki is 8,192."),
    ] = None,
    max_num_seqs: Annotated[
        int | None, _panel_option("--max-num-seqs", panel=MODEL_OPTIONS, help="Texts at once; up to 32 unless given.")
    ] = None,
    logprobs: Annotated[
        int | None, _panel_option("--logprobs", panel=OUTPUT, help="Each token's probability, and N alternatives.")
    ] = None,
    echo: Annotated[
        bool | None, _panel_option("--echo/--no-echo", panel=OUTPUT, help="The prompt too; so on a terminal.")
    ] = None,
    show_stats: Annotated[
        bool | None, _panel_option("--stats/--no-stats", panel=OUTPUT, help="How fast it went; so on a terminal.")
    ] = None,
    as_json: Annotated[bool, _panel_option("--json", panel=OUTPUT, help="For machines: a JSON object a line.")] = False,
) -> None:
    """Continue a text, answer a message, fill a mask, or hold a conversation.

    Example: cutaway generate ./gpt2 "Once upon a time" --max-new-tokens 100 --temperature 0.8 --seed 1

    Example: cutaway generate SmolLM2.gguf --message "What is the capital of Italy"

    Example: cutaway generate SmolLM2.gguf --chat --system "You are brief."

    Example: cutaway generate ./bert "Paris is the [MASK] of France."

    Example: cat questions.txt | cutaway generate SmolLM2.gguf --message --lines --json
    """
    told = dict(locals())
    _check_options(told)
    from cutaway.cli.prompts import collect_prompts, parse_logit_bias, parse_token_ids

    given = (
        []
        if chat and not (prompts or file)
        else collect_prompts(prompts or [], file or [], token_ids or [], split_lines=lines)
    )
    from cutaway.cli.views import generation_output
    from cutaway.generate.sampling.sampling_params import SamplingParams, resolve_temperature
    from cutaway.size.units import parse_count

    fields = {name: told.get(name) for name in SamplingParams.__dataclass_fields__} | {"n": num_samples}
    settings: dict[str, Any] = {name: value for name, value in fields.items() if value is not None and value != []}
    settings |= {"logit_bias": parse_logit_bias(logit_bias)} if logit_bias else {}
    for name, flag in (("suppress_tokens", "--suppress-tokens"), ("stop_token_ids", "--stop-token-ids")):
        if name in settings:
            settings[name] = [number for listed in settings[name] for number in parse_token_ids(flag, listed)]
    asked = _build_sampling_params(settings if beams is not None else resolve_temperature(settings))
    length = None if max_model_len is None else parse_count(max_model_len)
    import torch

    engine_options: dict[str, Any] = {
        "max_model_len": length,
        "cache_implementation": cache_implementation or "auto",
        "kv_cache_dtype": None if kv_cache_dtype is None else getattr(torch, kv_cache_dtype),
    }
    engine_options |= {
        name: value for name, value in (("weight_bits", weight_bits), ("compile", compile_model)) if value
    }
    if weight_bits is not None and weight_bits not in (16, 8, 4):
        raise InputError(f"--weight-bits is {weight_bits}; weights can have 16, 8 or 4")
    checkpoint = load_checkpoint(source, device, dtype, quiet=as_json)
    if draft_model is not None:
        engine_options["draft_model"] = (
            draft_model if draft_model == "ngram" else load_checkpoint(draft_model, device, dtype, quiet=as_json)
        )
    show = generation_output.OutputWriter(echo=echo, show_stats=show_stats, as_json=as_json)
    chosen = {"beams": beams, "length_penalty": length_penalty, "early_stopping": _parse_early_stopping(early_stopping)}
    search = {name: value for name, value in chosen.items() if value is not None}
    if temperature is None and beams is None:
        asked = _resolve_temperature(asked, checkpoint)
    if "decoder" not in checkpoint.model.stacks:
        said = (name for name, value in told.items() if value is not None and value is not False and value != [])
        generation_output.fill_masks(
            checkpoint, given, [name for name in said if name not in FILL_MASK_OPTIONS], top_k or 5, show
        )
    elif chat:
        from cutaway.cli.chat_session import run_chat

        run_chat(checkpoint, [str(each) for each in given], system, asked, engine_options, show)
    else:
        generation_output.generate_and_print(
            checkpoint,
            given,
            asked,
            search,
            engine_options | {"max_num_seqs": max_num_seqs},
            show,
            as_messages=message,
            system=system,
        )


def _check_options(options: dict[str, Any]) -> None:
    """What can be told before anything is read."""
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
                raise InputError(f"--{name.replace('_', '-')} is not for --chat; leave one of the two out")
        if (options["num_samples"] or 1) > 1:
            raise InputError(
                "--num-samples gives several answers, and --chat goes on from one; leave one of the two out"
            )
    elif options["system"] is not None and not options["message"]:
        raise InputError("--system begins a chat; add --chat or --message")
    if options["message"] and options["token_ids"]:
        raise InputError(
            "--token-ids are no message that a chat template could hold; give texts, or leave --message out"
        )


def _build_sampling_params(fields: dict[str, Any]) -> "SamplingParams":
    """The settings, or what is wrong with them in the words of the command line."""
    from cutaway.generate.sampling.sampling_params import SamplingParams

    try:
        return SamplingParams(**fields)
    except InputError as error:
        flags = {name: f"--{name.replace('_', '-')}" for name in SamplingParams.__dataclass_fields__}
        flags |= {"n": "--num-samples"}
        names = r"^[a-z]+\b|\b[a-z]+(_[a-z]+)+\b"  # a single word, such as stop, is a name only where it comes first
        raise InputError(re.sub(names, lambda found: flags.get(found[0], found[0]), str(error))) from None


def _resolve_temperature(params: "SamplingParams", checkpoint: "Checkpoint") -> "SamplingParams":
    """Several answers are drawn, unless the checkpoint's own way is a search, which finds different ones."""
    from cutaway.generate.generation_config import unpack_checkpoint
    from cutaway.generate.search.beam_generation import default_num_beams

    model, _, start = unpack_checkpoint(checkpoint)
    if params.n == 1 or params.temperature or default_num_beams(model, start, params):
        return params
    return replace(params, temperature=1.0)


def _parse_early_stopping(choice: EarlyStopping | None) -> Any:
    return None if choice is None else {"true": True, "false": False, "never": "never"}[choice]
