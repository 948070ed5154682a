"""Build the documentation: gather the pages in .pages/docs and build site/ with mkdocs.

python scripts/build_docs.py [--quick] [--only-gather | --external]

Pages are docs/, documents of the root directory (ARCHITECTURE.md …), the executed notebooks, and every file of the
repository that a page links to. `--quick` runs no notebooks and uses their last results.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from doc_links import UnresolvedLinkError, find_links, rewrite_links, source_pages

ROOT = Path(__file__).parents[1]
PAGES_DIR, NOTEBOOK_DIR = ROOT / ".pages" / "docs", ROOT / ".pages" / "theory"
ROOT_DOCUMENTS = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use the last results of the notebooks")
    parser.add_argument("--only-gather", action="store_true", help="gather the pages without building the site")
    parser.add_argument("--external", action="store_true", help="only list external links")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="output directory of the site")
    args = parser.parse_args()
    if args.external:
        sys.stdout.write("\n".join(list_external_links()) + "\n")
        return
    for path in [] if args.quick else list_notebooks():
        run_notebook_if_changed(path)
    gather_pages(PAGES_DIR)
    if not args.only_gather:
        build_site(args.site)
        check_no_external_requests(args.site)


def run_notebook_if_changed(path: Path) -> dict[str, Any]:
    """Return the summary that run_notebook.py prints. Run the notebook only if it or the package has changed."""
    NOTEBOOK_DIR.mkdir(parents=True, exist_ok=True)
    sources = sorted(source for source in (ROOT / "src").rglob("*") if source.suffix in (".py", ".toml", ".json"))
    key, result_path = (
        hash_files([path, ROOT / "scripts" / "run_notebook.py", *sources]),
        NOTEBOOK_DIR / f"{path.stem}.json",
    )
    if result_path.is_file():
        cached: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
        if cached.get("source_hash") == key:
            return cached
    command = [
        sys.executable,
        str(ROOT / "scripts" / "run_notebook.py"),
        str(path),
        "--out",
        str(NOTEBOOK_DIR),
        "--json",
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=build_environment())
    if process.returncode:
        raise SystemExit(f"{path.name} exited with {process.returncode}:\n{process.stderr[-3000:]}")
    result = {**json.loads(process.stdout), "source_hash": key}
    result_path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return result


def list_notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("[0-9]*.py"))


def hash_files(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build_environment() -> dict[str, str]:
    """Return the environment variables of subprocesses: those of this process, without the settings of tests."""
    environment = {name: value for name, value in os.environ.items() if name != "JAXTYPING_DISABLE"}
    return environment | {"PYTHONPATH": str(ROOT / "src")}


def list_pages() -> dict[Path, Path]:
    """Return a dict from the path of a source file in the repository to the path of its page in the site."""
    docs = {path: path.relative_to(ROOT / "docs") for path in sorted((ROOT / "docs").rglob("*")) if path.is_file()}
    root_documents = {ROOT / name: Path(page) for name, page in ROOT_DOCUMENTS.items()}
    notebooks = {ROOT / "notebooks" / "README.md": Path("theory/README.md")}
    notebooks |= {
        path: Path("theory", f"{path.stem}.md")
        for path in list_notebooks()
        if (NOTEBOOK_DIR / f"{path.stem}.md").is_file()
    }
    return {path: page for path, page in docs.items() if path.suffix != ".py"} | root_documents | notebooks


def list_external_links() -> list[str]:
    """Return the external links of all pages, each with the first page that contains it. No link is requested."""
    first_page: dict[str, Path] = {}
    for path in sorted(path for path in list_pages() if path.suffix == ".md"):
        for link in find_links(path.read_text(encoding="utf-8")):
            if link.startswith("http"):
                first_page.setdefault(link, path.relative_to(ROOT))
    return [f"{link}  {page}" for link, page in sorted(first_page.items())]


def gather_pages(out: Path) -> None:
    """Write all pages to `out`, with links rewritten for the site. Exit with an error if a link is broken."""
    shutil.rmtree(out, ignore_errors=True)
    site, errors = list_pages(), []
    for source, page in site.items():
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        if source.suffix not in (".md", ".py"):
            shutil.copyfile(source, out / page)
            continue
        is_notebook = source.suffix == ".py"
        text = (NOTEBOOK_DIR / page.name if is_notebook else source).read_text(encoding="utf-8")
        local_files = {figure.name for figure in NOTEBOOK_DIR.glob("*.svg")} if is_notebook else set()
        try:
            (out / page).write_text(rewrite_links(text, source, page, site, ROOT, local_files), encoding="utf-8")
        except UnresolvedLinkError as error:
            errors.append(str(error))
    for figure in NOTEBOOK_DIR.glob("*.svg"):
        shutil.copyfile(figure, out / "theory" / figure.name)
    for path, text in source_pages(out, ROOT).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if errors:
        sys.exit("broken links:\n" + "\n".join(errors))


def build_site(site: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, check=True, cwd=ROOT, env=build_environment() | {"NO_MKDOCS_2_WARNING": "1"})


def check_no_external_requests(site: Path) -> None:
    """Exit with an error if a page of the site loads a resource from another host."""
    for path in site.rglob("*.html"):
        tags = re.findall(r'<(?:link|script|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^>]*>', path.read_text())
        external = [tag for tag in tags if 'rel="canonical"' not in tag]
        if external:
            raise SystemExit(f"{path.relative_to(site)} loads an external resource: {external[0]}")


if __name__ == "__main__":
    main()
