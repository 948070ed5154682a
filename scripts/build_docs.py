"""Builds the documentation: gathers its pages into .pages/docs, and makes site/ of them.

python scripts/build_docs.py [--quick] [--only-gather | --external]

Pages are docs/ as it is, the papers of the house (ARCHITECTURE.md …), the notebooks as they ran, and every file of the
repository that a page links to, so that the site needs no other. `--quick` runs no notebook: it takes those that ran
before.
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
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--quick", action="store_true", help="take the notebooks that ran before, and run none")
    asked.add_argument("--only-gather", action="store_true", help="gather the pages, and build no site")
    asked.add_argument("--external", action="store_true", help="only list the links that lead to other machines")
    asked.add_argument("--site", type=Path, default=ROOT / "site", help="where the site goes")
    given = asked.parse_args()
    if given.external:
        sys.stdout.write("\n".join(list_external_links()) + "\n")
        return
    for path in [] if given.quick else list_notebooks():
        run_notebook_if_changed(path)
    gather_pages(PAGES_DIR)
    if not given.only_gather:
        build_site(given.site)
        check_no_external_requests(given.site)


def run_notebook_if_changed(path: Path) -> dict[str, Any]:
    """What a notebook claims and draws; it is run if its text, or anything that it may import, has changed since."""
    NOTEBOOK_DIR.mkdir(parents=True, exist_ok=True)
    sources = sorted(each for each in (ROOT / "src").rglob("*") if each.suffix in (".py", ".toml", ".json"))
    key, kept = hash_files([path, ROOT / "scripts" / "run_notebook.py", *sources]), NOTEBOOK_DIR / f"{path.stem}.json"
    if kept.is_file():
        before: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        if before["made_from"] == key:
            return before
    command = [
        sys.executable,
        str(ROOT / "scripts" / "run_notebook.py"),
        str(path),
        "--out",
        str(NOTEBOOK_DIR),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=build_environment())
    if done.returncode:
        raise SystemExit(f"{path.name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    told = {**json.loads(done.stdout), "made_from": key}
    kept.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return told


def list_notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("[0-9]*.py"))


def hash_files(files: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in files:
        whole.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def build_environment() -> dict[str, str]:
    """A user's: whatever the tests switch off for themselves is on."""
    kept = {name: value for name, value in os.environ.items() if name != "JAXTYPING_DISABLE"}
    return kept | {"PYTHONPATH": str(ROOT / "src")}


def list_pages() -> dict[Path, Path]:
    """Each file of the site by where it stands in the repository; paths of the former are within the site."""
    docs = {path: path.relative_to(ROOT / "docs") for path in sorted((ROOT / "docs").rglob("*")) if path.is_file()}
    house = {ROOT / name: Path(page) for name, page in ROOT_DOCUMENTS.items()}
    theory = {ROOT / "notebooks" / "README.md": Path("theory/README.md")}
    theory |= {
        path: Path("theory", f"{path.stem}.md")
        for path in list_notebooks()
        if (NOTEBOOK_DIR / f"{path.stem}.md").is_file()
    }
    return {path: page for path, page in docs.items() if path.suffix != ".py"} | house | theory


def list_external_links() -> list[str]:
    """Links to other machines, each with the first page that has it. They are listed for people, and not followed."""
    found: dict[str, Path] = {}
    for path in sorted(path for path in list_pages() if path.suffix == ".md"):
        for link in find_links(path.read_text(encoding="utf-8")):
            if link.startswith("http"):
                found.setdefault(link, path.relative_to(ROOT))
    return [f"{link}  {page}" for link, page in sorted(found.items())]


def gather_pages(out: Path) -> None:
    """The site's pages with links that hold within the site; a link to nothing ends it."""
    shutil.rmtree(out, ignore_errors=True)
    site, wrong = list_pages(), []
    for source, page in site.items():
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        if source.suffix not in (".md", ".py"):
            shutil.copyfile(source, out / page)
            continue
        ran = source.suffix == ".py"
        text = (NOTEBOOK_DIR / page.name if ran else source).read_text(encoding="utf-8")
        beside = {picture.name for picture in NOTEBOOK_DIR.glob("*.svg")} if ran else set()
        try:
            (out / page).write_text(rewrite_links(text, source, page, site, ROOT, beside), encoding="utf-8")
        except UnresolvedLinkError as error:
            wrong.append(str(error))
    for picture in NOTEBOOK_DIR.glob("*.svg"):
        shutil.copyfile(picture, out / "theory" / picture.name)
    for path, text in source_pages(out, ROOT).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if wrong:
        sys.exit("links that lead nowhere:\n" + "\n".join(wrong))


def build_site(site: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, check=True, cwd=ROOT, env=build_environment() | {"NO_MKDOCS_2_WARNING": "1"})


def check_no_external_requests(site: Path) -> None:
    """No page asks anything of another machine."""
    for path in site.rglob("*.html"):
        asked = re.findall(r'<(?:link|script|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^>]*>', path.read_text())
        foreign = [tag for tag in asked if 'rel="canonical"' not in tag]
        if foreign:
            raise SystemExit(f"{path.relative_to(site)} asks another machine: {foreign[0]}")


if __name__ == "__main__":
    main()
