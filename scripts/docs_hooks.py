"""What mkdocs does besides, for mkdocs.yml: folders in the navigation, and mathematics as MathML."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hatch_build import programs  # noqa: E402

FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[^)]*)?\)")
INDEXES = ("index.md", "README.md")


class Drawing:
    """A Node with katex that turns formulas into MathML, one after another, until the build ends."""

    def __init__(self) -> None:
        self.node: subprocess.Popen[str] | None = None

    def draw(self, tex: str, display: bool) -> str:
        if self.node is None:
            command = [programs()[0], str(ROOT / "scripts" / "mathml.mjs")]
            self.node = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        assert self.node.stdin is not None
        assert self.node.stdout is not None
        self.node.stdin.write(json.dumps([tex, display]) + "\n")
        self.node.stdin.flush()
        said = json.loads(self.node.stdout.readline())
        if "error" in said:
            raise SystemExit(f"the formula {tex!r} cannot be drawn: {said['error']}")
        return str(said["mathml"])

    def end(self) -> None:
        if self.node is not None:
            self.node.communicate()
            self.node = None


DRAWING = Drawing()


def on_page_content(written: str, **_: Any) -> str:
    r"""Inline formulas come as \(…\), those on a line of their own as \[…\]."""

    def drawn(found: re.Match[str]) -> str:
        tex = html.unescape(found[2]).strip()
        display = tex.startswith("\\[")
        return f'<{found[1]} class="formula">{DRAWING.draw(tex[2:-2].strip(), display)}</{found[1]}>'

    return FORMULA.sub(drawn, written)


def on_post_build(**_: Any) -> None:
    DRAWING.end()


def on_config(config: Any) -> Any:
    """`Parts: parts/` in the navigation means all pages of that folder."""
    docs = Path(config["docs_dir"])
    config["nav"] = [expanded(entry, docs) for entry in config["nav"] or []]
    config["nav"] = [entry for entry in config["nav"] if entry]
    return config


def expanded(entry: Any, docs: Path) -> Any:
    [(title, where)] = entry.items()
    if not isinstance(where, str) or not where.endswith("/"):
        return entry
    found = pages_of(docs / where)
    return {title: [page.relative_to(docs).as_posix() for page in found]} if found else None


def pages_of(folder: Path) -> list[Path]:
    """Its index, the pages that the index links to, in that order, and the rest by name."""
    index = next((folder / name for name in INDEXES if (folder / name).is_file()), None)
    linked = LINK.findall(index.read_text(encoding="utf-8")) if index else []
    order = [folder / name for name in linked if "/" not in name and (folder / name).is_file()]
    rest = sorted(path for path in folder.glob("*.md") if path.name not in INDEXES)
    return list(dict.fromkeys([*([index] if index else []), *order, *rest]))
