"""Structured output: which schemas of a suite are supported, whether generated JSON is valid, and the time per token.

A suite is a directory of JSON files, each with an object or a list of objects {"schema": …, "tests": [{"data": …,
"valid": …}]}: JSON-Schema-Test-Suite (tests/draft2020-12) or MaskBench of JSONSchemaBench.

    python bench/structured_output.py suite DIRECTORY...
    python bench/structured_output.py generate DIRECTORY... --count 2000
    python bench/structured_output.py overhead DIRECTORY... --source MODEL [--preset llama-3-8b --device cuda --rows 16]
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import torch
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.errors import CutawayError, InputError
from cutaway.generate import Engine, EngineConfig
from cutaway.generate.generation_config import GenerationConfig, unpack_checkpoint
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.generate.structured_output.constraint import bitmask_width
from cutaway.generate.structured_output.grammar import GrammarCompiler, get_grammar_compiler
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer


def read_suite(directories: Sequence[Path], limit: int | None, seed: int) -> list[dict[str, Any]]:
    """Schemas with their tests, in random order."""
    files = sorted(file for directory in directories for file in directory.glob("*.json"))
    random.Random(seed).shuffle(files)
    entries: list[dict[str, Any]] = []
    for file in files[:limit]:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            print(f"{file} is left out: {error}")
            continue
        for entry in content if isinstance(content, list) else [content]:
            if isinstance(entry, dict):
                entries.append(entry if "schema" in entry else {"schema": entry})
    return entries


def build_compiler(checkpoint: Any) -> GrammarCompiler:
    model, tokenizer, generation_config = unpack_checkpoint(checkpoint)
    assert tokenizer is not None
    return get_grammar_compiler(tokenizer, model.config.vocab_size, generation_config.eos_token_ids)


def measure_suite(args: argparse.Namespace) -> Row:
    """Share of supported schemas, wrong decisions on their instances, and the times of compilation and masks."""
    checkpoint = ct.load(args.source)
    compiler = build_compiler(checkpoint)
    tokenizer, width = checkpoint.tokenizer, bitmask_width(checkpoint.config.vocab_size)
    assert tokenizer is not None
    counts: Counter[str] = Counter()
    compile_times, mask_times = [], []
    mask = torch.zeros(width, dtype=torch.int32)
    for entry in read_suite(args.suites, args.limit, args.seed):
        counts["schemas"] += 1
        start = time.perf_counter()
        try:
            constraint = SamplingParams(schema=entry["schema"]).constraint
            assert constraint is not None
            grammar = compiler.compile(constraint)
        except InputError:
            counts["refused"] += 1
            continue
        compile_times.append(time.perf_counter() - start)
        for test in entry.get("tests", ()):
            text = json.dumps(test["data"], ensure_ascii=False)
            state = grammar.copy()
            accepted = True
            for position, token in enumerate(tokenizer.encode(text, add_special_tokens=False)):
                start = time.perf_counter()
                state.fill_bitmask(mask)
                mask_times.append(time.perf_counter() - start)
                if state.is_finished:
                    accepted = False
                    break
                state.accept(token, position)
                if state.error is not None:
                    accepted = False
                    break
            accepted = accepted and state.is_complete
            counts["instances"] += 1
            counts["invalid_accepted"] += accepted and not test["valid"]
            counts["valid_rejected"] += test["valid"] and not accepted
            if accepted != test["valid"] and args.show_wrong:
                print(json.dumps({"schema": entry["schema"], **test}))
    mask_times.sort()
    return {
        **counts,
        "supported": 1 - counts["refused"] / counts["schemas"],
        "compile_ms": {"median": statistics.median(compile_times) * 1e3, "max": max(compile_times) * 1e3},
        "mask_us": {
            name: mask_times[int(share * (len(mask_times) - 1))] * 1e6
            for name, share in (("median", 0.5), ("p99", 0.99), ("max", 1.0))
        },
    }


def supported_schemas(args: argparse.Namespace, compiler: GrammarCompiler) -> Iterator[Any]:
    for entry in read_suite(args.suites, args.limit, args.seed):
        try:
            constraint = SamplingParams(schema=entry["schema"]).constraint
            assert constraint is not None
            compiler.compile(constraint)
        except InputError:
            continue
        yield entry["schema"]


def measure_generations(args: argparse.Namespace) -> Row:
    """Validity of sampled completions, each of which is checked by the jsonschema package."""
    checkpoint = ct.load(args.source)
    counts: Counter[str] = Counter()
    violations: list[Any] = []
    for schema in supported_schemas(args, build_compiler(checkpoint)):
        if counts["finished"] >= args.count:
            break
        counts["schemas"] += 1
        if counts["schemas"] % 10 == 0:
            print(f"\r{dict(counts)}", end="", file=sys.stderr)
        try:
            completions = ct.generate(
                checkpoint, args.prompt, schema=schema, temperature=1.0, seed=counts["schemas"], n=args.n,
                max_new_tokens=args.max_new_tokens,
            )  # fmt: skip
        except CutawayError as error:
            counts["errors"] += 1
            violations.append(str(error))
            continue
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
        for completion in completions:
            counts[completion.finish_reason] += 1
            if completion.finish_reason != "stop":
                continue
            counts["finished"] += 1
            try:
                validator.validate(json.loads(completion.text or ""))
            except (ValueError, jsonschema.ValidationError) as error:
                counts["violations"] += 1
                violations.append({"schema": schema, "text": completion.text, "error": str(error)[:300]})
    return {**counts, "examples": violations[:5]}


def load_for_overhead(args: argparse.Namespace) -> tuple[Transformer, Tokenizer, GenerationConfig]:
    """The model and tokenizer of `--source`. With `--preset`, the model has that shape and random weights."""
    model, tokenizer, generation_config = unpack_checkpoint(ct.load(args.source))
    assert tokenizer is not None
    dtype = torch.bfloat16 if args.device == "cuda" else None
    if args.preset is None:
        return model.to(args.device, dtype), tokenizer, generation_config
    config = ct.config(args.preset).model_copy(update={"vocab_size": model.config.vocab_size})
    return ct.build(config, device=args.device, dtype=dtype, seed=0), tokenizer, generation_config


def measure_overhead(args: argparse.Namespace) -> Row:
    """Time per step with a schema, as a ratio to the same number of steps without, in alternating runs."""
    model, tokenizer, generation_config = load_for_overhead(args)
    compiler = get_grammar_compiler(tokenizer, model.config.vocab_size, generation_config.eos_token_ids)
    prompt = tokenizer.encode("Describe a person and a city as JSON.\n")
    schemas = supported_schemas(args, compiler)
    options: dict[str, Any] = {"compile": True} if args.device == "cuda" else {}
    engine = Engine(
        EngineConfig(model, max_num_seqs=args.rows, max_model_len=len(prompt) + args.max_new_tokens, **options),
        tokenizer=tokenizer,
    )

    def seconds_per_step(**params: Any) -> float | None:
        sampling_params = SamplingParams(temperature=1.0, max_new_tokens=args.max_new_tokens, **params)
        for row in range(args.rows):
            engine.submit(prompt, sampling_params, seed=row)
        while engine.num_decoding < args.rows and engine.step():  # until all rows decode
            pass
        start, steps = time.perf_counter(), 0
        while engine.num_decoding == args.rows and engine.step():  # until the first completion ends
            steps += 1
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / max(steps, 1)
        engine.run()
        return seconds if steps >= args.max_new_tokens // 2 else None  # a shorter run is too short to measure

    seconds_per_step(ignore_eos=True)
    constrained: list[float] = []
    free: list[float] = []
    ratios: list[float] = []
    while len(ratios) < args.repeats:
        seconds = seconds_per_step(schema=next(schemas))
        if seconds is None:
            continue
        free_seconds = seconds_per_step(ignore_eos=True)
        assert free_seconds is not None
        constrained.append(seconds)
        free.append(free_seconds)
        ratios.append(seconds / free_seconds)
    engine.close()
    return {
        "model": args.preset or args.source,
        "batch_size": args.rows,
        "vocab_size": model.config.vocab_size,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "constrained_step_ms": statistics.median(constrained) * 1e3,
        "unconstrained_step_ms": statistics.median(free) * 1e3,
        "num_runs": len(ratios),
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measurement", choices=["suite", "generate", "overhead"])
    parser.add_argument("suites", nargs="+", type=Path)
    parser.add_argument("--source", default="tiny-english")
    parser.add_argument("--limit", type=int, help="number of files, chosen at random; default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000, help="number of finished completions")
    parser.add_argument("--n", type=int, default=8, help="completions per schema")
    parser.add_argument("--prompt", default="Answer:")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--preset", help="overhead: random weights in the shape of this preset")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="overhead: device of the model")
    parser.add_argument("--rows", type=int, default=1, help="overhead: number of requests in the batch")
    parser.add_argument("--show-wrong", action="store_true", help="suite: print instances with wrong decisions")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    measure = {"suite": measure_suite, "generate": measure_generations, "overhead": measure_overhead}
    row = print_row({"case": args.measurement, **measure[args.measurement](args)})
    save_rows(args.json, [row], device=args.device)


if __name__ == "__main__":
    main()
