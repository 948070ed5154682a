"""Time to the first token of `cutaway serve`, beside the same engine in this process: random weights, streaming.

    python bench/serve_latency.py [--model llama-3-8b] [--prompt-len 128] [--requests 20] [--device cuda] [--json FILE]

The model has the shape of a preset. The server is a process of its own and loads it from a temporary directory. One
client sends one request at a time, each with a different random prompt, and requests to the server and to the engine
alternate. The time ends when the first event of the stream, or the first chunk of the engine, has arrived.
"""

import argparse
import http.client
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from report import Row, add_json_option, print_row, save_rows
from tokenizers import Tokenizer as TokenizerBackend
from tokenizers.models import WordLevel

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.generate import Engine, EngineConfig, SamplingParams
from cutaway.tokenizer import Tokenizer

MAX_NUM_SEQS, MAX_NEW_TOKENS, NUM_WARMUP_REQUESTS = 8, 8, 5


@contextmanager
def running_server(directory: str, device: str, dtype: str, max_model_len: int) -> Iterator[http.client.HTTPConnection]:
    """Context manager: a connection to a server of the model in `directory`."""
    command = [sys.executable, "-m", "cutaway", "serve", directory, "--port", "0", "--json", "--device", device]
    command += ["--dtype", dtype, "--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", str(max_model_len)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["url"].rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port)
        yield connection
        connection.close()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """Tokenizer with a word for each token. With part of a character as first token, the first event would be later."""
    return Tokenizer(TokenizerBackend(WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0")))


def first_token_of_server(connection: http.client.HTTPConnection, prompt: list[int]) -> float:
    """Seconds from the request to the first event of its stream."""
    body = {"prompt": prompt, "max_tokens": MAX_NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    line = response.readline()
    seconds = time.perf_counter() - start
    rest = response.read()  # the connection is used again
    if response.status != 200 or not json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]:
        raise RuntimeError(f"no event with a first token, status {response.status}: {(line + rest)[:300]!r}")
    return seconds


def first_token_of_engine(engine: Engine, prompt: list[int]) -> float:
    """Seconds from `submit` to the first chunk of the completion."""
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    request = engine.submit(prompt, params, seed=0)
    chunks = request.stream()
    next(chunks)
    seconds = time.perf_counter() - start
    for _ in chunks:
        pass
    return seconds


def measure_alternating(
    runs: dict[str, Callable[[list[int]], float]], vocab_size: int, prompt_len: int, num_requests: int
) -> dict[str, list[float]]:
    """Seconds to the first token of each request, after warm-up requests."""
    rng = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(NUM_WARMUP_REQUESTS + num_requests):
        for name, run in list(runs.items())[:: 1 if number % 2 else -1]:
            duration = run([rng.randrange(vocab_size) for _ in range(prompt_len)])
            if number >= NUM_WARMUP_REQUESTS:
                seconds[name].append(duration)
    return seconds


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", help="preset")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    dtype = "bfloat16" if torch.device(args.device).type == "cuda" else "float32"
    model: Any = ct.build(args.model, device=args.device, dtype=getattr(torch, dtype), seed=0)
    max_model_len = args.prompt_len + MAX_NEW_TOKENS + 64
    options = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": max_model_len}
    config = EngineConfig(model, cache_implementation="paged", **options)  # as in the server
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = word_tokenizer(model.config.vocab_size)
        ct.save(Checkpoint(model, model.config, tokenizer_loader=lambda: tokenizer), directory, overwrite=True)
        with (
            running_server(directory, args.device, dtype, max_model_len) as connection,
            Engine(config, tokenizer=tokenizer).start() as engine,
        ):
            runs: dict[str, Callable[[list[int]], float]] = {
                "cutaway serve": lambda prompt: first_token_of_server(connection, prompt),
                "cutaway engine": lambda prompt: first_token_of_engine(engine, prompt),
            }
            seconds = measure_alternating(runs, model.config.vocab_size, args.prompt_len, args.requests)
    rows = []
    for name, values in seconds.items():
        row: Row = {"implementation": name, "model": args.model, "dtype": dtype, "prompt_len": args.prompt_len}
        low, median, high = statistics.quantiles(values, n=4)
        rows.append(print_row(row | {"first_token_ms": median * 1e3, "quartiles_ms": [low * 1e3, high * 1e3]}))
    save_rows(args.json, rows, device=args.device)


if __name__ == "__main__":
    main()
