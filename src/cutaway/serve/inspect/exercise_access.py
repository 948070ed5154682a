"""Whether the page may write the learner's files and run their code on this machine."""

import hmac
import ipaddress
import secrets
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path

from cutaway.errors import InputError

_NO_TOKEN = (
    "this page was opened without its token; open the address that `cutaway open` printed in the terminal, or use the"
    " commands of `cutaway learn`"
)


@dataclass(frozen=True)
class ExerciseAccess:
    """Permission of a server to write and run the code of exercises. The default denies it.

    The code of an exercise runs with the rights of the user who started the server. A query that writes or runs code
    must send `token`, which no response contains: it is in the address that `cutaway open` prints and opens. So neither
    a web page of another origin (which the Host and Origin checks of `middleware.py` reject as well) nor another user
    of this machine can run code.
    """

    problem: str = "code is run only by a server that `cutaway open` has started on this machine; use `cutaway learn`"
    """Why code cannot be run; empty if it can."""
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    directory: Path = Path("learn")
    """Directory of the learner's files, as in `cutaway learn start`."""
    grading: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held while code is graded: one worker process at a time."""

    def find_problem(self, token: str) -> str:
        """Return why a query with this token must not write or run code; "" if it may."""
        if self.problem:
            return self.problem
        return "" if hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self.token.encode()) else _NO_TOKEN

    def require(self, token: str) -> None:
        """Raise if a query with this token must not write or run code."""
        if problem := self.find_problem(token):
            raise InputError(problem)


def build_exercise_access(sock: socket.socket, directory: Path = Path("learn")) -> ExerciseAccess:
    """Return the access of a server with this listening socket: only a loopback address can run code."""
    host = sock.getsockname()[0]
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return ExerciseAccess("", directory=directory)
    return ExerciseAccess(
        f"the server listens on {host}, which other machines can reach, so it does not run code; start `cutaway open`"
        " without --host, or use `cutaway learn`",
        directory=directory,
    )
