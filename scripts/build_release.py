"""Build the sdist and the wheel, and test the wheel.

python scripts/build_release.py            # build dist/ and test the wheel with the installed packages
python scripts/build_release.py --fresh    # test it in an empty environment, with dependencies from pip

Nothing is uploaded.
"""

import argparse
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIRED_FILES = (
    "cutaway/py.typed",
    "cutaway/serve/static/index.html",
    "cutaway/serve/static/page.js",
    "cutaway/pretrained/tiny-english/model.safetensors",
    "cutaway/size/hardware.toml",
    "cutaway/learn/claim.py",
)
"""Files that the wheel must contain beside its modules."""
SMOKE_COMMANDS = (
    ["--version"],
    ["presets", "gpt2"],
    ["size", "llama-3-8b", "--gpu", "h100"],
    ["generate", "tiny-english", "The cat sat on the", "--max-new-tokens", "8"],
    ["trace", "tiny-dates", "March 3rd, 2021"],
    ["check", "tiny-gpt", "--only", "causality"],
    ["open", "tiny-english", "The cat sat on the", "--export", "page.html"],
    ["learn", "list"],
    ["learn", "notebook", "1"],
)
"""Smoke tests, run in an empty directory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--fresh", action="store_true", help="test in a new virtual environment; takes minutes")
    args = parser.parse_args()
    wheel = build_distributions(args.out)
    check_wheel_contents(wheel)
    with tempfile.TemporaryDirectory(prefix="cutaway-release-") as directory:
        python = (install_into_venv if args.fresh else unpack_into_venv)(wheel, Path(directory) / "env")
        run_smoke_tests(python, Path(directory))
    print_line(f"{wheel.name} is ready")


def build_distributions(out_dir: Path) -> Path:
    """Build the sdist from the repository and the wheel from the sdist. Return the path of the wheel."""
    print_line("building the sdist and the wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out_dir), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"the build exited with {result.returncode}:\n{(result.stdout + result.stderr)[-2000:]}")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    [wheel] = out_dir.glob(f"cutaway-{version}-*.whl")
    return wheel


def check_wheel_contents(wheel: Path) -> None:
    """Exit with an error if the wheel lacks a tracked file or contains tests, caches or other directories."""
    wheel_files = set(zipfile.ZipFile(wheel).namelist())
    tracked_files = {
        f"cutaway/{path.relative_to(ROOT / 'src' / 'cutaway').as_posix()}" for path in list_tracked_files(ROOT / "src")
    }
    notebooks = [path.name for path in list_tracked_files(ROOT / "notebooks") if path.suffix == ".py"]
    tracked_files |= {f"cutaway/learn/notebooks/{name}" for name in notebooks}
    missing = sorted((tracked_files | set(REQUIRED_FILES)) - wheel_files)
    unexpected = sorted(
        name for name in wheel_files - tracked_files if not name.startswith(("cutaway/serve/static/", "cutaway-"))
    )
    if missing or unexpected:
        raise SystemExit(f"{wheel.name} lacks {missing or 'nothing'} and has unexpected files: {unexpected or 'none'}")
    sdist = wheel.with_name("-".join(wheel.name.split("-")[:2]) + ".tar.gz")
    with tarfile.open(sdist) as archive:
        excluded = [
            name
            for name in archive.getnames()
            if any(part in name for part in ("node_modules", ".venv", "__pycache__"))
        ]
    if excluded:
        raise SystemExit(f"{sdist.name} contains {excluded[:3]}")
    print_line(f"{len(wheel_files)} files in the wheel, {wheel.stat().st_size / 1e6:.1f} MB")


def list_tracked_files(directory: Path) -> Iterable[Path]:
    output = subprocess.run(["git", "ls-files", "-z", "--", "."], cwd=directory, capture_output=True, check=True).stdout
    return [directory / name for name in output.decode().split("\0") if name]


def unpack_into_venv(wheel: Path, env: Path) -> Path:
    """Create a virtual environment with cutaway from the wheel and all other packages from the current environment."""
    venv.create(env, with_pip=False, symlinks=True)
    python = env / "bin" / "python"
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site_packages = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    (site_packages / "current_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install_into_venv(wheel: Path, env: Path) -> Path:
    """Create a virtual environment and install the wheel and its dependencies with pip."""
    print_line("installing into an empty environment (minutes if packages are downloaded)")
    venv.create(env, with_pip=True, symlinks=True)
    python = env / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    return python


def run_smoke_tests(python: Path, directory: Path) -> None:
    empty = directory / "empty"
    empty.mkdir()
    for verb in SMOKE_COMMANDS:
        command = [str(python), "-I", "-m", "cutaway", *verb]
        result = subprocess.run(command, cwd=empty, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"`cutaway {' '.join(verb)}` exited with {result.returncode}:\n{result.stderr[-2000:]}")
        print_line(f"cutaway {' '.join(verb)}: passed")
    import_command = [str(python), "-I", "-c", "import cutaway; print(cutaway.__file__)"]
    imported_path = subprocess.run(import_command, cwd=empty, capture_output=True, text=True, check=True).stdout
    if str(directory) not in imported_path:
        raise SystemExit(f"the tested package is not the wheel but {imported_path.strip()}")


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
