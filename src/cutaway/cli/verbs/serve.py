"""`cutaway serve`: OpenAI-compatible API server."""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cutaway.cli import options as opt
from cutaway.cli.json_output import print_json
from cutaway.cli.parallel_processes import start_processes
from cutaway.cli.server_models import assign_adapters, load_engines, resolve_model_names
from cutaway.errors import CutawayError, InputError

SchedulingPolicyName = Literal["round-robin", "priority"]

if TYPE_CHECKING:  # torch and fastapi are imported when they are needed
    from cutaway.generate import EngineConfig
    from cutaway.serve.openai.serving_engine import ServingEngine
    from cutaway.serve.tls import TLSFiles

log = logging.getLogger("cutaway.serve")


def serve(
    sources: opt.CheckpointSources,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    api_key: Annotated[
        str | None, opt.api_key_option("API key that clients must send; other users can read it in the process list.")
    ] = None,
    api_key_file: opt.ApiKeyFile = None,
    api_keys: Annotated[
        Path | None,
        opt.option("TOML file with API keys and limits of several clients; read again at SIGHUP.", metavar="FILE"),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        opt.option("Further host name that clients may use; repeatable.", "--allowed-host", metavar="NAME"),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, opt.option("TLS certificate with its chain, PEM; read again at SIGHUP.", metavar="FILE")
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, opt.option("Private key of the certificate, PEM; default in --ssl-certfile.", metavar="FILE")
    ] = None,
    ssl_ca_certs: Annotated[
        Path | None, opt.option("Require client certificates that one of these authorities signed.", metavar="FILE")
    ] = None,
    forwarded_allow_ips: Annotated[
        str | None,
        opt.option("Addresses of proxies whose X-Forwarded-For header names the client.", metavar="IP,..."),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"], opt.option("Format of the log on standard error: a line per request.")
    ] = "text",
    adapter: Annotated[
        list[str] | None,
        opt.option(
            "LoRA adapter, which clients select as the model NAME; DIR is in PEFT's format, a run or a hub id; "
            "repeatable.",
            metavar="NAME=DIR",
        ),
    ] = None,
    served_model_names: Annotated[
        list[str] | None,
        opt.option(
            "Model name in the API; default the name of SOURCE. Repeatable, once for each model.",
            "--served-model-name",
            metavar="NAME",
        ),
    ] = None,
    max_num_seqs: Annotated[int | None, opt.option(opt.MAX_NUM_SEQS_HELP, min=1)] = None,
    max_model_len: Annotated[str | None, opt.option(opt.MAX_MODEL_LEN_HELP, metavar="N")] = None,
    memory_utilization: Annotated[
        float | None,
        opt.option(
            "Maximum fraction of the free memory for the KV cache; default 0.9 on a GPU, 0.5 on the CPU.",
            min=0.01,
            max=1,
        ),
    ] = None,
    scheduling_policy: Annotated[
        SchedulingPolicyName,
        opt.option("Order of admission: clients take turns, or requests with a smaller `priority` first."),
    ] = "round-robin",
    max_waiting_requests: Annotated[int, opt.option("Maximum number of waiting completions.", min=1)] = 256,
    max_connections_per_address: Annotated[
        int,
        opt.option(
            "Maximum number of open connections of one client address, of 1024 in total; use 1024 behind a reverse "
            "proxy, which is the only client.",
            min=1,
        ),
    ] = 512,
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
    """Serve models with an OpenAI-compatible API: completions, chat, embeddings, tokenization.

    Only this machine has access, unless --host and an API key are set. Ctrl-C lets the requests in progress finish.
    With several models, the field `model` of a request selects one.

    Example: cutaway serve tiny-english

    Example: cutaway serve SmolLM2.gguf --port 8080 --max-num-seqs 16 --max-model-len 4Ki

    Example: cutaway serve ./llama --adapter sql=runs/sql --adapter chat=runs/chat

    Example: cutaway serve ./llama ./embedder --served-model-name chat --served-model-name embed

    Example: CUTAWAY_API_KEY=... cutaway serve ./gpt2 --host 0.0.0.0

    Example: cutaway serve ./gpt2 --host 0.0.0.0 --api-keys keys.toml --ssl-certfile cert.pem --ssl-keyfile key.pem
    """
    opt.check_weight_bits(weight_bits)
    adapters = opt.parse_adapters(adapter)
    names = resolve_model_names(sources, served_model_names or (), adapters)
    tls = read_tls_options(ssl_certfile, ssl_keyfile, ssl_ca_certs)
    from cutaway.serve.api_keys import ApiKeys, read_api_keys
    from cutaway.serve.limits import Limits
    from cutaway.serve.request_log import configure_logging
    from cutaway.serve.server import (
        bind_socket,
        build_access_policy,
        check_proxy_addresses,
        is_loopback,
        run_server,
        server_url,
    )

    if forwarded_allow_ips is not None:
        check_proxy_addresses(forwarded_allow_ips)
    ssl_context = None if tls is None else tls.build_context()
    keys = None if api_keys is None else ApiKeys(read_api_keys(api_keys))
    access_policy = build_access_policy(
        host,
        load_api_key(api_key, api_key_file),
        tuple(allowed_hosts or ()),
        api_keys=keys,
        public_paths=frozenset({"/health"}),
    )
    max_len = opt.parse_length(max_model_len)
    # Before the port is bound, because the ranks above 0 of torchrun become workers here.
    num_processes = start_processes(devices, sources[0], device, dtype, num_models=len(sources))
    sock = bind_socket(host, port)
    adapters_by_model = assign_adapters(adapters, sources)
    configure_logging(log_format)
    for path in filter(None, (api_key_file, api_keys, ssl_keyfile)):
        warn_if_readable_by_others(path)
    if tls is None and forwarded_allow_ips is None and not is_loopback(host):
        log.warning(
            "API keys and texts are sent unencrypted to other machines; pass --ssl-certfile and --ssl-keyfile, or run"
            " behind a proxy with TLS and pass its address as --forwarded-allow-ips"
        )
    from cutaway.serve.metrics import ServerMetrics
    from cutaway.serve.openai.api_server import build_models_app

    limits = Limits(
        max_waiting_requests=max_waiting_requests,
        max_connections_per_address=max_connections_per_address,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
    )
    metrics = ServerMetrics()
    engines = load_engines(
        sources,
        names,
        adapters_by_model,
        device=device,
        dtype=dtype,
        device_map=device_map,
        tensor_parallel_size=num_processes,
        limits=limits,
        metrics=metrics,
        max_num_seqs=max_num_seqs,
        max_model_len=max_len,
        memory_utilization=memory_utilization,
        scheduling_policy=scheduling_policy,
        weight_bits=weight_bits,
        quiet=as_json,
    )
    app = build_models_app(engines, metrics, access_policy=access_policy, limits=limits)

    url = server_url(sock, "http" if tls is None else "https")
    reloads: dict[Path, Callable[[], object]] = {}
    if keys is not None and api_keys is not None:
        reloads[api_keys] = lambda: keys.replace(read_api_keys(api_keys))
    if tls is not None and ssl_context is not None:
        reloads[tls.certfile] = lambda: tls.load_certificate(ssl_context)
    run_server(
        app,
        sock,
        limits,
        lambda: _print_server_info(engines, url, requires_api_key=access_policy.requires_key, as_json=as_json),
        ssl_context=ssl_context,
        forwarded_allow_ips=forwarded_allow_ips,
        on_reload=(lambda: _reload(reloads)) if reloads else None,
    )


def read_tls_options(certfile: Path | None, keyfile: Path | None, ca_certs: Path | None) -> "TLSFiles | None":
    """Return the TLS files of the options, or None without a certificate."""
    if certfile is None:
        if keyfile is not None or ca_certs is not None:
            option = "--ssl-keyfile" if keyfile is not None else "--ssl-ca-certs"
            raise InputError(f"{option} is set without --ssl-certfile, so the server has no certificate; pass both")
        return None
    from cutaway.serve.tls import TLSFiles

    return TLSFiles(certfile, keyfile, ca_certs)


def warn_if_readable_by_others(path: Path) -> None:
    """Log a warning if other users of the machine can read a file with secrets."""
    mode = path.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o004:
        log.warning("'%s' can be read by other users (mode %03o); run: chmod 600 '%s'", path, mode, path)


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


def _reload(readers: Mapping[Path, Callable[[], object]]) -> None:
    """Read the API keys and the certificate again. The previous content of a file with an error stays in use."""
    for path, read in readers.items():
        try:
            read()
        except (CutawayError, OSError) as error:
            log.error("SIGHUP: %s; the previous content stays in use", error)
        else:
            log.info("SIGHUP: '%s' was read again", path)


def _model_info(serving: "ServingEngine") -> dict[str, Any]:
    """Name, limits and memory use of a served model."""
    config = None if serving.engine is None else serving.engine.config
    return {
        "model": serving.served_model_name,
        "adapters": [name for name in serving.adapters if name != serving.served_model_name],
        "max_model_len": serving.max_model_len,
        "max_num_seqs": None if config is None else config.max_num_seqs,
        "weight_bytes": sum(parameter.nbytes for parameter in serving.model.parameters()),
        "cache_bytes": None if config is None else config.cache_bytes,
    }


def _print_server_info(engines: Sequence["ServingEngine"], url: str, *, requires_api_key: bool, as_json: bool) -> None:
    """Print the URL, the memory use of each model and an example request."""
    models = [_model_info(serving) for serving in engines]
    if as_json:
        print_json({"url": url, **models[0], "requires_api_key": requires_api_key, "models": models}, indent=None)
        return
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False, markup=False)
    names = ", ".join(info["model"] for info in models)
    console.print(f"{names} {'is' if len(models) == 1 else 'are'} served at {url}/v1 (Ctrl-C to stop)")
    for serving, info in zip(engines, models, strict=True):
        if info["adapters"]:
            console.print(f"{_prefix(info, models)}adapters: {', '.join(info['adapters'])}")
        console.print(f"{_prefix(info, models)}{_describe_memory(info)}")
        if serving.engine is not None:
            console.print(f"{_prefix(info, models)}{_describe_cache(serving.engine.config)}")
    if len(models) > 1:
        total_bytes = sum(info["weight_bytes"] + (info["cache_bytes"] or 0) for info in models)
        console.print(f"weights and KV caches of all models: {total_bytes / 2**20:,.0f} MiB")
    console.print(f"\n  {_example_command(engines[0], url, requires_api_key=requires_api_key)}")
    sys.stdout.flush()


