"""`cutaway generate`: a prompt, and what a model makes of it."""

import re
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.convert import DType
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.generate.settings import Settings


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


class Early(StrEnum):
    yes = "yes"
    no = "no"
    never = "never"


PROMPTS, DRAWING, STOPPING = "Prompts", "How tokens are drawn", "How far"
BEAMS, MACHINE, SHOWING = "Beams", "Model and machine", "What is shown"

FILLING = {"source", "prompts", "file", "lines", "tokens", "top_k", "device", "dtype", "echo", "stats", "as_json"}
"""What an encoder's user may say; all else is about answers."""


def option(*names: str, panel: str, **how: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, show_default=False, **how)


def generate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A model's directory, a .gguf file or a hub id.")],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Texts; - is standard input.", show_default=False)
    ] = None,
    file: Annotated[
        list[Path] | None, option("--file", "-f", panel=PROMPTS, metavar="FILE", help="A prompt in a file; repeatable.")
    ] = None,
    lines: Annotated[bool, option("--lines", panel=PROMPTS, help="Each line of files and input is a prompt.")] = False,
    tokens: Annotated[
        list[str] | None, option("--tokens", panel=PROMPTS, metavar="1,2,3", help="A prompt of token ids; repeatable.")
    ] = None,
    message: Annotated[
        bool, option("--message", "-m", panel=PROMPTS, help="Each prompt is a chat's message, and gets one answer.")
    ] = False,
    chat: Annotated[bool, option("--chat", "-c", panel=PROMPTS, help="A conversation; /quit ends it.")] = False,
    system: Annotated[
        str | None, option("--system", panel=PROMPTS, metavar="TEXT", help="What a chat begins with.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        option("--max", "-n", "--max-new-tokens", panel=STOPPING, help="Tokens of an answer; 256, in a chat 1,024."),
    ] = None,
    min_new_tokens: Annotated[
        int | None, option("--min", "--min-new-tokens", panel=STOPPING, help="No end before so many.")
    ] = None,
    stop: Annotated[
        list[str] | None, option("--stop", panel=STOPPING, metavar="TEXT", help="End before this; repeatable.")
    ] = None,
    stop_tokens: Annotated[
        list[str] | None, option("--stop-tokens", panel=STOPPING, metavar="1,2", help="End at one of these ids.")
    ] = None,
    ignore_eos: Annotated[bool, option("--ignore-eos", panel=STOPPING, help="Go on after the end of text.")] = False,
    temperature: Annotated[
        float | None,
        option("--temperature", "-t", panel=DRAWING, help="0, the likeliest token; 1 with filters or --samples."),
    ] = None,
    top_k: Annotated[
        int | None, option("--top-k", panel=DRAWING, help="Only the K likeliest; or so many fillings.")
    ] = None,
    top_p: Annotated[
        float | None, option("--top-p", panel=DRAWING, help="Only the likeliest that sum up to P.")
    ] = None,
    min_p: Annotated[
        float | None, option("--min-p", panel=DRAWING, help="None below this share of the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, option("--repetition-penalty", panel=DRAWING, help="Against all tokens so far; 1.1 is usual.")
    ] = None,
    presence_penalty: Annotated[
        float | None, option("--presence-penalty", panel=DRAWING, help="Against tokens of the answer.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, option("--frequency-penalty", panel=DRAWING, help="And again for each time they are in it.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None, option("--bias", "--logit-bias", panel=DRAWING, metavar="ID=X", help="Added to a logit.")
    ] = None,
    banned: Annotated[
        list[str] | None, option("--ban", "--banned", panel=DRAWING, metavar="1,2", help="Never these ids.")
    ] = None,
    seed: Annotated[int | None, option("--seed", panel=DRAWING, help="The same seed draws the same answer.")] = None,
    samples: Annotated[int | None, option("--samples", panel=DRAWING, help="Answers to each prompt.")] = None,
    beams: Annotated[int | None, option("--beams", panel=BEAMS, help="Search with so many instead of drawing.")] = None,
    length_penalty: Annotated[
        float | None, option("--length-penalty", panel=BEAMS, help="Above 1 longer answers win, below shorter.")
    ] = None,
    early_stopping: Annotated[
        Early | None, option("--early-stopping", panel=BEAMS, help="Whether to stop at the first ends.")
    ] = None,
    device: Annotated[
        str | None, option("--device", panel=MACHINE, help="cpu or cuda; the GPU unless there is none.")
    ] = None,
    dtype: Annotated[
        DType | None, option("--dtype", panel=MACHINE, help="Of the weights; as stored unless given.")
    ] = None,
    bits: Annotated[
        int | None, option("--bits", panel=MACHINE, metavar="16|8|4", help="Of a weight while decoding; 4 on GPUs.")
    ] = None,
    compiled: Annotated[
        bool, option("--compile", panel=MACHINE, help="Compile the steps on a CPU: long answers come faster.")
    ] = False,
    draft: Annotated[
        str | None,
        option("--draft", panel=MACHINE, metavar="SOURCE", help="A smaller model that guesses ahead, or lookup."),
    ] = None,
    cache: Annotated[CacheKind | None, option("--cache", panel=MACHINE, help="How keys and values are kept.")] = None,
    cache_dtype: Annotated[CacheDType | None, option("--cache-dtype", panel=MACHINE, help="And in which type.")] = None,
    context: Annotated[
        str | None, option("--context", panel=MACHINE, metavar="N", help="Prompt and answer; 8Ki is 8,192.")
    ] = None,
    rows: Annotated[int | None, option("--rows", panel=MACHINE, help="Texts at once; up to 32 unless given.")] = None,
    logprobs: Annotated[
        int | None, option("--logprobs", panel=SHOWING, help="Each token's probability, and N alternatives.")
    ] = None,
    echo: Annotated[
        bool | None, option("--echo/--no-echo", panel=SHOWING, help="The prompt too; so on a terminal.")
    ] = None,
    stats: Annotated[
        bool | None, option("--stats/--no-stats", panel=SHOWING, help="How fast it went; so on a terminal.")
    ] = None,
    as_json: Annotated[bool, option("--json", panel=SHOWING, help="For machines: a JSON object a line.")] = False,
) -> None:
    """Continue a text, answer a message, fill a mask, or hold a conversation.

    Example: cutaway generate ./gpt2 "Once upon a time" --max 100 --temperature 0.8 --seed 1

    Example: cutaway generate SmolLM2.gguf --message "What is the capital of Italy"

    Example: cutaway generate SmolLM2.gguf --chat --system "You are brief."

    Example: cutaway generate ./bert "Paris is the [MASK] of France."

    Example: cat questions.txt | cutaway generate SmolLM2.gguf --message --lines --json
    """
    told = dict(locals())
    check(told)
    from cutaway.cli.prompts import biases, gather, ids

    given = [] if chat and not (prompts or file) else gather(prompts or [], file or [], tokens or [], lines=lines)
    from cutaway.cli import answers
    from cutaway.generate.settings import Settings
    from cutaway.generate.texts import drawing
    from cutaway.size.units import parse_count

    fields = {name: told.get(name) for name in Settings.__dataclass_fields__} | {"n": samples}
    settings: dict[str, Any] = {name: value for name, value in fields.items() if value is not None and value != []}
    settings |= {"logit_bias": biases(logit_bias)} if logit_bias else {}
    for name, flag in (("banned", "--ban"), ("stop_tokens", "--stop-tokens")):
        if name in settings:
            settings[name] = [number for listed in settings[name] for number in ids(flag, listed)]
    asked = ask(settings if beams is not None else drawing(settings))
    length = None if context is None else parse_count(context)
    import torch

    how: dict[str, Any] = {
        "context": length,
        "kind": cache or "auto",
        "cache_dtype": None if cache_dtype is None else getattr(torch, cache_dtype),
    }
    how |= {name: value for name, value in (("bits", bits), ("compiled", compiled)) if value}
    if bits is not None and bits not in (16, 8, 4):
        raise InputError(f"--bits is {bits}; weights can have 16, 8 or 4")
    checkpoint = opened(source, device, dtype, quiet=as_json)
    if draft is not None:
        how["draft"] = draft if draft == "lookup" else opened(draft, device, dtype, quiet=as_json)
    show = answers.Show(echo=echo, stats=stats, as_json=as_json)
    chosen = {"beams": beams, "length_penalty": length_penalty, "early_stopping": early(early_stopping)}
    search = {name: value for name, value in chosen.items() if value is not None}
    if temperature is None and beams is None:
        asked = various(asked, checkpoint)
    if "decoder" not in checkpoint.model.stacks:
        said = (name for name, value in told.items() if value is not None and value is not False and value != [])
        answers.fill(checkpoint, given, [name for name in said if name not in FILLING], top_k or 5, show)
    elif chat:
        from cutaway.cli.chat import converse

        converse(checkpoint, [str(each) for each in given], system, asked, how, show)
    else:
        answers.answer(checkpoint, given, asked, search, how | {"rows": rows}, show, messages=message, system=system)


def check(told: dict[str, Any]) -> None:
    """What can be told before anything is read."""
    if told["chat"]:
        for name in ("message", "tokens", "beams", "length_penalty", "early_stopping", "lines", "rows", "draft"):
            if told[name]:
                raise InputError(f"--{name.replace('_', '-')} is not for --chat; leave one of the two out")
        if (told["samples"] or 1) > 1:
            raise InputError("--samples gives several answers, and --chat goes on from one; leave one of the two out")
    elif told["system"] is not None and not told["message"]:
        raise InputError("--system begins a chat; add --chat or --message")
    if told["message"] and told["tokens"]:
        raise InputError("--tokens are no message that a chat template could hold; give texts, or leave --message out")


def ask(settings: dict[str, Any]) -> "Settings":
    """The settings, or what is wrong with them in the words of the command line."""
    from cutaway.generate.settings import Settings

    try:
        return Settings(**settings)
    except InputError as error:
        flags = {name: f"--{name.replace('_', '-')}" for name in Settings.__dataclass_fields__}
        flags |= {"max_new_tokens": "--max", "min_new_tokens": "--min", "logit_bias": "--bias", "banned": "--ban"}
        flags |= {"n": "--samples"}
        names = r"^[a-z]+\b|\b[a-z]+(_[a-z]+)+\b"  # a single word, such as stop, is a name only where it comes first
        raise InputError(re.sub(names, lambda found: flags.get(found[0], found[0]), str(error))) from None


def various(asked: "Settings", checkpoint: "Checkpoint") -> "Settings":
    """Several answers are drawn, unless the checkpoint's own way is a search, which finds different ones."""
    from cutaway.generate.search import own_beams
    from cutaway.generate.texts import opened as parts

    model, _, start = parts(checkpoint)
    if asked.n == 1 or asked.temperature or own_beams(model, start, asked):
        return asked
    return replace(asked, temperature=1.0)


def early(chosen: Early | None) -> Any:
    return None if chosen is None else {"yes": True, "no": False, "never": "never"}[chosen]


def opened(
    source: str, device: str | None, dtype: DType | None, *, quiet: bool, as_stored: bool = False
) -> "Checkpoint":
    """A checkpoint, ready to be asked. `as_stored`: in its own numbers, however slow they are here."""
    import torch

    from cutaway.cli.convert import bar
    from cutaway.families.load import load
    from cutaway.generate.fast.cpu import has_bf16, is_narrow

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with bar("reading", quiet=quiet) as progress:
        numbers = None if dtype is None else getattr(torch, dtype)
        found = load(source, device=where, dtype=numbers, progress=progress)
    if numbers is None and not as_stored and is_narrow(found.model) and not has_bf16():
        found.model.float()
        if not quiet:
            sys.stderr.write(
                "this CPU has no units for 16-bit numbers, so weights are widened to 32; --dtype bfloat16 keeps 16\n"
            )
    found.model.eval()
    return found
