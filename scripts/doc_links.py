"""Rewrite the links of documentation pages, which are relative paths in the repository, for the site.

Links to other files of the repository lead to generated pages that show the file.
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
    """The target of a link does not exist."""


def rewrite_links(
    text: str, source: Path, page: Path, site: dict[Path, Path], root: Path, local_files: set[str]
) -> str:
    """Rewrite the links in the text of the file `source` for its path `page` in the site.

    Links to `local_files`, which exist only in the site, are not changed.
    """
    code_spans = [match[0] for match in CODE_PATTERN.finditer(text)]
    text_without_code = CODE_PATTERN.sub("\0", text)

    def rewrite(match: re.Match[str]) -> str:
        label = IMAGE_PATTERN.sub(rewrite, match[1]) if "![" in match[1][1:] else match[1]
        return f"{label}{resolve_link(match[2], source, page, site, root, local_files)}{match[3]}"

    rewritten = LINK_PATTERN.sub(rewrite, text_without_code)
    remaining_spans = iter(code_spans)
    return re.sub("\0", lambda _: next(remaining_spans), rewritten)


def resolve_link(link: str, source: Path, page: Path, site: dict[Path, Path], root: Path, local_files: set[str]) -> str:
    if re.match(r"[a-z]+:", link) or link.startswith("#") or link in local_files:
        return link
    name, separator, anchor = link.partition("#")
    target = Path(os.path.normpath(source.parent / name))
    if target.is_dir() and (target / "README.md") in site:
        target = target / "README.md"
    if target in site:
        site_path = site[target]
    elif target.is_file() and target.is_relative_to(root):
        site_path = Path(SOURCE_PREFIX) / f"{target.relative_to(root).as_posix()}.md"
    elif target.is_dir() and target.is_relative_to(root):
        site_path = Path(SOURCE_PREFIX) / target.relative_to(root) / "index.md"
    else:
        raise UnresolvedLinkError(f"{source.relative_to(root)}: {link}")
    return Path(os.path.relpath(site_path, page.parent)).as_posix() + separator + anchor


def find_links(text: str) -> Iterator[str]:
    """Yield the targets of all links and images that are not in code."""
    text_without_code = CODE_PATTERN.sub("", text)
    for match in LINK_PATTERN.finditer(text_without_code):
        yield match[2]
        if "![" in match[1][1:]:
            yield from (inner[2] for inner in IMAGE_PATTERN.finditer(match[1]))


def source_pages(out: Path, root: Path) -> dict[Path, str]:
    """Return {path: text} of the pages that show the repository files and folders to which pages in `out` link."""
    pages: dict[Path, str] = {}
    for page in out.rglob("*.md"):
        for link in find_links(page.read_text(encoding="utf-8")):
            site_path = Path(os.path.normpath(page.parent / link.partition("#")[0]))
            if site_path.is_relative_to(out / SOURCE_PREFIX) and site_path not in pages:
                name = site_path.relative_to(out / SOURCE_PREFIX)
                path = root / name.parent if name.name == "index.md" else root / name.with_suffix("")
                pages[site_path] = render_folder_page(path, root) if path.is_dir() else render_source_page(path, root)
    return pages


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
