"""The page in a real browser, against a live server: what it shows is what Python says."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.cli.verbs.open import export_page, load_inspector
from cutaway.lens import follow_token
from cutaway.lens.analysis import ablation
from cutaway.serve import static_files
from cutaway.serve.app import build_app
from cutaway.serve.inspect import routes
from cutaway.serve.server import bind_socket, build_access_policy, serve_in_thread

HERE = Path(__file__).parents[2]
sys.path.insert(0, str(HERE))
from hatch_build import programs  # noqa: E402

pytestmark = pytest.mark.unchecked
TEXT = "import os\n\nfor name in sorted(os."
LONG = "def first(values):\n    for value in values:\n        if value is not None:\n            return value\n" * 24


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """Where the shipped model is open."""
    assert shutil.which("chromium"), "the page is tried in Chromium; install Debian's package of that name"
    desk = routes.QueryExecutor(load_inspector("tiny-python", None, "cpu", None))
    door = build_access_policy("127.0.0.1", None)
    app = build_app(
        [routes.build_router(desk), static_files.build_static_router()], access_policy=door, on_shutdown=[desk.close]
    )
    with serve_in_thread(app, bind_socket("127.0.0.1", 0)) as where:
        yield f"{where}/"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page should show, by the library."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    export_page(file, "tiny-python", TEXT, "cpu", None, as_json=True)
    opened = ct.load("tiny-python", dtype=torch.float32)
    model, tokenizer = opened.model, opened.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    tokens = torch.tensor([ids])
    journey = follow_token(model, tokens)
    names = ("embed", "resid_mid", "resid_post", "final_norm")
    points = [stage for stage in journey.stages if stage.site.endswith(names)]
    dice = random.Random(0)
    values = []
    for site in ("embed", "blocks.2.attn.in", "blocks.0.attn.q", "blocks.3.attn.pattern", "blocks.5.ffn.hidden"):
        at, index = dice.randrange(1, len(ids)), dice.randrange(8)
        with torch.no_grad(), ct.trace(model, site) as t:
            model(tokens)
        seen = t[site][0, :, at] if site.endswith("pattern") else t[site][0, at]
        index = min(index, seen.shape[-1] - 1, at)
        values.append(
            {"site": site, "position": at, "index": index, "values": format_number(float(seen.reshape(-1)[index]))}
        )
    broken: dict[str, Any] = {"blocks.1": "swap", "blocks.2.attn.z": {"do": "zero", "heads": [1, 3]}}
    whole, changed = ablation(model, ids, {"it": broken}, progress=False).values.tolist()
    long = tokenizer.encode(LONG)[:512]
    text = tokenizer.decode(long)
    return {
        "file": str(file),
        "text": TEXT,
        "points": [
            {"length": format_number(stage.norm), "says": show_whitespace(tokenizer.decode([stage.top_tokens[0][0]]))}
            for stage in points
        ],
        "next": [
            {"said": f"{show_whitespace(tokenizer.decode([token]))} {format_percent(share)}"}
            for token, share in journey.top_tokens
        ],
        "values": values,
        "broken": {
            "edits": "blocks.1:swap,blocks.2.attn.z:zero@1.3",
            "said": [
                f"{format_number(whole[0])} → {format_number(changed[0])}",
                format_number(changed[1]),
                format_percent(changed[2]),
            ],
        },
        "long": text,
        "long_tokens": len(tokenizer.encode(text)),
        "longest_task": 400,  # this machine may be busy with other tests; alone it must hold at 200
    }


def format_number(value: float) -> str:
    """As the page writes numbers."""
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e6):
        mantissa, _, power = f"{value:.1e}".partition("e")
        text = f"{mantissa}e{int(power):+d}"
    else:
        text = f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3f}"
    return text.replace("-", "−")


def format_percent(share: float) -> str:
    return "<0.1 %" if 0 < share < 0.001 else f"{100 * share:.1f} %"


def show_whitespace(word: str) -> str:
    text = word.replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍")
    if not text.strip():
        return text.replace(" ", "·") or "∅"
    left, right = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    return "·" * left + text.strip(" ") + "·" * right


SCREENS = ["trace", "attention", "generate", "edit", "gradients", "size", "learn"]


@pytest.mark.parametrize("name", [*SCREENS, "accessibility", "long-text", "exported-file", "notebook"])
def test_the_page(name: str, page: str, facts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    node, _ = programs()
    command = [node, "e2e/run-tests.mjs", page, str(tmp_path / "facts.json"), name]
    done = subprocess.run(command, cwd=HERE / "web", capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