def _prefix(info: dict[str, Any], models: Sequence[dict[str, Any]]) -> str:
    return f"{info['model']}: " if len(models) > 1 else ""


def _describe_memory(info: dict[str, Any]) -> str:
    text = f"weights {info['weight_bytes'] / 2**20:,.0f} MiB · context {info['max_model_len']:,} tokens"
    if info["cache_bytes"] is not None:
        text += f" · batch of up to {info['max_num_seqs']} sequences"
    return text


def _example_command(serving: "ServingEngine", url: str, *, requires_api_key: bool) -> str:
    path, example = "/v1/embeddings", '"input": "def"'
    if serving.model.config.head.kind == "sequence-classification":
        path, example = "/classify", '"input": "a text"'
    if serving.engine is not None:
        path, example = "/v1/completions", '"prompt": "def", "max_tokens": 32'
    auth = " -H 'Authorization: Bearer KEY'" if requires_api_key else ""
    body = f'{{"model": {json.dumps(serving.served_model_name)}, {example}}}'
    return f"curl {url}{path}{auth} -H 'Content-Type: application/json' -d '{body}'"


def _describe_cache(config: "EngineConfig") -> str:
    """The size of the KV cache, the reason for it, and the options that change it."""
    tokens = (config.num_pages() or 0) * config.page_size
    reason, options = (
        f"{config.max_num_seqs} sequences of {config.num_slots:,} tokens",
        "--max-num-seqs, --max-model-len",
    )
    if config.is_limited_by_memory:
        share = f"{config.resolved_memory_utilization:.0%} of the free memory"
        reason, options = f"{tokens:,} tokens, {share}", "--memory-utilization, --max-model-len"
    size = f"{config.cache_bytes / 2**20:,.0f} MiB"
    amount = f"{size} (allocated)" if config.growth_step is None else f"grows as needed to at most {size}"
    return f"KV cache {amount}: {reason} (change with {options})"
