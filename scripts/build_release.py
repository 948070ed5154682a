"""Makes what is published, and tries it as someone would who has only that.

python scripts/build_release.py            # dist/: the sdist, and the wheel made from it; tried beside what is here
python scripts/build_release.py --fresh    # tried in an environment that has nothing, with all that pip brings

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
    "cutaway/pretrained/tiny-python/model.safetensors",
    "cutaway/size/hardware.toml",
    "cutaway/learn/claim.py",
)
"""What a wheel would be useless without, beside its modules."""
SMOKE_COMMANDS = (
    ["--version"],
    ["presets", "gpt2"],
    ["size", "llama-3-8b", "--gpu", "h100"],
    ["generate", "tiny-python", "import ", "--max-new-tokens", "8"],
    ["trace", "tiny-python", "import os"],
    ["check", "tiny-gpt", "--only", "causality"],
    ["open", "tiny-python", "import os", "--export", "page.html"],
    ["learn", "list"],
)
"""Each verb once, from an empty folder."""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path, default=ROOT / "dist")
    asked.add_argument("--fresh", action="store_true", help="in an environment of its own; takes minutes")
    given = asked.parse_args()
    wheel = build_distributions(given.out)
    check_wheel_contents(wheel)
    with tempfile.TemporaryDirectory(prefix="cutaway-release-") as folder:
        python = (install_into_venv if given.fresh else unpack_into_venv)(wheel, Path(folder) / "env")
        run_smoke_tests(python, Path(folder))
    print_line(f"{wheel.name} is ready")


def build_distributions(out: Path) -> Path:
    """The sdist from this folder, and the wheel from the sdist alone."""
    print_line("building the sdist, and the wheel from it")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the build ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    [wheel] = out.glob(f"cutaway-{version}-*.whl")
    return wheel


def check_wheel_contents(wheel: Path) -> None:
    """Every module, and what else it needs; nothing of tests, caches or other folders."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    here = {
        f"cutaway/{path.relative_to(ROOT / 'src' / 'cutaway').as_posix()}" for path in list_tracked_files(ROOT / "src")
    }
    missing = sorted((here | set(REQUIRED_FILES)) - inside)
    strange = sorted(name for name in inside - here if not name.startswith(("cutaway/serve/static/", "cutaway-")))
    if missing or strange:
        raise SystemExit(f"{wheel.name} lacks {missing or 'nothing'} and has {strange or 'nothing'} that is not ours")
    sdist = wheel.with_name("-".join(wheel.name.split("-")[:2]) + ".tar.gz")
    with tarfile.open(sdist) as packed:
        odd = [
            name for name in packed.getnames() if any(part in name for part in ("node_modules", ".venv", "__pycache__"))
        ]
    if odd:
        raise SystemExit(f"{sdist.name} has {odd[:3]}")
    print_line(f"{len(inside)} files in the wheel, {wheel.stat().st_size / 1e6:.1f} MB")


def list_tracked_files(folder: Path) -> Iterable[Path]:
    """What git keeps there."""
    told = subprocess.run(["git", "ls-files", "-z", "--", "."], cwd=folder, capture_output=True, check=True).stdout
    return [folder / name for name in told.decode().split("\0") if name]


def unpack_into_venv(wheel: Path, env: Path) -> Path:
    """An environment whose only cutaway is the wheel's, and whose other packages are this one's."""
    venv.create(env, with_pip=False, symlinks=True)
    python = env / "bin" / "python"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    place = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place)
    (place / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install_into_venv(wheel: Path, env: Path) -> Path:
    """As pip does it for someone who has nothing."""
    print_line("installing into an empty environment: minutes, if packages must be fetched")
    venv.create(env, with_pip=True, symlinks=True)
    python = env / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    return python


def run_smoke_tests(python: Path, folder: Path) -> None:
    empty = folder / "empty"
    empty.mkdir()
    for verb in SMOKE_COMMANDS:
        command = [str(python), "-I", "-m", "cutaway", *verb]
        done = subprocess.run(command, cwd=empty, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"`cutaway {' '.join(verb)}` ended with {done.returncode}:\n{done.stderr[-2000:]}")
        print_line(f"cutaway {' '.join(verb)}: fine")
    where = [str(python), "-I", "-c", "import cutaway; print(cutaway.__file__)"]
    found = subprocess.run(where, cwd=empty, capture_output=True, text=True, check=True).stdout
    if str(folder) not in found:
        raise SystemExit(f"what was tried is not the wheel but {found.strip()}")


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
