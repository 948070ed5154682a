"""Standard output and error on a terminal: control sequences are escaped, and a closed terminal is not an error."""

import errno
import io
import re
import sys
from typing import Any

UNSAFE = re.compile(r"\x1b(?!\[\??[0-9;]*[A-HJKhlm])|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
"""Control characters except line ends, tabs, and the sequences with which rich sets colors and moves the cursor.

Names and texts in models, data and file names may contain others, e.g. those that set the title or the clipboard.
"""


def use_safe_terminals() -> None:
    """Replace sys.stdout and sys.stderr by `TerminalStream`, if they are terminals."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            stream.flush()
            setattr(sys, name, TerminalStream(stream))


class TerminalStream(io.TextIOWrapper):
    """Text stream to a terminal that escapes unsafe control characters, e.g. as \\x1b."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        file = io.BufferedWriter(_TerminalFile(stream.fileno(), "w", closefd=False))
        super().__init__(file, encoding=stream.encoding, errors=stream.errors, line_buffering=True)

    def write(self, text: str) -> int:
        return super().write(UNSAFE.sub(lambda match: repr(match[0])[1:-1], text))


class _TerminalFile(io.FileIO):
    """File of a terminal that discards what is written after the terminal was closed.

    So a training that was stopped by SIGHUP saves its checkpoint, and one that was started with nohup continues.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)
