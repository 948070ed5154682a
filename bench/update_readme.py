"""Write the benchmark table of README.md from the results in bench/results/.

    python bench/update_readme.py [--check]

All values of a row come from one file, that is from one run. A row without results is left out. With --check, nothing
is written, and the exit code is 1 if README.md is out of date.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import Results, Row, load_results

ROOT = Path(__file__).parents[1]
README, RESULTS_DIR = ROOT / "README.md", ROOT / "bench" / "results"
BEGIN, END = "<!-- begin of the table that bench/update_readme.py writes -->", "<!-- end of the table -->"

Cell = tuple[Row, str]
"""Fields that select a row of the results, beside those of the table row, and the text of its values."""


@dataclass(frozen=True)
class TableRow:
    """A row of the table in README.md."""

    work: str
    command: str
    """Reproduces the results; with `--json bench/results/NAME.json` it writes them."""
    where: Row
    """Fields of the results that belong to this row."""
    ours: tuple[Cell, ...]
    others: tuple[Cell, ...] = field(default=())
    """Other libraries. Those without results are left out."""


def cutaway(text: str, **fields: Any) -> Cell:
    return {"implementation": "cutaway", **fields}, text


def other(name: str, text: str, **fields: Any) -> Cell:
    return {"implementation": name, **fields}, f"{name} {text}"


def first_token(work: str, case: str) -> TableRow:
    return TableRow(
        f"first token of {work}, Llama-3-8B in bf16",
        "python bench/prefill_gpu.py",
        {"case": case},
        (
            cutaway("{first_token_ms:.1f} ms, {share_of_limit:.0%} of the compute limit", method="generate"),
            cutaway("running engine {first_token_ms:.1f} ms", method="running engine"),
        ),
        (other("transformers", "{first_token_ms:.1f} ms", method="generate"),),
    )


def decode_llama(weights: str, batch_size: int, context: int) -> TableRow:
    return TableRow(
        f"decode Llama-3-8B, {weights}, batch size {batch_size}, context {context:,}",
        "python bench/decode_gpu.py --gpt-fast DIR",
        {"case": "decode step", "weights": weights, "batch_size": batch_size, "context": context},
        (cutaway("{step_ms:.2f} ms per step, {share_of_limit:.0%} of the bandwidth limit"),),
        (other("gpt-fast", "{step_ms:.2f} ms"), other("transformers", "{step_ms:.2f} ms")),
    )


def decode_experts(model: str, kind: str) -> TableRow:
    text = "{step_ms:.2f} ms per step, {share_of_limit:.0%} of the bandwidth limit"
    return TableRow(
        f"decode {model}, {kind}, bf16",
        "python bench/decode_moe_gpu.py",
        {"model": model},
        (cutaway(text, batch_size=1), cutaway("batch size 32 " + text, batch_size=32)),
    )


def tracing(work: str, options: str, batch_size: int, seq_len: int) -> TableRow:
    text = "{slowdown:.2f} × the untraced forward pass"
    return TableRow(
        f"record all activations of GPT-2 124M, fp32, {work}",
        f"python bench/trace_overhead.py{options}",
        {"batch_size": batch_size, "seq_len": seq_len},
        (
            cutaway("{slowdown:.2f} × the untraced forward pass", activations="all activations"),
            cutaway("residual stream {slowdown:.2f} ×", activations="residual stream"),
        ),
        (
            other("TransformerLens", text, activations="run_with_cache"),
            other("transformers", "with output_hidden_states {slowdown:.2f} ×", activations="output_hidden_states"),
        ),
    )


def server_latency(work: str, options: str, model: str, dtype: str) -> TableRow:
    engine: Cell = ({"implementation": "cutaway engine"}, "engine without the server {first_token_ms:.1f} ms")
    return TableRow(
        f"first streamed token of `cutaway serve`, prompt of 128 tokens, {work}",
        f"python bench/serve_latency.py{options}",
        {"model": model, "dtype": dtype, "prompt_len": 128},
        (({"implementation": "cutaway serve"}, "{first_token_ms:.1f} ms"), engine),
    )


def train_gpu(work: str, model: str) -> TableRow:
    text = "{tokens_per_second:,.0f} tokens/s, {peak_memory_gb:.1f} GB"
    return TableRow(
        f"train {work}",
        "python bench/train_gpu.py --nanogpt DIR",
        {"model": model},
        (cutaway(text),),
        (other("nanoGPT", text), other("transformers", f"(compiled) {text}")),
    )


TABLE = (
    first_token("32 prompts of 1,024 tokens", "32x1024"),
    first_token("one prompt of 8,000 tokens", "1x8000"),
    first_token("one prompt of 128 tokens", "1x128"),
    server_latency("Llama-3-8B in bf16", "", "llama-3-8b", "bfloat16"),
    decode_llama("bf16", 1, 128),
    decode_llama("bf16", 32, 1024),
    decode_llama("8 bits", 1, 128),
    decode_llama("4 bits", 1, 128),
    decode_experts("gpt-oss-20b", "mixture of experts"),
    decode_experts("qwen3-30b-a3b", "mixture of experts"),
    decode_experts("deepseek-v2-lite", "mixture of experts with latent attention"),
    TableRow(
        "64 requests to Llama-3-8B in bf16, prompts of 16–1,024 tokens, completions of 16–512",
        "python bench/decode_gpu.py --part engine",
        {"case": "requests of different lengths", "num_requests": 64},
        (
            cutaway("{tokens_per_second:,.0f} tokens/s"),
            cutaway("time in prefill {prefill_share:.0%}, in decode {decode_share:.0%}"),
        ),
        (other("transformers", "(one padded batch) {tokens_per_second:,.0f} tokens/s"),),
    ),
    train_gpu("GPT-2 124M, bf16, 64 × 1,024", "gpt2"),
    train_gpu("Llama-3.2-1B, bf16, 8 × 2,048", "llama-3.2-1b"),
    tracing("4 × 1,024 tokens on a GPU", " --device cuda --batch-size 4 --seq-len 1024", 4, 1024),
    tracing("256 tokens on a CPU", "", 1, 256),
    TableRow(
        "decode GPT-2 124M on a CPU, fp32",
        "python bench/decode_cpu.py",
        {"weights": "fp32"},
        (cutaway("{step_ms:.1f} ms per step, {share_of_limit:.0%} of the bandwidth limit"),),
        (other("CTranslate2", "{step_ms:.1f} ms"), other("transformers", "{step_ms:.1f} ms")),
    ),
    TableRow(
        "decode a GGUF file of {file_mb:,.0f} MB on a CPU, {file}",
        "python bench/gguf_cpu.py MODEL.gguf",
        {"prompt_len": 256},
        (cutaway("{decode_tokens_per_second:.1f} tokens/s, prefill {prefill_tokens_per_second:.0f} tokens/s"),),
        (
            other(
                "llama.cpp", "{decode_tokens_per_second:.1f} tokens/s, prefill {prefill_tokens_per_second:.0f} tokens/s"
            ),
        ),
    ),
    TableRow(
        "train GPT-2 124M on a CPU, fp32, 4 × 256",
        "python bench/train_cpu.py",
        {"batch_size": 4, "seq_len": 256},
        (cutaway("{tokens_per_second:.0f} tokens/s, {peak_memory_gib:.1f} GiB"),),
        (
            other("transformers compiled", "{tokens_per_second:.0f} tokens/s, {peak_memory_gib:.1f} GiB"),
            other("transformers eager", "{tokens_per_second:.0f} tokens/s, {peak_memory_gib:.1f} GiB"),
        ),
    ),
    server_latency("SmolLM2-135M on a CPU, fp32", " --model smollm2-135m --device cpu", "smollm2-135m", "float32"),
)


def find_row(rows: Iterable[Row], fields: Row) -> Row | None:
    """The row that has these fields. Raise ValueError if there are several."""
    found = [row for row in rows if all(row.get(name) == value for name, value in fields.items())]
    if len(found) > 1:
        raise ValueError(f"{len(found)} rows of one file have the fields {fields}; the table needs exactly one of them")
    return found[0] if found else None


def format_cells(cells: Iterable[Cell], where: Row, rows: list[Row], separator: str) -> str:
    found = ((text, find_row(rows, where | fields)) for fields, text in cells)
    return separator.join(text.format_map(row) for text, row in found if row is not None)


def table_lines(table: Iterable[TableRow], all_results: Iterable[Results]) -> Iterator[tuple[str, Results]]:
    """Markdown lines of the rows that have results, one for each file with results, and these results."""
    for row in table:
        for results in all_results:
            if f"bench/{results.bench}.py" not in row.command.split():
                continue
            first = find_row(results.rows, row.where | row.ours[0][0])
            if first is None:
                continue
            ours = format_cells(row.ours, row.where, results.rows, "; ")
            others = format_cells(row.others, row.where, results.rows, "; ")
            yield f"| {row.work.format_map(first)} | {ours} | {others} | `{row.command}` |", results


def describe_machine(results: Results) -> str:
    machine = f"{results.cpu}, {results.threads} threads" if results.device == "cpu" else results.device
    return f"{machine}, PyTorch {results.torch}"


def render_table(table: Iterable[TableRow], all_results: list[Results]) -> str:
    """Markdown table of the results, and the machines on which they were measured."""
    lines = list(table_lines(table, all_results))
    works = [line.split(" | ")[0] for line, _ in lines]
    if repeated := {work for work in works if works.count(work) > 1}:
        raise ValueError(f"several files in bench/results have results for {sorted(repeated)}; keep one of them")
    head = ["| | cutaway | other libraries, same run | reproduce |", "|---|---|---|---|"]
    machines = sorted({describe_machine(results) for _, results in lines})
    conditions = ["", f"Measured on: {'; '.join(machines)}."] if machines else []
    return "\n".join([*head, *(line for line, _ in lines), *conditions])


def replace_table(readme: str, table: str) -> str:
    """README with the table between the two comments replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"README.md lacks the comments {BEGIN!r} and {END!r}; add them where the table belongs")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def load_all_results(directory: Path = RESULTS_DIR) -> list[Results]:
    return [load_results(path) for path in sorted(directory.glob("*.json"))]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    readme = README.read_text(encoding="utf-8")
    updated = replace_table(readme, render_table(TABLE, load_all_results()))
    if not args.check:
        README.write_text(updated, encoding="utf-8")
    elif updated != readme:
        print("README.md is out of date; run python bench/update_readme.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
