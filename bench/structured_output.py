"""Structured output: which schemas of a suite are supported, whether generated JSON is valid, and the time per token.

A suite is a directory of JSON files, each with an object or a list of objects {"schema": …, "tests": [{"data": …,
"valid": …}]}: JSON-Schema-Test-Suite (tests/draft2020-12) or MaskBench of JSONSchemaBench.

    python bench/structured_output.py suite DIRECTORY...
    python bench/structured_output.py generate DIRECTORY... --count 2000
    python bench/structured_output.py overhead DIRECTORY... --source MODEL
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

import cutaway as ct
from cutaway.errors import CutawayError, InputError
from cutaway.generate.generation_config import unpack_checkpoint
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.generate.structured_output.constraint import bitmask_width
from cutaway.generate.structured_output.grammar import GrammarCompiler, get_grammar_compiler


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


def measure_suite(args: argparse.Namespace) -> dict[str, Any]:
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
            counts["invalid accepted"] += accepted and not test["valid"]
            counts["valid rejected"] += test["valid"] and not accepted
            if accepted != test["valid"] and args.show_wrong:
                print(json.dumps({"schema": entry["schema"], **test}))
    mask_times.sort()
    return {
        **counts,
        "supported": 1 - counts["refused"] / counts["schemas"],
        "compile ms": {"median": statistics.median(compile_times) * 1e3, "max": max(compile_times) * 1e3},
        "mask us": {
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


def measure_generations(args: argparse.Namespace) -> dict[str, Any]:
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


def measure_overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Time per token with a schema, as a ratio to the same number of tokens without, in alternating runs."""
    checkpoint = ct.load(args.source)
    compiler = build_compiler(checkpoint)
    prompt = "Describe a person and a city as JSON.\n"
    ratios: list[float] = []
    times: list[float] = []
    schemas = supported_schemas(args, compiler)
    ct.generate(checkpoint, prompt, max_new_tokens=8)
    while len(ratios) < args.repeats:
        schema = next(schemas)
        start = time.perf_counter()
        (constrained,) = ct.generate(checkpoint, prompt, schema=schema, max_new_tokens=args.max_new_tokens)
        constrained_time = time.perf_counter() - start
        count = len(constrained.tokens)
        if count < args.max_new_tokens // 2:  # too short to measure
            continue
        start = time.perf_counter()
        ct.generate(checkpoint, prompt, max_new_tokens=count, ignore_eos=True)
        free_time = time.perf_counter() - start
        ratios.append(constrained_time / free_time)
        times.append((constrained_time - free_time) / count)
    return {
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "ms per token": statistics.median(times) * 1e3,
        "runs": len(ratios),
    }


def main() -> None:
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
    parser.add_argument("--show-wrong", action="store_true", help="suite: print instances with wrong decisions")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    measure = {"suite": measure_suite, "generate": measure_generations, "overhead": measure_overhead}
    result = measure[args.measurement](args)
    text = json.dumps(result, indent=2, ensure_ascii=False)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
