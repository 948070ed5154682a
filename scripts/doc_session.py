"""Run the code of a documentation page: Python in one namespace, commands in this process, servers as subprocesses."""

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
        """A copy of the sources with the page's diffs applied. If there is one, Python blocks run in subprocesses."""
        self.exit_stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.exit_stack.enter_context(contextlib.chdir(self.folder))
        self.exit_stack.enter_context(mock.patch.dict(os.environ, build_environment(self.folder)))
        self.exit_stack.enter_context(mock.patch.object(sys, "path", [str(self.folder), *sys.path]))
        for registry in list_registries():  # restore checks and families that a page registers
            self.exit_stack.enter_context(mock.patch.dict(registry))
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.terminate()
            server.wait(30)
        self.exit_stack.close()
        for name, module in list(sys.modules.items()):  # unload modules that the page imported
            if (getattr(module, "__file__", None) or "").startswith(str(self.folder)):
                del sys.modules[name]

    def run_python(self, code: str, where: str) -> str:
        """Run a Python block of the page and return its standard output. `where` is its name in tracebacks."""
        if self.patched_source is not None:
            return run_python_subprocess(code, self.patched_source)
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            exec(compile(code.replace(f":{DEFAULT_PORT}", f":{self.port}"), where, "exec"), self.namespace)
        return stdout.getvalue()

    def apply_patch(self, patch: str) -> None:
        """Apply a diff to the copy of the sources, which the first patch creates."""
        if self.patched_source is None:
            self.patched_source = self.folder / "src"
            shutil.copytree(
                SOURCE_DIR, self.patched_source / "cutaway", ignore=shutil.ignore_patterns("__pycache__", "static")
            )
        command = ["git", "apply", "-C1", "-"]
        result = subprocess.run(command, cwd=self.folder, input=patch, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(result.stderr.strip())

    def run_bash(self, text: str) -> tuple[str, int]:
        """Run the commands of a block until one fails. Return their output and the last exit code."""
        output, code = "", 0
        for line in text.replace("\\\n", " ").splitlines():
            tokens = shlex.split(line, comments=True)
            while tokens:
                end = tokens.index("&&") if "&&" in tokens else len(tokens)
                command, tokens = tokens[:end], tokens[end + 1 :]
                if command[0] != "cutaway":
                    raise ValueError(f"{command[0]!r} is not supported; lines must begin with cutaway")
                if command[-1] == "&":
                    self.start_server(command[1:-1])
                    continue
                verb_output, code = run_verb(command[1:])
                output += verb_output
                if code:
                    return output, code
        return output, code

    def start_server(self, args: list[str]) -> None:
        """Start `cutaway` with these arguments on a free port, and wait until the server responds."""
        with socket.socket() as free_socket:
            free_socket.bind(("127.0.0.1", 0))
            self.port = str(free_socket.getsockname()[1])
        command = [sys.executable, "-m", "cutaway", *args, "--port", self.port]
        self.servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        deadline = time.monotonic() + SERVER_TIMEOUT
        while not is_server_up(int(self.port)):
            if self.servers[-1].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"`cutaway {shlex.join(args)}` does not respond")
            time.sleep(0.1)


def list_registries() -> list[dict[str, Any]]:
    """Return the registries of checks and families, which a page may extend."""
    from cutaway.check import get_checks
    from cutaway.families import families

    return [get_checks(), families()]


def run_python_subprocess(code: str, sources: Path) -> str:
    """Run Python code in a subprocess that imports cutaway from `sources`. Return its standard output."""
    env = os.environ | {"PYTHONPATH": str(sources)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    if result.returncode:
        raise RuntimeError(result.stderr.strip())
    return result.stdout


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
    """Return environment variables for reproducible output, with the user directories of cutaway inside `folder`."""
    environment = {
        "COLUMNS": TERMINAL_WIDTH,
        "NO_COLOR": "1",
        "TERM": "dumb",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return environment | {"CUTAWAY_HOME": str(folder / ".home"), "CUTAWAY_CACHE": str(folder / ".cache")}


def run_verb(args: list[str]) -> tuple[str, int]:
    """Run `cutaway` with these arguments in this process. Return its output and exit code.

    If the exit code is above 1, the output includes standard error. `> file` redirects standard output.
    """
    from cutaway.cli import main

    target = None
    if len(args) > 2 and args[-2] == ">":
        args, target = args[:-2], args[-1]
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["cutaway", *args]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(b""), encoding="utf-8")),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as exit_info:
            code = exit_info.code if isinstance(exit_info.code, int) else int(exit_info.code is not None)
    if target is None:
        return stdout.getvalue() + (stderr.getvalue() if code > 1 else ""), code
    Path(target).write_text(stdout.getvalue(), encoding="utf-8")
    return "", code
