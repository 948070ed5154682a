"""cutaway's own directory: the configuration as it is, and the weights under the model's own names."""

import json
from pathlib import Path
from typing import Any

from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.errors import ConfigError
from cutaway.families.family import Family
from cutaway.families.fill import check_sizes, fill_model
from cutaway.families.report import Report
from cutaway.families.rows import Row
from cutaway.families.store import open_directory, read_json
from cutaway.model import Transformer, build

MARK = "cutaway.json"
FORMAT = 1


class Own(Family):
    """The family of models that no other library describes: every tensor under its own name."""

    config: Config

    def __init__(self, config: Config) -> None:
        rows = tuple(Row(name, name) for name in build(config, device="meta").state_dict())
        super().__init__("cutaway", "", {"form": config.form}, (), rows)
        object.__setattr__(self, "config", config)

    def read(self, theirs: Any, **how: Any) -> tuple[Config, dict[str, Any], dict[str, str]]:
        return self.config, dict(theirs), {}


def write_mark(config: Config, directory: Path) -> None:
    """The configuration, in the file that tells such a directory."""
    (directory / MARK).write_text(json.dumps({"format": FORMAT, "config": to_dict(config)}, indent=2) + "\n")


def load_native(directory: Path, **how: Any) -> tuple[Transformer, Config, Report]:
    """Open a directory of cutaway's own."""
    told = read_json(directory / MARK, ConfigError)
    if told.get("format") != FORMAT or not isinstance(told.get("config"), dict):
        raise ConfigError(
            f"'{MARK}' is of format {told.get('format')!r}, and this version reads {FORMAT}; update cutaway"
        )
    config, store = read_config(told["config"]), open_directory(directory)
    check_sizes(config, store, str(directory))
    return fill_model(Own(config), {}, store, source=str(directory), **how)
