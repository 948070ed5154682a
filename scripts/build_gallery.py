"""Build docs/gallery: run the Python blocks of docs/gallery.md and docs/mechanisms.md, and write figures and numbers.

python scripts/build_gallery.py [--out docs/gallery]

If an image follows a block, the last expression of the block is a figure and is saved as this image. The numbers in the
text of gallery.md are computed from the variables of the blocks. The models are pretrained, so the output is the same
on every run.
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

from cutaway.learn.notebooks.figures import FIGURE_STYLE

GALLERY_PAGE = Path(__file__).parents[1] / "docs" / "gallery.md"
MECHANISMS_PAGE = GALLERY_PAGE.with_name("mechanisms.md")
BLOCK_PATTERN = re.compile(r"```python\n(.*?)```\n(?:\s*!\[[^\]]*\]\(gallery/([\w-]+\.svg)\))?", re.DOTALL)
COMMAND_PATTERN = re.compile(r"```console\n\$ cutaway (.*?)\n(.*?)```", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=GALLERY_PAGE.with_suffix(""), help="output directory")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # deterministic order of summation
    run_blocks(MECHANISMS_PAGE.read_text(), out)
    namespace = run_blocks(GALLERY_PAGE.read_text(), out)
    (out / "trace.txt").write_text(capture_trace_table(GALLERY_PAGE.read_text()))
    text = json.dumps(round_values(collect_numbers(namespace)), indent=1, ensure_ascii=False)
    (out / "numbers.json").write_text(text + "\n")


def run_blocks(page: str, out: Path) -> dict[str, Any]:
    """Run the Python blocks of a page and save their figures. Return their variables."""
    namespace: dict[str, Any] = {}
    for code, figure_name in BLOCK_PATTERN.findall(page):
        tree = ast.parse(code)
        if figure_name:  # the last expression is a figure, as in a notebook
            last = tree.body[-1]
            assert isinstance(last, ast.Expr), f"the block before {figure_name} does not end with a figure"
            tree.body[-1] = ast.copy_location(ast.Assign([ast.Name("figure", ast.Store())], last.value), last)
        exec(compile(ast.fix_missing_locations(tree), str(GALLERY_PAGE), "exec"), namespace)
        if figure_name:
            with rc_context(FIGURE_STYLE):
                namespace.pop("figure").savefig(out / figure_name, metadata={"Date": None})
    return namespace


def capture_trace_table(page: str) -> str:
    """Run the `cutaway` command of the page and return the table that it prints."""
    [(arguments, _)] = COMMAND_PATTERN.findall(page)
    args = [arg.strip("\"'") for arg in re.findall(r'"[^"]*"|\S+', arguments)]
    output = subprocess.run(
        [sys.executable, "-m", "cutaway", *args],
        capture_output=True,
        text=True,
        check=True,
        env=terminal_environment(),
    ).stdout
    lines = [line.rstrip(" ━╸╺") for line in output.splitlines()]
    start = next(index for index, line in enumerate(lines) if line.startswith("site "))
    return "\n".join(lines[start : lines.index("", start)]) + "\n"


def terminal_environment() -> dict[str, str]:
    return os.environ | {"COLUMNS": "90", "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}


def collect_numbers(namespace: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers that the text of the page quotes, by heading of the page."""
    lens, parts, by_head = namespace["lens"], namespace["parts"], namespace["by_head"]
    head_scores, paths = namespace["head_scores"], namespace["paths"]
    resid_patching, head_patching = namespace["resid_patching"], namespace["head_patching"]
    planted_resid, planted_attn = namespace["planted_resid"], namespace["planted_attn"]
    loss, head_ablation = namespace["ablation"].select(metric="loss"), namespace["head_ablation"]
    norms, update_ratios, entropy = (namespace[name] for name in ("norms", "update_ratios", "attention_entropy"))
    keys, values = namespace["keys"], namespace["values"]
    return {
        "Logit lens": {
            "last token, by layer": lens.select(token=-1).values.tolist(),
            "predicted token": lens.annotations[:, -1].tolist(),
            "after (os, by layer": lens.select(token=-2).values.tolist(),
        },
        "Direct logit attribution": {
            "sum": float(parts.values.sum()),
            "sum by head": float(by_head.values.sum()),
            "logit": float(parts.note.split()[-1]),
            "by part": label_values(parts),
            "largest heads": [[*labels, value] for labels, value in by_head.top(12) if "attn" in labels[0]][:3],
        },
        "Attention heads: previous-token and induction heads": {
            **{
                head_type: top_values(head_scores.select(head_type=head_type), 5)
                for head_type in ("previous_token", "induction")
            },
            "chance": float(head_scores.note.split()[-2]) / 100,  # "uniform attention has score 2.1 %"
            "gains": dict(zip(namespace["names"], namespace["gains"], strict=True)),
        },
        "Activation patching and path patching": {
            "at (os/(re": resid_patching.select(token=5).values.tolist(),
            "at the last token": resid_patching.select(token=-1).values.tolist(),
            "elsewhere, at most": round(float(resid_patching.values[:, :5].abs().max()), 3),
            "clean and corrupt": [float(word) for word in re.findall(r"[-\d.]+\d", resid_patching.note)][:2],
            "by head": top_values(head_patching, 5),
            "paths": label_values(paths),
        },
        "Validation of patching on a planted fact": {
            "at the key": planted_resid.select(token=2).values.tolist(),
            "at the last token": planted_resid.select(token=-1).values.tolist(),
            "attn.out at the last token": planted_attn.select(token=-1).values.tolist(),
            "logit difference": namespace["logit_differences"],
            "loss": namespace["loss"].item(),
        },
        "Ablation of blocks, sublayers and heads": label_values(loss)
        | {"largest of single heads": top_values(head_ablation, 3)},
        "Residual stream norms by depth": {
            "norm, mean by layer": norms.values.mean(1).tolist(),
            "update norm ratio, mean by sublayer": dict(
                zip(update_ratios.labels[0], update_ratios.values.mean(1).tolist(), strict=True)
            ),
            "entropy, mean by layer": entropy.values.mean(1).tolist(),
            "entropy, smallest": [[*labels, value] for labels, value in smallest_values(entropy)],
        },
        "FFN neurons as key-value pairs": {
            "keys": top_values(keys, 6),
            "raised": dict(zip(values.labels[0][:8], values.values[:8].tolist(), strict=True)),
        },
    }


def label_values(result: Any) -> dict[str, float]:
    return dict(zip(result.labels[0], result.values.tolist(), strict=True))


def top_values(result: Any, count: int) -> list[list[Any]]:
    return [[*labels, value] for labels, value in result.top(count)]


def smallest_values(result: Any) -> list[tuple[tuple[str, ...], float]]:
    return sorted(result.top(result.values.numel()), key=lambda pair: pair[1])[:3]


def round_values(value: Any) -> Any:
    """Round all floats in nested dicts and lists to four significant digits, which are the same on all machines."""
    if isinstance(value, dict):
        return {name: round_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_values(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
