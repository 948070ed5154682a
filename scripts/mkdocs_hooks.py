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

FORMULA_PATTERN = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
LINK_PATTERN = re.compile(r"\]\(([\w./-]+\.md)(?:#[^)]*)?\)")
INDEX_NAMES = ("index.md", "README.md")


class MathRenderer:
    """A Node with katex that turns formulas into MathML, one after another, until the build ends."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def render(self, tex: str, display: bool) -> str:
        if self.process is None:
            command = [programs()[0], str(ROOT / "scripts" / "render_mathml.mjs")]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([tex, display]) + "\n")
        self.process.stdin.flush()
        said = json.loads(self.process.stdout.readline())
        if "error" in said:
            raise SystemExit(f"the formula {tex!r} cannot be drawn: {said['error']}")
        return str(said["mathml"])

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()
            self.process = None


MATH_RENDERER = MathRenderer()


def on_page_content(written: str, **_: Any) -> str:
    r"""Inline formulas come as \(…\), those on a line of their own as \[…\]."""

    def drawn(found: re.Match[str]) -> str:
        tex = html.unescape(found[2]).strip()
        display = tex.startswith("\\[")
        return f'<{found[1]} class="formula">{MATH_RENDERER.render(tex[2:-2].strip(), display)}</{found[1]}>'

    return FORMULA_PATTERN.sub(drawn, written)


def on_post_build(**_: Any) -> None:
    MATH_RENDERER.close()


def on_config(config: Any) -> Any:
    """`Components: components/` in the navigation means all pages of that folder."""
    docs = Path(config["docs_dir"])
    config["nav"] = [expand_nav_entry(entry, docs) for entry in config["nav"] or []]
    config["nav"] = [entry for entry in config["nav"] if entry]
    return config


def expand_nav_entry(entry: Any, docs: Path) -> Any:
    [(title, where)] = entry.items()
    if not isinstance(where, str) or not where.endswith("/"):
        return entry
    found = list_folder_pages(docs / where)
    return {title: [page.relative_to(docs).as_posix() for page in found]} if found else None


def list_folder_pages(folder: Path) -> list[Path]:
    """Its index, the pages that the index links to, in that order, and the rest by name."""
    index = next((folder / name for name in INDEX_NAMES if (folder / name).is_file()), None)
    linked = LINK_PATTERN.findall(index.read_text(encoding="utf-8")) if index else []
    order = [folder / name for name in linked if "/" not in name and (folder / name).is_file()]
    rest = sorted(path for path in folder.glob("*.md") if path.name not in INDEX_NAMES)
    return list(dict.fromkeys([*([index] if index else []), *order, *rest]))
