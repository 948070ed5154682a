"""`SourceLocator`: file and line of the code that a finding is about."""

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from cutaway.check.report.finding import Finding

_RAISED_AT = re.compile(r"(?P<file>[^/\\]+\.py), line (?P<line>\d+), in ")
"""Location of an exception, as `function_calls.locate_exception` writes it."""
_NAME = re.compile(r"\b([A-Za-z_][\w.]*)\b(?! \d)")
"""A name in a location. In `position 3`, `position` is not the name of a module."""


@dataclass(frozen=True)
class SourceLocation:
    path: str
    """Path relative to the working directory, with forward slashes."""
    line: int


class SourceLocator:
    """Finds source code in `directory` (default the working directory); code of installed packages is not used."""

    def __init__(
        self,
        source: str,
        model: object = None,
        overrides: Mapping[str, object] | None = None,
        factory: object = None,
        directory: Path | None = None,
    ) -> None:
        self.source = source
        self.factory = factory
        self.directory = (directory or Path.cwd()).resolve()
        candidates = [(overrides or {}).get("module"), model, getattr(model, "model", None)]
        self.module = next((value for value in candidates if isinstance(value, nn.Module)), None)

    def locate(self, finding: Finding) -> SourceLocation | None:
        """Return the first that exists of these locations.

        The line that raised, the class of the module that the finding names or of a module that contains it, the
        factory, the class of the model, the file of the model.
        """
        for location in (self._find_raising_line(finding), self._find_named_class(finding), self._find_factory()):
            if location is not None:
                return location
        if self.module is not None and (location := self._find_class(type(self.module))) is not None:
            return location
        path = self._make_relative(self.source) if Path(self.source).exists() else None
        return None if path is None else SourceLocation(path, 1)

    def find_module_name(self, finding: Finding) -> str | None:
        """Return the module of the model that the finding names; None if it names none."""
        if self.module is None or finding.location is None:
            return None
        known = dict(self.module.named_modules())
        for name in reversed(_NAME.findall(finding.location)):
            while name and name not in known:
                name = name.rpartition(".")[0]  # of a parameter, the module that contains it
            if name:
                return name
        return None

    def _find_named_class(self, finding: Finding) -> SourceLocation | None:
        name = self.find_module_name(finding)
        while self.module is not None and name:
            location = self._find_class(type(self.module.get_submodule(name)))
            if location is not None:
                return location
            name = name.rpartition(".")[0]  # a module of torch: the module that contains it
        return None if self.module is None or name is None else self._find_class(type(self.module))

    def _find_raising_line(self, finding: Finding) -> SourceLocation | None:
        match = _RAISED_AT.match(finding.location or "")
        if match is None:
            return None
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        paths = [self._make_relative(file) for file in sorted(filter(None, files)) if Path(file).name == match["file"]]
        return next((SourceLocation(path, int(match["line"])) for path in paths if path is not None), None)

    def _find_factory(self) -> SourceLocation | None:
        if self.factory is None:
            return None
        location = self._find_class(self.factory if inspect.isroutine(self.factory) else type(self.factory))
        if location is None:  # a model or a dict that is a variable of the module
            file = getattr(sys.modules.get(self.source.partition(":")[0]), "__file__", None)
            path = None if file is None else self._make_relative(file)
            location = None if path is None else SourceLocation(path, 1)
        return location

    def _find_class(self, value: object) -> SourceLocation | None:
        """Location of a class or function; None if its source is not a file in the directory."""
        try:
            file = inspect.getsourcefile(value)  # type: ignore[arg-type]
            line = inspect.getsourcelines(value)[1]  # type: ignore[arg-type]
        except (OSError, TypeError):  # built in, or defined interactively
            return None
        path = None if file is None else self._make_relative(file)
        return None if path is None else SourceLocation(path, max(1, line))

    def _make_relative(self, file: str) -> str | None:
        path = Path(file).resolve()
        if not path.is_relative_to(self.directory) or "site-packages" in path.parts:
            return None
        return path.relative_to(self.directory).as_posix()
