"""Type-check the web page with svelte-check. A warning is an error."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from hatch_build import WEB, find_node_and_npm, run_in_web


def main() -> None:
    node, npm = find_node_and_npm()
    if not (WEB / "node_modules").is_dir():  # a prebuilt page has no node_modules
        run_in_web([*npm, "install", "--no-save", "--no-audit", "--no-fund"], node)
    svelte_check = [node, str(WEB / "node_modules" / "svelte-check" / "bin" / "svelte-check")]
    result = subprocess.run(
        [*svelte_check, "--tsconfig", "./tsconfig.json", "--fail-on-warnings", "--output", "human"],
        cwd=WEB, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode:
        sys.exit(f"{result.stdout}{result.stderr}")


if __name__ == "__main__":
    main()
