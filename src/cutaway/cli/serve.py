"""`cutaway serve`: a model behind the API that OpenAI's clients speak."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.convert import DType
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch and fastapi are imported when the work begins
    from cutaway.serve.openai.host import Host


def serve(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A model's or run's directory, .gguf file, hub id.")],
    host: Annotated[str, typer.Option("--host", help="Where to listen; other machines need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes one that is free.")] = 8000,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", envvar="CUTAWAY_KEY", show_envvar=True, help="What clients must send; others here see it."
        ),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", metavar="FILE", help="A file that holds the key.")
    ] = None,
    known_as: Annotated[
        list[str] | None, typer.Option("--known-as", metavar="NAME", help="Other names of this machine, for clients.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name for clients; SOURCE's unless given.")
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", help="Answers at once; up to 32 unless given.")] = None,
    context: Annotated[
        str | None, typer.Option("--context", metavar="N", help="Prompt and answer; 8Ki is 8,192.")
    ] = None,
    waiting: Annotated[int, typer.Option("--waiting", help="Answers that may wait for a row.")] = 256,
    seconds: Annotated[float, typer.Option("--seconds", help="For a request, at most.")] = 300.0,
    grace: Annotated[float, typer.Option("--grace", help="Seconds for what runs when it is told to end.")] = 5.0,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one.")] = None,
    dtype: Annotated[DType | None, typer.Option("--dtype", help="Of the weights; as stored, unless given.")] = None,
    bits: Annotated[
        int | None, typer.Option("--bits", metavar="16|8|4", help="Of a weight while decoding; 4 on GPUs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one JSON object when it is ready.")] = False,
) -> None:
    """Serve a model to others: completions, chats, embeddings, and tokens, as OpenAI's clients ask for them.

    Only this machine may ask, unless --host and a key say otherwise. Ctrl-C ends it when what runs is finished.

    Example: cutaway serve tiny-python

    Example: cutaway serve SmolLM2.gguf --port 8080 --rows 16 --context 4Ki

    Example: CUTAWAY_KEY=... cutaway serve ./gpt2 --host 0.0.0.0
    """
    if rows is not None and rows < 1:
        raise InputError(f"--rows is {rows}; give at least 1")
    if waiting < 1 or not 1 <= seconds <= 86_400 or not 0 <= grace <= 86_400:
        raise InputError("--waiting must be 1 or more, --seconds from 1 and --grace from 0, to 86400; change them")
    if bits is not None and bits not in (16, 8, 4):
        raise InputError(f"--bits is {bits}; weights can have 16, 8 or 4")
    from cutaway.serve.limits import Limits
    from cutaway.serve.server import address, listen, make_door
    from cutaway.serve.server import serve as run

    door = make_door(host, read_key(key, key_file), tuple(known_as or ()))
    listening = listen(host, port)
    from cutaway.cli.generate import opened
    from cutaway.families.load import find
    from cutaway.serve.openai.embeddings import own_pooling
    from cutaway.serve.openai.start import make_api
    from cutaway.size.units import parse_count

    length = None if context is None else parse_count(context)
    limits = replace(Limits(), waiting=waiting, seconds=seconds, grace_seconds=grace)
    checkpoint = opened(source, device, dtype, quiet=as_json)
    how: dict[str, Any] = {"rows": rows, "context": length, "pooling": own_pooling(find(source))}
    how |= {} if bits is None else {"bits": bits}
    app, behind = make_api(checkpoint, name or name_of(source), door=door, limits=limits, **how)
    where = address(listening)
    run(app, listening, limits, lambda: tell(behind, where, locked=door.key is not None, as_json=as_json))


def read_key(key: str | None, file: Path | None) -> str | None:
    """The key as given, or as a file holds it."""
    if file is None:
        return key or None
    if key is not None and os.environ.get("CUTAWAY_KEY") != key:
        raise InputError("--key and --key-file both give a key; leave one of them out")
    found = file.read_text(encoding="utf-8").strip()
    if not found:
        raise InputError(f"--key-file {file} is empty; write a key into it")
    return found


def name_of(source: str) -> str:
    """What clients call the model: a hub id as it is, of a path the last part."""
    if Path(source).exists():
        path = Path(source).resolve()
        return path.stem if path.is_file() else path.name
    return source.partition("@")[0]


def tell(behind: "Host", where: str, *, locked: bool, as_json: bool) -> None:
    """Where it is, and how to try it."""
    plan = None if behind.engine is None else behind.engine.plan
    weights = sum(one.numel() * one.element_size() for one in behind.model.parameters())
    facts = {
        "address": where,
        "model": behind.name,
        "context": behind.context,
        "rows": None if plan is None else plan.rows,
        "weight_bytes": weights,
        "cache_bytes": None if plan is None else plan.bytes,
        "key": locked,
    }
    if as_json:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
        return
    from rich.console import Console

    path, ask = (
        ("embeddings", {"input": "def"}) if plan is None else ("completions", {"prompt": "def", "max_tokens": 32})
    )
    auth = " -H 'Authorization: Bearer KEY'" if locked else ""
    body = json.dumps({"model": behind.name, **ask})
    cache = "" if plan is None else f" · {plan.rows} answers at once · cache {plan.bytes / 2**20:,.0f} MiB"
    shown = Console(soft_wrap=True, highlight=False, markup=False)
    shown.print(f"{behind.name} is served at {where}/v1 (Ctrl-C ends it)")
    shown.print(f"weights {weights / 2**20:,.0f} MiB · context {behind.context:,} tokens{cache}\n")
    shown.print(f"  curl {where}/v1/{path}{auth} -H 'Content-Type: application/json' -d '{body}'")
    sys.stdout.flush()
