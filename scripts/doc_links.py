"""Links of the documentation: written so that they hold in the repository, rewritten so that they hold in the site.

A link to a page of the site leads to that page. One to another file of the repository leads to a page that shows it.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

CODE_PATTERN = re.compile(r"(^(`{3,}|~{3,})[^\n]*\n.*?^\2[ \t]*$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LINK_PATTERN = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\]|!\[[^\]]*\]\([^)]*\))*\]\()([^)\s]+)(\))")
IMAGE_PATTERN = re.compile(r"(!\[[^\]]*\]\()([^)\s]+)(\))")
SOURCE_PREFIX = "source"
LANGUAGES = {".py": "python", ".toml": "toml", ".ts": "ts", ".svelte": "html", ".json": "json", ".sh": "sh"}


class UnresolvedLinkError(Exception):
    """A link that leads to no file."""


def rewrite_links(
    text: str, source: Path, page: Path, site: dict[Path, Path], root: Path, local_files: set[str]
) -> str:
    """A page's text as it stands in the site at `page`; `local_files` are files that only lie there."""
    spans = [found[0] for found in CODE_PATTERN.finditer(text)]
    held = CODE_PATTERN.sub("\0", text)

    def turned(found: re.Match[str]) -> str:
        label = IMAGE_PATTERN.sub(turned, found[1]) if "![" in found[1][1:] else found[1]
        return f"{label}{resolve_link(found[2], source, page, site, root, local_files)}{found[3]}"

    turned_text = LINK_PATTERN.sub(turned, held)
    pieces = iter(spans)
    return re.sub("\0", lambda _: next(pieces), turned_text)


def resolve_link(link: str, source: Path, page: Path, site: dict[Path, Path], root: Path, local_files: set[str]) -> str:
    if re.match(r"[a-z]+:", link) or link.startswith("#") or link in local_files:
        return link
    name, mark, anchor = link.partition("#")
    meant = Path(os.path.normpath(source.parent / name))
    if meant.is_dir() and (meant / "README.md") in site:
        meant = meant / "README.md"
    if meant in site:
        leads = site[meant]
    elif meant.is_file() and meant.is_relative_to(root):
        leads = Path(SOURCE_PREFIX) / f"{meant.relative_to(root).as_posix()}.md"
    elif meant.is_dir() and meant.is_relative_to(root):
        leads = Path(SOURCE_PREFIX) / meant.relative_to(root) / "index.md"
    else:
        raise UnresolvedLinkError(f"{source.relative_to(root)}: {link}")
    return Path(os.path.relpath(leads, page.parent)).as_posix() + mark + anchor


def find_links(text: str) -> Iterator[str]:
    """Every link's target, outside of code."""
    held = CODE_PATTERN.sub("", text)
    for found in LINK_PATTERN.finditer(held):
        yield found[2]
        if "![" in found[1][1:]:
            yield from (inner[2] for inner in IMAGE_PATTERN.finditer(found[1]))


def source_pages(out: Path, root: Path) -> dict[Path, str]:
    """Pages that show the files of the repository which the pages in `out` link to."""
    wanted: dict[Path, str] = {}
    for page in out.rglob("*.md"):
        for link in find_links(page.read_text(encoding="utf-8")):
            leads = Path(os.path.normpath(page.parent / link.partition("#")[0]))
            if leads.is_relative_to(out / SOURCE_PREFIX) and leads not in wanted:
                name = leads.relative_to(out / SOURCE_PREFIX)
                meant = root / name.parent if name.name == "index.md" else root / name.with_suffix("")
                wanted[leads] = render_folder_page(meant, root) if meant.is_dir() else render_source_page(meant, root)
    return wanted


PAGE_HEADER = "---\nsearch:\n  exclude: true\nhide: [toc, navigation]\n---\n\n# {}\n\n"


def render_source_page(path: Path, root: Path) -> str:
    name = path.relative_to(root).as_posix()
    language = LANGUAGES.get(path.suffix, "text")
    body = path.read_text(encoding="utf-8").rstrip()
    return f'{PAGE_HEADER.format(f"`{name}`")}~~~~~{language} linenums="1"\n{body}\n~~~~~\n'


def render_folder_page(folder: Path, root: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__" and path.name[0] != ".")
    return (
        PAGE_HEADER.format(f"`{folder.relative_to(root).as_posix()}/`")
        + "\n".join(f"- `{name}`" for name in names)
        + "\n"
    )
