"""Decode on the CPU beside transformers and CTranslate2, in one run: GPT-2 124M, batch size 1, equal numbers of tokens.

    python bench/decode_cpu.py [--rounds 6] [--only NAME ...] [--json FILE]

cutaway generates with `Engine`, transformers with `generate`. CTranslate2 is measured if it is installed. A measurement
is the time of a long completion minus the time of a short one, so that prefill and setup cancel. The order of the
implementations alternates. The limit is the bytes of the weights divided by the measured read bandwidth.
"""

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.generate import Engine, EngineConfig, SamplingParams

PROMPT = list(range(1, 33))
SHORT_TOKENS, LONG_TOKENS = 8, 72


def build_transformers_runner() -> Callable[[int], float]:
    transformers: Any = importlib.import_module("transformers")  # Any: its types are incomplete

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    tokens = torch.tensor([PROMPT])

    def run(count: int) -> float:
        start = time.perf_counter()
        model.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        return time.perf_counter() - start

    return run


def build_ctranslate2_runner() -> Callable[[int], float]:
    ctranslate2: Any = importlib.import_module("ctranslate2")
    transformers: Any = importlib.import_module("transformers")
    from tokenizers import Tokenizer, models

    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as target:
        transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(source)
        vocabulary = {f"t{i}": i for i in range(50257)}  # the converter needs the name of each token
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
        names = {"bos_token": "t50256", "eos_token": "t50256", "unk_token": "t0"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(source)
        ctranslate2.converters.TransformersConverter(source).convert(target, force=True)
        generator = ctranslate2.Generator(target, "cpu", compute_type="float32", intra_threads=torch.get_num_threads())
    prompt = [[f"t{i}" for i in PROMPT]]

    def run(count: int) -> float:
        start = time.perf_counter()
        options = {"max_length": count, "min_length": count, "include_prompt_in_result": False}
        (result,) = generator.generate_batch(prompt, beam_size=1, sampling_topk=1, **options)
        assert len(result.sequences_ids[0]) == count
        return time.perf_counter() - start

    return run


def build_cutaway_runner(model: Any, **options: Any) -> Callable[[int], float]:
    engine = Engine(EngineConfig(model, max_num_seqs=1, max_model_len=128, **options))

    def run(count: int) -> float:
        start = time.perf_counter()
        engine.submit(PROMPT, SamplingParams(max_new_tokens=count), seed=0)
        engine.run()
        return time.perf_counter() - start

    return run


def measure_read_bandwidth() -> float:
    """Maximum read bandwidth in bytes per second, of a tensor larger than any CPU cache."""
    tensor = torch.zeros(64 * 2**20)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        tensor.sum()
        seconds.append(time.perf_counter() - start)
    return tensor.numel() * 4 / min(seconds)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", action="append", metavar="NAME", help="an implementation beside transformers")
    add_json_option(parser)
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    model: Any = ct.build("gpt2", seed=0)
    builders: dict[str, Callable[[], Callable[[int], float]]] = {
        "CTranslate2 fp32": build_ctranslate2_runner,
        "fp32": lambda: build_cutaway_runner(model),
        "fp32, without kernels": lambda: build_cutaway_runner(model, compile=False),
        "fp32, compiled": lambda: build_cutaway_runner(model, compile=True),
        "16 bits": lambda: build_cutaway_runner(model, weight_bits=16),
        "8 bits": lambda: build_cutaway_runner(model, weight_bits=8),
        "4 bits": lambda: build_cutaway_runner(model, weight_bits=4),
    }
    if find_spec("ctranslate2") is None:
        del builders["CTranslate2 fp32"]
    names = arguments.only or list(builders)
    if unknown := [name for name in names if name not in builders]:
        raise SystemExit(f"--only {unknown[0]!r} is not measured; use one of {', '.join(builders)}")
    runners = {"transformers fp32": build_transformers_runner(), **{name: builders[name]() for name in names}}
    for name, runner in runners.items():
        start = time.perf_counter()
        runner(SHORT_TOKENS)
        sys.stdout.write(f"{name}: first completion after {time.perf_counter() - start:.1f} s\n")
        runner(SHORT_TOKENS)
    steps: dict[str, list[float]] = {name: [] for name in runners}
    for round_index in range(arguments.rounds):
        for name in list(runners) if round_index % 2 else list(runners)[::-1]:
            steps[name].append(
                (runners[name](LONG_TOKENS) - runners[name](SHORT_TOKENS)) / (LONG_TOKENS - SHORT_TOKENS) * 1e3
            )
    limit_ms = 4 * sum(p.numel() for p in model.parameters()) / measure_read_bandwidth() * 1e3
    rows: list[Row] = []
    for name, milliseconds in steps.items():
        ratios = [
            baseline_ms / step_ms for baseline_ms, step_ms in zip(steps["transformers fp32"], milliseconds, strict=True)
        ]
        low, median_ratio, high = statistics.quantiles(ratios, n=4)
        step_ms = statistics.median(milliseconds)
        other = name.removesuffix(" fp32") if name.endswith(" fp32") else None
        row: Row = {"implementation": other or "cutaway", "weights": "fp32" if other else name, "step_ms": step_ms}
        row |= {"tokens_per_second": 1e3 / step_ms, "speedup_over_transformers": median_ratio}
        row["speedup_quartiles"] = [low, high]
        if row["weights"].startswith("fp32"):
            row |= {"limit_ms": limit_ms, "share_of_limit": limit_ms / step_ms}
        rows.append(print_row(row))
    save_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
