"""The page's types and templates, checked: TypeScript strict, Svelte without a warning."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from hatch_build import WEB, programs, run


def main() -> None:
    node, npm = programs()
    if not (WEB / "node_modules").is_dir():  # the page may have come built
        run([*npm, "install", "--no-save", "--no-audit", "--no-fund"], node)
    check = [node, str(WEB / "node_modules" / "svelte-check" / "bin" / "svelte-check")]
    done = subprocess.run(
        [*check, "--tsconfig", "./tsconfig.json", "--fail-on-warnings", "--output", "human"],
        cwd=WEB, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")


main()
