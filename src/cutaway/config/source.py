"""From what a user has (a preset's name, a dict, a file) to a Config, and back."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pydantic import ValidationError

from cutaway.config.part import explain
from cutaway.config.transformer import ADAPTER, Config, Form
from cutaway.errors import ConfigError
from cutaway.shipped import where

LARGEST = 64 << 20
"""Bytes of a file of settings, at most."""


def config(source: Config | Mapping[str, Any] | str | Path) -> Config:
    """A Config from a preset's name, a dict, a .toml or .json file, or a model's directory (its config.json)."""
    if isinstance(source, Form):
        return source
    if isinstance(source, Mapping):
        return _understood(dict(source))
    if not isinstance(source, str | Path) or not str(source):
        raise ConfigError(f"{source!r} is no configuration; give a preset's name, a dict, or a .toml or .json file")
    path = Path(source)
    if path.suffix in (".toml", ".json"):
        return _understood(read_table(path))
    if stands(path, Path.is_dir):
        return _understood(read_table(_described_by(path)))
    if (own := where(str(source))) is not None:
        return _understood(read_table(_described_by(own)))
    from cutaway.config.presets import PRESETS, preset

    if str(source) not in PRESETS and stands(path, Path.exists):
        raise ConfigError(f"'{source}' is no configuration; give a .toml or .json file, or a model's directory")
    return preset(str(source))


def _understood(data: dict[str, Any]) -> Config:
    """Our own settings, or another library's. The rooms above are told by name: nothing here imports them."""
    if "form" in data or not ("model_type" in data or "architectures" in data):
        return _validated(data["config"] if data.keys() == {"format", "config"} else data)
    read: Callable[[Mapping[str, Any]], Config] = resolve_name("cutaway.families:read_config")
    return read(data)


def _described_by(directory: Path) -> Path:
    for name in ("cutaway.json", "config.json"):
        try:
            if (directory / name).is_file():
                return directory / name
        except OSError as error:
            raise ConfigError(f"'{directory}' cannot be opened: {error.strerror}") from None
    raise ConfigError(f"'{directory}' has no config.json; give a model's directory, a file or a preset's name")


def stands(path: Path, how: Callable[[Path], bool]) -> bool:
    """Whether there is such a thing at `path`, which may be a name that no file could have."""
    try:
        return how(path)
    except (OSError, ValueError):
        return False


def schema() -> dict[str, Any]:
    """The JSON schema of a Config, for editors that complete and check."""
    described: dict[str, Any] = _any_of(ADAPTER.json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "cutaway model"} | described


def to_dict(config: Config) -> dict[str, Any]:
    """The whole configuration as plain data, each part's tag first; `config(...)` reads it back."""
    data: dict[str, Any] = _tags_first(config.model_dump(mode="json", exclude_none=True))
    return data


def to_toml(config: Config) -> str:
    """The same as TOML."""
    return "\n".join(_toml_table((), to_dict(config))) + "\n"


def to_json(config: Config) -> str:
    """The same as JSON."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def _any_of(value: Any) -> Any:
    """A table without a `kind` means the default one, and may fit several variants: any will do."""
    if isinstance(value, list):
        return [_any_of(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {"anyOf" if key == "oneOf" else key: _any_of(item) for key, item in value.items() if key != "discriminator"}


def _tags_first(value: Any) -> Any:
    if isinstance(value, list):
        return [_tags_first(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _tags_first(value[key]) for key in sorted(value, key=lambda key: key not in ("form", "kind"))}


def _validated(data: dict[str, Any]) -> Config:
    try:
        return ADAPTER.validate_python(data)
    except ValidationError as error:
        raise explain(error, data) from None


def read_table(path: Path) -> dict[str, Any]:
    """What a .toml or .json file holds."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"'{path}' is no plain file; give the path of a .toml or .json file")
        with path.open("rb") as file:  # a pipe would be waited for, and a device has no end
            raw = file.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise ConfigError(f"'{path}' has more than {LARGEST:,} bytes; no configuration has")
        text = raw.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"'{path}' does not exist; give the path of a .toml or .json file") from None
    except (OSError, ValueError) as error:  # no file, or no text
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"'{path}' cannot be read as text: {error}") from None
    try:
        data = _from_toml(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:  # the parsers' errors are ValueErrors
        raise ConfigError(f"'{path}' is not valid {path.suffix[1:].upper()}: {error}") from None
    except RecursionError:
        raise ConfigError(f"'{path}' is nested too deeply to be a configuration") from None
    if not isinstance(data, dict):
        raise ConfigError(f"'{path}' holds a {type(data).__name__}, not a table of settings")
    return {key: value for key, value in data.items() if key != "$schema"}


def _from_toml(text: str) -> dict[str, Any]:
    import tomllib  # most sources are none

    return tomllib.loads(text)


def _toml_table(path: tuple[str, ...], table: dict[str, Any]) -> list[str]:
    plain = {key: value for key, value in table.items() if not _is_table(value)}
    lines = [f"{key} = {_toml_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            inner = (*path, key)
            lines += ["", f"[{'.'.join(inner)}]", *_toml_table(inner, value)]
        elif _is_table(value):
            inner = (*path, key)
            for item in value:
                lines += ["", f"[[{'.'.join(inner)}]]", *_toml_table(inner, item)]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
