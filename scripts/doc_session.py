"""A page's session: its Python in one namespace, its commands in this process, its servers beside it."""

import contextlib
import io
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self
from unittest import mock

SOURCE_DIR = Path(__file__).parents[1] / "src" / "cutaway"
DEFAULT_PORT = "8000"
TERMINAL_WIDTH = "100"
SERVER_TIMEOUT = 120


class DocSession:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespace: dict[str, Any] = {"__name__": "__page__"}
        self.servers: list[subprocess.Popen[bytes]] = []
        self.port = DEFAULT_PORT
        self.patched_source: Path | None = None
        """A copy of cutaway's sources, changed by the page's patches; its Python then runs in processes of its own."""
        self.exit_stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.exit_stack.enter_context(contextlib.chdir(self.folder))
        self.exit_stack.enter_context(mock.patch.dict(os.environ, build_environment(self.folder)))
        self.exit_stack.enter_context(mock.patch.object(sys, "path", [str(self.folder), *sys.path]))
        for registry in list_registries():  # what a page enters is its own, too
            self.exit_stack.enter_context(mock.patch.dict(registry))
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.terminate()
            server.wait(30)
        self.exit_stack.close()
        for name, module in list(sys.modules.items()):  # a page's own modules are its own
            if (getattr(module, "__file__", None) or "").startswith(str(self.folder)):
                del sys.modules[name]

    def run_python(self, code: str, where: str) -> str:
        """What a block prints."""
        if self.patched_source is not None:
            return run_python_subprocess(code, self.patched_source)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code.replace(f":{DEFAULT_PORT}", f":{self.port}"), where, "exec"), self.namespace)
        return printed.getvalue()

    def apply_patch(self, change: str) -> None:
        """Change the copy of the sources as a diff says."""
        if self.patched_source is None:
            self.patched_source = self.folder / "src"
            shutil.copytree(
                SOURCE_DIR, self.patched_source / "cutaway", ignore=shutil.ignore_patterns("__pycache__", "static")
            )
        command = ["git", "apply", "-C1", "-"]
        done = subprocess.run(command, cwd=self.folder, input=change, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())

    def run_bash(self, text: str) -> tuple[str, int]:
        """What its lines print, on both streams, and how the last one ended; one that fails ends the block."""
        said, code = "", 0
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                command, words = words[:end], words[end + 1 :]
                if command[0] != "cutaway":
                    raise ValueError(f"{command[0]!r} is not run here; lines begin with cutaway")
                if command[-1] == "&":
                    self.start_server(command[1:-1])
                    continue
                printed, code = run_verb(command[1:])
                said += printed
                if code:
                    return said, code
        return said, code

    def start_server(self, words: list[str]) -> None:
        """Start a server on a free port, and wait until it answers."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        command = [sys.executable, "-m", "cutaway", *words, "--port", self.port]
        self.servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        end = time.monotonic() + SERVER_TIMEOUT
        while not is_server_up(int(self.port)):
            if self.servers[-1].poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"`cutaway {shlex.join(words)}` does not answer")
            time.sleep(0.1)


def list_registries() -> list[dict[str, Any]]:
    """Checks and families by name, all there."""
    from cutaway.check import get_checks
    from cutaway.families import families

    return [get_checks(), families()]


def run_python_subprocess(code: str, sources: Path) -> str:
    """What a program prints where cutaway is what lies in `sources`."""
    env = os.environ | {"PYTHONPATH": str(sources)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout


def is_server_up(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()


def build_environment(folder: Path) -> dict[str, str]:
    """Alike on every machine; what cutaway remembers of a user is the page's own."""
    plain = {
        "COLUMNS": TERMINAL_WIDTH,
        "NO_COLOR": "1",
        "TERM": "dumb",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return plain | {"CUTAWAY_HOME": str(folder / ".home"), "CUTAWAY_CACHE": str(folder / ".cache")}


def run_verb(words: list[str]) -> tuple[str, int]:
    """What `cutaway words…` prints here, with its complaint if it has one; `> file` takes it. Remarks are not kept."""
    from cutaway.cli import main

    target = None
    if len(words) > 2 and words[-2] == ">":
        words, target = words[:-2], words[-1]
    printed, remarks, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["cutaway", *words]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(b""), encoding="utf-8")),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(remarks),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if target is None:
        return printed.getvalue() + (remarks.getvalue() if code > 1 else ""), code
    Path(target).write_text(printed.getvalue(), encoding="utf-8")
    return "", code
