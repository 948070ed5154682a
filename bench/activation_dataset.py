"""Speed of `collect_activations` compared with the plain forward pass, and its memory over time.

    python bench/activation_dataset.py [--model tiny-english] [--repeats 5] [--json FILE]

The cases run alternately in one process, with the same batches of random tokens: the forward pass, the forward pass
without the head, which `collect_activations` does not compute either, and the dataset on disk. The memory is the
resident set size during one long run.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.lens.activations import collect_activations
from cutaway.lens.adapters import ModelLike, require_cutaway_model
from cutaway.model import DecoderOnly

SEQ_LEN, BATCH_SIZE = 128, 16


def random_sequences(vocab_size: int, count: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randint(vocab_size, (SEQ_LEN,), generator=generator).tolist()


def run_forward(run: Callable[[torch.Tensor], torch.Tensor], sequences: list[list[int]], device: torch.device) -> None:
    with torch.no_grad():
        for start in range(0, len(sequences), BATCH_SIZE):
            run(torch.tensor(sequences[start : start + BATCH_SIZE], device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def measure_memory(model: ModelLike, sites: list[str], directory: Path, num_sequences: int) -> list[tuple[int, float]]:
    """Return (tokens, resident set size in MB) at ten moments of one run."""
    vocab_size = require_cutaway_model(model).config.vocab_size
    samples: list[tuple[int, float]] = []

    def sampled() -> Iterator[list[int]]:
        for number, ids in enumerate(random_sequences(vocab_size, num_sequences)):
            if number % max(num_sequences // 10, 1) == 0:
                samples.append((number * SEQ_LEN, resident_megabytes()))
            yield ids

    collect(model, sampled(), sites, directory)
    return samples


def collect(model: ModelLike, corpus: Iterator[list[int]] | list[list[int]], sites: list[str], directory: Path) -> None:
    collect_activations(
        model, corpus, *sites, directory=directory, seq_len=SEQ_LEN, batch_size=BATCH_SIZE, tokens_per_shard=8192
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="tiny-english", help="a checkpoint, or the name of a preset (random weights)"
    )
    parser.add_argument("--sequences", type=int, default=192, help=f"number of sequences of {SEQ_LEN} tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    if args.model in ct.presets():
        model: ModelLike = ct.build(args.model, seed=0, device=args.device).eval()
    else:
        model = ct.load(args.model, device=args.device)
    module = require_cutaway_model(model).eval()
    assert isinstance(module, DecoderOnly), "a decoder is needed"
    device = next(module.parameters()).device
    depth = len(list(module.get_submodule("decoder.blocks").children()))
    middle, last = f"blocks.{depth // 2}.resid_post", f"blocks.{depth - 1}.resid_post"
    sequences = list(random_sequences(module.config.vocab_size, args.sequences))
    tokens = SEQ_LEN * len(sequences)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "activations"
        cases: dict[str, Callable[[], None]] = {
            "forward pass": lambda: run_forward(module, sequences, device),
            "forward pass, no head": lambda: run_forward(module.hidden_states, sequences, device),
            "dataset, last block": lambda: collect(model, sequences, [last], directory),
            "dataset, middle block": lambda: collect(model, sequences, [middle], directory),
            "dataset, all blocks": lambda: collect(model, sequences, ["resid_post"], directory),
        }
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        written: dict[str, int] = {}
        for repeat in range(-1, args.repeats):  # the first repeat warms up
            for name, run in list(cases.items())[:: 1 if repeat % 2 else -1]:
                start = time.perf_counter()
                run()
                if repeat >= 0:
                    seconds[name].append(time.perf_counter() - start)
                    written[name] = sum(file.stat().st_size for file in directory.glob("*"))
                shutil.rmtree(directory, ignore_errors=True)
        rows = []
        for name, times in seconds.items():
            ratios = [
                statistics.median(forward / own for forward, own in zip(seconds[baseline], times, strict=True))
                for baseline in ("forward pass", "forward pass, no head")
            ]
            row: Row = {"case": name, "model": args.model, "tokens_per_second": tokens / statistics.median(times)}
            row |= {"speed_over_forward": ratios[0], "speed_over_forward_without_head": ratios[1]}
            row["written_mb_per_second"] = written[name] / statistics.median(times) / 1e6
            rows.append(print_row(row))
        for num_tokens, size in measure_memory(model, [last], directory, 4 * args.sequences):
            rows.append(print_row({"case": "resident memory", "num_tokens": num_tokens, "memory_mb": size}))
    save_rows(args.json, rows, device=args.device)


if __name__ == "__main__":
    main()
