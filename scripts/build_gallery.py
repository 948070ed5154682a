"""Makes docs/gallery: runs the Python of docs/gallery.md from top to bottom, and keeps its pictures and numbers.

python scripts/build_gallery.py [--out docs/gallery]

The page is its own program: what a block ends with is drawn into the picture that follows it, and the numbers of its
sentences are read from what the blocks made. The model is the shipped one, so the same pictures come out every time.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from run_notebook import MATPLOTLIB_STYLE

GALLERY_PAGE = Path(__file__).parents[1] / "docs" / "gallery.md"
BLOCK_PATTERN = re.compile(r"```python\n(.*?)```\n(?:\s*!\[[^\]]*\]\(gallery/([\w-]+\.svg)\))?", re.DOTALL)
COMMAND_PATTERN = re.compile(r"```console\n\$ cutaway (.*?)\n(.*?)```", re.DOTALL)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path, default=GALLERY_PAGE.with_suffix(""), help="where pictures and numbers go")
    out = asked.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # sums are then in one order
    made = run_gallery(GALLERY_PAGE.read_text(), out)
    (out / "trace.txt").write_text(capture_trace_table(GALLERY_PAGE.read_text()))
    told = json.dumps(round_values(made["numbers"]), indent=1, ensure_ascii=False)
    (out / "numbers.json").write_text(told + "\n")


def run_gallery(page: str, out: Path) -> dict[str, Any]:
    """The names that the page's blocks made, with the numbers that its sentences are to have."""
    names: dict[str, Any] = {}
    for code, picture in BLOCK_PATTERN.findall(page):
        block = ast.parse(code)
        if picture:  # its last line is a figure, as a notebook's would be
            last = block.body[-1]
            assert isinstance(last, ast.Expr), f"the block before {picture} ends with no figure"
            block.body[-1] = ast.copy_location(ast.Assign([ast.Name("figure", ast.Store())], last.value), last)
        exec(compile(ast.fix_missing_locations(block), str(GALLERY_PAGE), "exec"), names)
        if picture:
            with rc_context(MATPLOTLIB_STYLE):
                names.pop("figure").savefig(out / picture, metadata={"Date": None})
    return names | {"numbers": collect_numbers(names)}


def capture_trace_table(page: str) -> str:
    """What the command on the page prints, from its table's head to its table's end."""
    [(arguments, _)] = COMMAND_PATTERN.findall(page)
    words = [word.strip("\"'") for word in re.findall(r'"[^"]*"|\S+', arguments)]
    said = subprocess.run(
        [sys.executable, "-m", "cutaway", *words],
        capture_output=True,
        text=True,
        check=True,
        env=terminal_environment(),
    ).stdout
    lines = [line.rstrip(" ━╸╺") for line in said.splitlines()]
    start = next(at for at, line in enumerate(lines) if line.startswith("stage"))
    return "\n".join(lines[start : lines.index("", start)]) + "\n"


def terminal_environment() -> dict[str, str]:
    return os.environ | {"COLUMNS": "90", "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}


def collect_numbers(namespace: dict[str, Any]) -> dict[str, Any]:
    """By the page's headings: what its sentences say."""
    lens, parts, by_head = namespace["lens"], namespace["parts"], namespace["by_head"]
    kinds, carried, heads, paths = namespace["kinds"], namespace["carried"], namespace["heads"], namespace["paths"]
    planted, brought, lost, missed = namespace["planted"], namespace["brought"], namespace["lost"], namespace["missed"]
    norms, added, spread, keys, values = (namespace[name] for name in ("norms", "added", "spread", "keys", "values"))
    loss = lost.select(metric="loss")
    return {
        "What it would say by then": {
            "last token, by layer": lens.select(token=-1).values.tolist(),
            "says": lens.annotations[:, -1].tolist(),
            "after (os, by layer": lens.select(token=-2).values.tolist(),
        },
        "What wrote the logit": {
            "sum": float(parts.values.sum()),
            "sum by head": float(by_head.values.sum()),
            "logit": float(parts.note.split()[-1]),
            "by part": label_values(parts),
            "largest heads": [[*place, amount] for place, amount in by_head.top(12) if "attn" in place[0]][:3],
        },
        "Kinds of heads, and what they are for": {
            **{
                head_type: top_values(kinds.select(head_type=head_type), 5)
                for head_type in ("previous_token", "induction")
            },
            "chance": float(kinds.note.split()[-1]),
            "gains": dict(zip(namespace["names"], namespace["gains"], strict=True)),
        },
        "Where an answer is carried": {
            "at (os/(re": carried.select(token=5).values.tolist(),
            "at the last token": carried.select(token=-1).values.tolist(),
            "elsewhere, at most": round(float(carried.values[:, :5].abs().max()), 3),
            "clean and corrupt": [float(word) for word in re.findall(r"[-\d.]+\d", carried.note)][:2],
            "by head": top_values(heads, 5),
            "paths": label_values(paths),
        },
        "A planted fact is found": {
            "at the key": planted.select(token=2).values.tolist(),
            "at the last token": planted.select(token=-1).values.tolist(),
            "brought to the last token by attention": brought.select(token=-1).values.tolist(),
            "lead": namespace["leads"],
            "loss": namespace["loss"].item(),
        },
        "What is lost without a part": label_values(loss) | {"heads missed most": top_values(missed, 3)},
        "The stream by depth": {
            "norm, mean by layer": norms.values.mean(1).tolist(),
            "added, mean by sublayer": dict(zip(added.labels[0], added.values.mean(1).tolist(), strict=True)),
            "entropy, mean by layer": spread.values.mean(1).tolist(),
            "entropy, least": [[*place, value] for place, value in smallest_values(spread)],
        },
        "A neuron, its key and its value": {
            "keys": top_values(keys, 6),
            "raised": dict(zip(values.labels[0][:8], values.values[:8].tolist(), strict=True)),
        },
    }


def label_values(result: Any) -> dict[str, float]:
    return dict(zip(result.labels[0], result.values.tolist(), strict=True))


def top_values(result: Any, count: int) -> list[list[Any]]:
    return [[*place, value] for place, value in result.top(count)]


def smallest_values(result: Any) -> list[tuple[tuple[str, ...], float]]:
    return sorted(result.top(result.values.numel()), key=lambda pair: pair[1])[:3]


def round_values(value: Any) -> Any:
    """To four digits: the last bits are a machine's own."""
    if isinstance(value, dict):
        return {name: round_values(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [round_values(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
