"""Config from a preset name, dict, file or directory; Config to dict, TOML, JSON and JSON schema."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pydantic import ValidationError

from cutaway.bounded_files import read_json_object, read_text_file
from cutaway.config.node import build_config_error
from cutaway.config.transformer import CONFIG_ADAPTER, Config, TransformerConfig
from cutaway.errors import ConfigError
from cutaway.pretrained import find_pretrained


def config(source: Config | Mapping[str, Any] | str | Path) -> Config:
    """Load a Config from a preset name, a dict, a .toml, .json or .gguf file, or a model directory (its config.json).

    The configuration of a training run is that of its exported model, and that of an adapter is that of its base model.
    """
    if isinstance(source, TransformerConfig):
        return source
    if isinstance(source, Mapping):
        return _parse_config(dict(source))
    if not isinstance(source, str | Path) or not str(source):
        raise ConfigError(f"{source!r} is not a configuration; pass a preset name, a dict, or a .toml or .json file")
    path = Path(source)
    if path.suffix in (".toml", ".json"):
        return _parse_config(read_config_file(path))
    if path_satisfies(path, Path.is_dir):
        return _read_directory(path)
    if path.suffix == ".gguf" and path_satisfies(path, Path.is_file):
        read_gguf: Callable[[Path], Config] = resolve_name("cutaway.families.gguf.load_save:load_gguf_config")
        return read_gguf(path)
    if (own := find_pretrained(str(source))) is not None:
        return _parse_config(read_config_file(_find_config_file(own)))
    from cutaway.config.presets import PRESETS, build_preset

    if str(source) not in PRESETS and path_satisfies(path, Path.exists):
        raise ConfigError(f"'{source}' is not a configuration; pass a .toml, .json or .gguf file, or a model directory")
    return build_preset(str(source))


def _parse_config(data: dict[str, Any]) -> Config:
    """Parse a cutaway or transformers configuration. `families` is imported by name: config must not depend on it."""
    if "form" in data or not ("model_type" in data or "architectures" in data):
        return _validate(data["config"] if data.keys() == {"format", "config"} else data)
    read: Callable[[Mapping[str, Any]], Config] = resolve_name("cutaway.families:config_from_hf")
    return read(data)


def _read_directory(directory: Path) -> Config:
    """Config of a model directory, of the exported model of a training run, or of the base model of an adapter."""
    if path_satisfies(directory / "run.json", Path.is_file):
        directory = directory / "model"
    adapter_config = directory / "adapter_config.json"
    if path_satisfies(adapter_config, Path.is_file) and not path_satisfies(directory / "config.json", Path.exists):
        base = read_json_object(adapter_config, ConfigError).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise ConfigError(f"'{adapter_config}' names no base model (base_model_name_or_path); pass the base model")
        try:
            return config(directory / base if path_satisfies(directory / base, Path.exists) else base)
        except RecursionError:
            raise ConfigError(f"'{directory}' is an adapter whose base models are adapters of each other") from None
    return _parse_config(read_config_file(_find_config_file(directory)))


def _find_config_file(directory: Path) -> Path:
    for name in ("cutaway.json", "config.json"):
        try:
            if (directory / name).is_file():
                return directory / name
        except OSError as error:
            raise ConfigError(f"'{directory}' cannot be opened: {error.strerror}") from None
    raise ConfigError(
        f"'{directory}' has no config.json; pass a model directory, a configuration file or a preset name"
    )


def path_satisfies(path: Path, predicate: Callable[[Path], bool]) -> bool:
    """Return `predicate(path)`, or False if `path` is not a valid file name."""
    try:
        return predicate(path)
    except (OSError, ValueError):
        return False


def schema() -> dict[str, Any]:
    """JSON schema of a Config, for editor completion and validation."""
    body: dict[str, Any] = map_dicts(CONFIG_ADAPTER.json_schema(), _one_of_to_any_of)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "cutaway model"} | body


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as JSON types, with the keys `form` and `kind` first. `config(...)` converts it back."""
    data: dict[str, Any] = map_dicts(config.model_dump(mode="json", exclude_none=True), _sort_tags_first)
    return data


def to_toml(config: Config) -> str:
    """The configuration as TOML."""
    return format_toml(to_dict(config))


def format_toml(table: dict[str, Any]) -> str:
    """A table of JSON types as TOML."""
    return "\n".join(_format_toml_table((), table)).lstrip("\n") + "\n"


def to_json(config: Config) -> str:
    """The configuration as JSON."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def map_dicts(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of nested dicts and lists with `change` applied to every dict, outer dicts first."""
    if isinstance(value, list):
        return [map_dicts(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: map_dicts(item, change) for key, item in change(value).items()}


def _one_of_to_any_of(node: dict[str, Any]) -> dict[str, Any]:
    """Replace oneOf by anyOf in a node of the schema: a table without the key `kind` may match several variants."""
    return {"anyOf" if key == "oneOf" else key: item for key, item in node.items() if key != "discriminator"}


def _sort_tags_first(node: dict[str, Any]) -> dict[str, Any]:
    return {key: node[key] for key in sorted(node, key=lambda key: key not in ("form", "kind"))}


def _validate(data: dict[str, Any]) -> Config:
    try:
        return CONFIG_ADAPTER.validate_python(data)
    except ValidationError as error:
        raise build_config_error(error, data) from None


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a .toml or .json file as a dict, without its key `$schema`."""
    data = _read_toml(path) if path.suffix == ".toml" else read_json_object(path, ConfigError)
    return {key: value for key, value in data.items() if key != "$schema"}


def _read_toml(path: Path) -> dict[str, Any]:
    import tomllib  # imported only for TOML files

    try:
        return tomllib.loads(read_text_file(path, ConfigError))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"'{path}' is not valid TOML: {reason}") from None


def _format_toml_table(path: tuple[str, ...], table: dict[str, Any]) -> list[str]:
    plain = {key: value for key, value in table.items() if not _is_table(value)}
    lines = [f"{key} = {_format_toml_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            inner = (*path, key)
            lines += ["", f"[{'.'.join(inner)}]", *_format_toml_table(inner, value)]
        elif _is_table(value):
            inner = (*path, key)
            for item in value:
                lines += ["", f"[[{'.'.join(inner)}]]", *_format_toml_table(inner, item)]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _format_toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_format_toml_value(item) for item in value) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
