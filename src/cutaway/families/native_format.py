"""cutaway's own directory: the configuration as it is, and the weights under the model's own names."""

import json
from pathlib import Path
from typing import Any

from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.errors import ConfigError
from cutaway.families.family import Family
from cutaway.families.load_report import LoadReport
from cutaway.families.safetensors_reader import open_safetensors, read_json_file
from cutaway.families.weight_conversion import WeightMapping
from cutaway.families.weight_loader import check_config_fits_weights, load_model
from cutaway.model import Transformer, build

NATIVE_CONFIG_NAME = "cutaway.json"
FORMAT_VERSION = 1


class NativeFamily(Family):
    """The family of models that no other library describes: every tensor under its own name."""

    config: Config

    def __init__(self, config: Config) -> None:
        rows = tuple(WeightMapping(name, name) for name in build(config, device="meta").state_dict())
        super().__init__("cutaway", "", {"form": config.form}, (), rows)
        object.__setattr__(self, "config", config)

    def config_from_hf(self, hf_config: Any, **options: Any) -> tuple[Config, dict[str, Any], dict[str, str]]:
        return self.config, dict(hf_config), {}


def write_native_config(config: Config, directory: Path) -> None:
    """The configuration, in the file that tells such a directory."""
    (directory / NATIVE_CONFIG_NAME).write_text(
        json.dumps({"format": FORMAT_VERSION, "config": to_dict(config)}, indent=2) + "\n"
    )


def load_native_checkpoint(directory: Path, **load_options: Any) -> tuple[Transformer, Config, LoadReport]:
    """Open a directory of cutaway's own."""
    data = read_json_file(directory / NATIVE_CONFIG_NAME, ConfigError)
    if data.get("format") != FORMAT_VERSION or not isinstance(data.get("config"), dict):
        raise ConfigError(
            f"'{NATIVE_CONFIG_NAME}' is of format {data.get('format')!r}, and this version reads {FORMAT_VERSION};"
            " update cutaway"
        )
    config, reader = read_config(data["config"]), open_safetensors(directory)
    check_config_fits_weights(config, reader, str(directory))
    return load_model(NativeFamily(config), {}, reader, source=str(directory), **load_options)
