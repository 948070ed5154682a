"""`cutaway serve`: OpenAI-compatible API server."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cutaway.cli import options as opt
from cutaway.cli.json_output import print_json
from cutaway.cli.parallel_processes import start_processes
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch and fastapi are imported when they are needed
    from cutaway.serve.openai.serving_engine import ServingEngine


def serve(
    source: opt.CheckpointSource,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    api_key: Annotated[
        str | None, opt.api_key_option("API key that clients must send; other users can read it in the process list.")
    ] = None,
    api_key_file: opt.ApiKeyFile = None,
    allowed_hosts: Annotated[
        list[str] | None,
        opt.option("Further host name that clients may use; repeatable.", "--allowed-host", metavar="NAME"),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        opt.option(
            "LoRA adapter, which clients select as the model NAME; DIR is in PEFT's format, a run or a hub id; "
            "repeatable.",
            metavar="NAME=DIR",
        ),
    ] = None,
    served_model_name: Annotated[str | None, opt.option("Model name in the API; default the name of SOURCE.")] = None,
    max_num_seqs: Annotated[int | None, opt.option(opt.MAX_NUM_SEQS_HELP, min=1)] = None,
    max_model_len: Annotated[str | None, opt.option(opt.MAX_MODEL_LEN_HELP, metavar="N")] = None,
    max_waiting_requests: Annotated[int, opt.option("Maximum number of waiting completions.", min=1)] = 256,
    request_timeout: Annotated[float, opt.option("Maximum seconds per request.", min=1, max=86_400)] = 300.0,
    shutdown_timeout: Annotated[
        float, opt.option("Seconds that requests in progress have to finish at shutdown.", min=0, max=86_400)
    ] = 5.0,
    device: opt.Device = None,
    devices: Annotated[int | None, opt.option(opt.DEVICES_HELP, min=1)] = None,
    device_map: Annotated[opt.DeviceMap | None, opt.option(opt.DEVICE_MAP_HELP)] = None,
    dtype: opt.WeightDType = None,
    weight_bits: Annotated[int | None, opt.option(opt.WEIGHT_BITS_HELP, metavar="16|8|4")] = None,
    as_json: opt.ServerJsonFlag = False,
) -> None:
    """Serve a model with an OpenAI-compatible API: completions, chat, embeddings, tokenization.

    Only this machine has access, unless --host and an API key are set. Ctrl-C lets the requests in progress finish.

    Example: cutaway serve tiny-english

    Example: cutaway serve SmolLM2.gguf --port 8080 --max-num-seqs 16 --max-model-len 4Ki

    Example: cutaway serve ./llama --adapter sql=runs/sql --adapter chat=runs/chat

    Example: CUTAWAY_API_KEY=... cutaway serve ./gpt2 --host 0.0.0.0
    """
    opt.check_weight_bits(weight_bits)
    adapters = opt.parse_adapters(adapter)
    num_processes = start_processes(devices, source, device, dtype)
    from cutaway.serve.limits import Limits
    from cutaway.serve.server import bind_socket, build_access_policy, run_server, server_url

    access_policy = build_access_policy(host, load_api_key(api_key, api_key_file), tuple(allowed_hosts or ()))
    sock = bind_socket(host, port)
    from cutaway.cli.model_loading import load_checkpoint
    from cutaway.families.load import add_adapters, resolve_checkpoint_path
    from cutaway.serve.openai.api_server import build_openai_app
    from cutaway.serve.openai.embeddings import read_pooling_mode

    max_len = opt.parse_length(max_model_len)
    limits = Limits(
        max_waiting_requests=max_waiting_requests,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
    )
    checkpoint = load_checkpoint(
        source, device, dtype, quiet=as_json, device_map=device_map, tensor_parallel_size=num_processes
    )
    active = checkpoint.model.active_adapter
    checkpoint = add_adapters(checkpoint, adapters)
    checkpoint.model.set_adapter(active).requires_grad_(False)
    app, serving = build_openai_app(
        checkpoint,
        served_model_name or default_model_name(source),
        access_policy=access_policy,
        limits=limits,
        max_num_seqs=max_num_seqs,
        max_model_len=max_len,
        pooling=read_pooling_mode(resolve_checkpoint_path(source)),
        weight_bits=weight_bits,
        adapters=tuple(adapters),
    )
    url = server_url(sock)
    run_server(
        app,
        sock,
        limits,
        lambda: _print_server_info(serving, url, requires_api_key=access_policy.api_key is not None, as_json=as_json),
    )


def load_api_key(api_key: str | None, path: Path | None) -> str | None:
    """Return the API key from the option or from a file, or None if neither is set."""
    if path is None:
        return api_key or None
    if api_key is not None and os.environ.get("CUTAWAY_API_KEY") != api_key:
        raise InputError("--api-key and --api-key-file are both set; leave one of them out")
    key = path.read_text(encoding="utf-8").strip()
    if not key:
        raise InputError(f"--api-key-file {path} is empty; write a key to it")
    return key


def default_model_name(source: str) -> str:
    """Return the default name of the served model.

    It is the hub id without revision, the name of the directory, or the name of the file without suffix.
    """
    if Path(source).exists():
        path = Path(source).resolve()
        return path.stem if path.is_file() else path.name
    return source.partition("@")[0]


def _print_server_info(serving: "ServingEngine", url: str, *, requires_api_key: bool, as_json: bool) -> None:
    """Print the URL, the memory use and an example request."""
    config = None if serving.engine is None else serving.engine.config
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in serving.model.parameters())
    info = {
        "url": url,
        "model": serving.served_model_name,
        "adapters": [name for name in serving.adapters if name != serving.served_model_name],
        "max_model_len": serving.max_model_len,
        "max_num_seqs": None if config is None else config.max_num_seqs,
        "weight_bytes": weight_bytes,
        "cache_bytes": None if config is None else config.cache_bytes,
        "requires_api_key": requires_api_key,
    }
    if as_json:
        print_json(info, indent=None)
        return
    from rich.console import Console

    kind = serving.model.config.head.kind
    path, example, engine_info = "/v1/embeddings", '"input": "def"', ""
    if kind == "sequence-classification":
        path, example = "/classify", '"input": "a text"'
    if config is not None:
        path, example = "/v1/completions", '"prompt": "def", "max_tokens": 32'
        engine_info = f" · batch of up to {config.max_num_seqs} · KV cache {config.cache_bytes / 2**20:,.0f} MiB"
    auth = " -H 'Authorization: Bearer KEY'" if requires_api_key else ""
    body = f'{{"model": {json.dumps(serving.served_model_name)}, {example}}}'
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{serving.served_model_name} is served at {url}/v1 (Ctrl-C to stop)")
    if info["adapters"]:
        console.print(f"adapters: {', '.join(serving.adapters.keys() - {serving.served_model_name})}")
    console.print(f"weights {weight_bytes / 2**20:,.0f} MiB · context {serving.max_model_len:,} tokens{engine_info}\n")
    console.print(f"  curl {url}{path}{auth} -H 'Content-Type: application/json' -d '{body}'")
    sys.stdout.flush()
