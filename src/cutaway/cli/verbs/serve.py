"""`cutaway serve`: OpenAI-compatible API server."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.cli.model_loading import DType
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch and fastapi are imported when they are needed
    from cutaway.serve.openai.serving_engine import ServingEngine


def serve(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Model directory, run directory, .gguf file or hub id.")
    ],
    host: Annotated[
        str, typer.Option("--host", help="Address to bind; others than loopback require an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0 selects a free port.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="CUTAWAY_API_KEY",
            show_envvar=True,
            help="API key that clients must send; visible to other users of this machine.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="File with the API key.")
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", metavar="NAME", help="Further host name that clients may use; repeatable."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="Model name in the API; default the name of SOURCE.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="Maximum number of sequences per batch; default up to 32.")
    ] = None,
    max_model_len: Annotated[
        str | None,
        typer.Option("--max-model-len", metavar="N", help="Maximum length of prompt and output; 8Ki is 8,192."),
    ] = None,
    max_waiting_requests: Annotated[
        int, typer.Option("--max-waiting-requests", help="Maximum number of completions in the waiting queue.")
    ] = 256,
    request_timeout: Annotated[float, typer.Option("--request-timeout", help="Maximum seconds per request.")] = 300.0,
    shutdown_timeout: Annotated[
        float, typer.Option("--shutdown-timeout", help="Seconds for requests in progress at shutdown.")
    ] = 5.0,
    device: Annotated[
        str | None, typer.Option("--device", help="Device: cpu or cuda; default cuda if available.")
    ] = None,
    dtype: Annotated[DType | None, typer.Option("--dtype", help="Data type of the weights; default as stored.")] = None,
    weight_bits: Annotated[
        int | None,
        typer.Option("--weight-bits", metavar="16|8|4", help="Weight quantization during decode; 4 requires a GPU."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when the server is ready.")] = False,
) -> None:
    """Serve a model with an OpenAI-compatible API: completions, chat, embeddings, tokenization.

    Only this machine has access, unless --host and an API key are set. Ctrl-C stops after the requests in progress.

    Example: cutaway serve tiny-python

    Example: cutaway serve SmolLM2.gguf --port 8080 --max-num-seqs 16 --max-model-len 4Ki

    Example: CUTAWAY_API_KEY=... cutaway serve ./gpt2 --host 0.0.0.0
    """
    if max_num_seqs is not None and max_num_seqs < 1:
        raise InputError(f"--max-num-seqs is {max_num_seqs}; use at least 1")
    if max_waiting_requests < 1 or not 1 <= request_timeout <= 86_400 or not 0 <= shutdown_timeout <= 86_400:
        raise InputError(
            "--max-waiting-requests, --request-timeout or --shutdown-timeout is out of range; use at least 1, 1 to"
            " 86400 and 0 to 86400"
        )
    if weight_bits is not None and weight_bits not in (16, 8, 4):
        raise InputError(f"--weight-bits is {weight_bits}; use 16, 8 or 4")
    from cutaway.serve.limits import Limits
    from cutaway.serve.server import bind_socket, build_access_policy, run_server, server_url

    access_policy = build_access_policy(host, load_api_key(api_key, api_key_file), tuple(allowed_hosts or ()))
    sock = bind_socket(host, port)
    from cutaway.cli.model_loading import load_checkpoint
    from cutaway.families.load import resolve_checkpoint_path
    from cutaway.serve.openai.api_server import build_openai_app
    from cutaway.serve.openai.embeddings import read_pooling_mode
    from cutaway.size.units import parse_count

    max_len = None if max_model_len is None else parse_count(max_model_len)
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
        access_policy=access_policy,
        limits=limits,
        max_num_seqs=max_num_seqs,
        max_model_len=max_len,
        pooling=read_pooling_mode(resolve_checkpoint_path(source)),
        weight_bits=weight_bits,
    )
    url = server_url(sock)
    run_server(
        app,
        sock,
        limits,
        lambda: _print_server_info(serving, url, requires_api_key=access_policy.api_key is not None, as_json=as_json),
    )


def load_api_key(api_key: str | None, path: Path | None) -> str | None:
    """Return the API key from the option or from a file; None if there is none."""
    if path is None:
        return api_key or None
    if api_key is not None and os.environ.get("CUTAWAY_API_KEY") != api_key:
        raise InputError("--api-key and --api-key-file are both set; leave one of them out")
    key = path.read_text(encoding="utf-8").strip()
    if not key:
        raise InputError(f"--api-key-file {path} is empty; write a key to it")
    return key


def default_model_name(source: str) -> str:
    """Return the default model name: the hub id, or the last part of the path."""
    if Path(source).exists():
        path = Path(source).resolve()
        return path.stem if path.is_file() else path.name
    return source.partition("@")[0]


def _print_server_info(serving: "ServingEngine", url: str, *, requires_api_key: bool, as_json: bool) -> None:
    """Print the URL, the memory use and an example request."""
    engine_config = None if serving.engine is None else serving.engine.config
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in serving.model.parameters())
    info = {
        "url": url,
        "model": serving.served_model_name,
        "max_model_len": serving.max_model_len,
        "max_num_seqs": None if engine_config is None else engine_config.max_num_seqs,
        "weight_bytes": weight_bytes,
        "cache_bytes": None if engine_config is None else engine_config.cache_bytes,
        "requires_api_key": requires_api_key,
    }
    if as_json:
        sys.stdout.write(json.dumps(info) + "\n")
        sys.stdout.flush()
        return
    from rich.console import Console

    path, example = (
        ("embeddings", {"input": "def"})
        if engine_config is None
        else ("completions", {"prompt": "def", "max_tokens": 32})
    )
    auth = " -H 'Authorization: Bearer KEY'" if requires_api_key else ""
    body = json.dumps({"model": serving.served_model_name, **example})
    engine_info = (
        ""
        if engine_config is None
        else f" · batch of up to {engine_config.max_num_seqs} · KV cache {engine_config.cache_bytes / 2**20:,.0f} MiB"
    )
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{serving.served_model_name} is served at {url}/v1 (Ctrl-C to stop)")
    console.print(f"weights {weight_bytes / 2**20:,.0f} MiB · context {serving.max_model_len:,} tokens{engine_info}\n")
    console.print(f"  curl {url}/v1/{path}{auth} -H 'Content-Type: application/json' -d '{body}'")
    sys.stdout.flush()
