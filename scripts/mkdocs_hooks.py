"""mkdocs hooks: expand directories in the navigation, and render formulas as MathML."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hatch_build import find_node_and_npm  # noqa: E402

FORMULA_PATTERN = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
LINK_PATTERN = re.compile(r"\]\(([\w./-]+\.md)(?:#[^)]*)?\)")
INDEX_NAMES = ("index.md", "README.md")


class MathRenderer:
    """A Node process that renders formulas to MathML with KaTeX."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def render(self, tex: str, display: bool) -> str:
        if self.process is None:
            command = [find_node_and_npm()[0], str(ROOT / "scripts" / "render_mathml.mjs")]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([tex, display]) + "\n")
        self.process.stdin.flush()
        result = json.loads(self.process.stdout.readline())
        if "error" in result:
            raise SystemExit(f"the formula {tex!r} cannot be rendered: {result['error']}")
        return str(result["mathml"])

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()
            self.process = None


MATH_RENDERER = MathRenderer()


def on_page_content(page_html: str, **_: Any) -> str:
    r"""Render formulas: inline \(…\) and display \[…\]."""

    def render(match: re.Match[str]) -> str:
        tex = html.unescape(match[2]).strip()
        display = tex.startswith("\\[")
        return f'<{match[1]} class="formula">{MATH_RENDERER.render(tex[2:-2].strip(), display)}</{match[1]}>'

    return FORMULA_PATTERN.sub(render, page_html)


def on_post_build(**_: Any) -> None:
    MATH_RENDERER.close()


def on_config(config: Any) -> Any:
    """Expand navigation entries such as `Components: components/` to all pages of the directory."""
    docs = Path(config["docs_dir"])
    config["nav"] = [expand_nav_entry(entry, docs) for entry in config["nav"] or []]
    config["nav"] = [entry for entry in config["nav"] if entry]
    return config


def expand_nav_entry(entry: Any, docs: Path) -> Any:
    [(title, target)] = entry.items()
    if not isinstance(target, str) or not target.endswith("/"):
        return entry
    pages = list_folder_pages(docs / target)
    return {title: [page.relative_to(docs).as_posix() for page in pages]} if pages else None


def list_folder_pages(folder: Path) -> list[Path]:
    """Return the index page, the pages that it links to in that order, and all other pages sorted by name."""
    index = next((folder / name for name in INDEX_NAMES if (folder / name).is_file()), None)
    linked = LINK_PATTERN.findall(index.read_text(encoding="utf-8")) if index else []
    order = [folder / name for name in linked if "/" not in name and (folder / name).is_file()]
    rest = sorted(path for path in folder.glob("*.md") if path.name not in INDEX_NAMES)
    return list(dict.fromkeys([*([index] if index else []), *order, *rest]))
