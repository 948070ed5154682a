"""`cutaway serve`: a model behind the API that OpenAI's clients speak."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.cli.model_loading import DType
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch and fastapi are imported when the work begins
    from cutaway.serve.openai.serving_engine import ServingEngine


def serve(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A model's or run's directory, .gguf file, hub id.")],
    host: Annotated[str, typer.Option("--host", help="Where to listen; other machines need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes one that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", envvar="CUTAWAY_API_KEY", show_envvar=True, help="What clients must send; others here see it."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="A file that holds the key.")
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", metavar="NAME", help="Other names of this machine, for clients."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="The model's name for clients; SOURCE's unless given.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="Answers at once; up to 32 unless given.")
    ] = None,
    max_model_len: Annotated[
        str | None, typer.Option("--max-model-len", metavar="N", help="Prompt and answer; 8Ki is 8,192.")
    ] = None,
    max_waiting_requests: Annotated[
        int, typer.Option("--max-waiting-requests", help="Answers that may wait for a row.")
    ] = 256,
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", help="Seconds for a request, at most.")
    ] = 300.0,
    shutdown_timeout: Annotated[
        float, typer.Option("--shutdown-timeout", help="Seconds for what runs when it is told to end.")
    ] = 5.0,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one.")] = None,
    dtype: Annotated[DType | None, typer.Option("--dtype", help="Of the weights; as stored, unless given.")] = None,
    weight_bits: Annotated[
        int | None, typer.Option("--weight-bits", metavar="16|8|4", help="Of a weight while decoding; 4 on GPUs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one JSON object when it is ready.")] = False,
) -> None:
    """Serve a model to others: completions, chats, embeddings, and tokens, as OpenAI's clients ask for them.

    Only this machine may ask, unless --host and a key say otherwise. Ctrl-C ends it when what runs is finished.

    Example: cutaway serve tiny-python

    Example: cutaway serve SmolLM2.gguf --port 8080 --max-num-seqs 16 --max-model-len 4Ki

    Example: CUTAWAY_API_KEY=... cutaway serve ./gpt2 --host 0.0.0.0
    """
    if max_num_seqs is not None and max_num_seqs < 1:
        raise InputError(f"--max-num-seqs is {max_num_seqs}; give at least 1")
    if max_waiting_requests < 1 or not 1 <= request_timeout <= 86_400 or not 0 <= shutdown_timeout <= 86_400:
        raise InputError(
            "--max-waiting-requests must be 1 or more, --request-timeout from 1 and --shutdown-timeout from 0, to"
            " 86400; change them"
        )
    if weight_bits is not None and weight_bits not in (16, 8, 4):
        raise InputError(f"--weight-bits is {weight_bits}; weights can have 16, 8 or 4")
    from cutaway.serve.limits import Limits
    from cutaway.serve.server import bind_socket, build_access_policy, run_server, server_url

    door = build_access_policy(host, load_api_key(api_key, api_key_file), tuple(allowed_hosts or ()))
    listening = bind_socket(host, port)
    from cutaway.cli.model_loading import load_checkpoint
    from cutaway.families.load import resolve_checkpoint_path
    from cutaway.serve.openai.api_server import build_openai_app
    from cutaway.serve.openai.embeddings import read_pooling_mode
    from cutaway.size.units import parse_count

    length = None if max_model_len is None else parse_count(max_model_len)
    limits = replace(
        Limits(),
        max_waiting_requests=max_waiting_requests,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
    )
    checkpoint = load_checkpoint(source, device, dtype, quiet=as_json)
    app, serving = build_openai_app(
        checkpoint,
        served_model_name or default_model_name(source),
        access_policy=door,
        limits=limits,
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        pooling=read_pooling_mode(resolve_checkpoint_path(source)),
        weight_bits=weight_bits,
    )
    where = server_url(listening)
    run_server(
        app,
        listening,
        limits,
        lambda: _print_server_info(serving, where, requires_api_key=door.api_key is not None, as_json=as_json),
    )


def load_api_key(api_key: str | None, path: Path | None) -> str | None:
    """The key as given, or as a file holds it."""
    if path is None:
        return api_key or None
    if api_key is not None and os.environ.get("CUTAWAY_API_KEY") != api_key:
        raise InputError("--api-key and --api-key-file both give a key; leave one of them out")
    found = path.read_text(encoding="utf-8").strip()
    if not found:
        raise InputError(f"--api-key-file {path} is empty; write a key into it")
    return found


def default_model_name(source: str) -> str:
    """What clients call the model: a hub id as it is, of a path the last part."""
    if Path(source).exists():
        path = Path(source).resolve()
        return path.stem if path.is_file() else path.name
    return source.partition("@")[0]


def _print_server_info(serving: "ServingEngine", url: str, *, requires_api_key: bool, as_json: bool) -> None:
    """Where it is, and how to try it."""
    plan = None if serving.engine is None else serving.engine.config
    weights = sum(one.numel() * one.element_size() for one in serving.model.parameters())
    facts = {
        "url": url,
        "model": serving.served_model_name,
        "max_model_len": serving.max_model_len,
        "max_num_seqs": None if plan is None else plan.max_num_seqs,
        "weight_bytes": weights,
        "cache_bytes": None if plan is None else plan.cache_bytes,
        "requires_api_key": requires_api_key,
    }
    if as_json:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
        return
    from rich.console import Console

    path, ask = (
        ("embeddings", {"input": "def"}) if plan is None else ("completions", {"prompt": "def", "max_tokens": 32})
    )
    auth = " -H 'Authorization: Bearer KEY'" if requires_api_key else ""
    body = json.dumps({"model": serving.served_model_name, **ask})
    cache = (
        "" if plan is None else f" · {plan.max_num_seqs} answers at once · cache {plan.cache_bytes / 2**20:,.0f} MiB"
    )
    shown = Console(soft_wrap=True, highlight=False, markup=False)
    shown.print(f"{serving.served_model_name} is served at {url}/v1 (Ctrl-C ends it)")
    shown.print(f"weights {weights / 2**20:,.0f} MiB · context {serving.max_model_len:,} tokens{cache}\n")
    shown.print(f"  curl {url}/v1/{path}{auth} -H 'Content-Type: application/json' -d '{body}'")
    sys.stdout.flush()
