"""Native checkpoint format: cutaway.json (the Config) and safetensors with state dict keys."""

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
    """Family of the native format: checkpoint keys are the state dict keys."""

    config: Config

    def __init__(self, config: Config) -> None:
        mappings = tuple(WeightMapping(name, name) for name in build(config, device="meta").state_dict())
        super().__init__("cutaway", "", {"form": config.form}, (), mappings)
        object.__setattr__(self, "config", config)

    def config_from_hf(self, hf_config: Any, **options: Any) -> tuple[Config, dict[str, Any], dict[str, str]]:
        return self.config, dict(hf_config), {}


def write_native_config(config: Config, directory: Path) -> None:
    """Write cutaway.json, the file that marks a native checkpoint."""
    (directory / NATIVE_CONFIG_NAME).write_text(
        json.dumps({"format": FORMAT_VERSION, "config": to_dict(config)}, indent=2) + "\n"
    )


def load_native_checkpoint(directory: Path, **load_options: Any) -> tuple[Transformer, Config, LoadReport]:
    """Load a native checkpoint."""
    data = read_json_file(directory / NATIVE_CONFIG_NAME, ConfigError)
    if data.get("format") != FORMAT_VERSION or not isinstance(data.get("config"), dict):
        raise ConfigError(
            f"'{NATIVE_CONFIG_NAME}' has format {data.get('format')!r}, and this version of cutaway reads"
            f" {FORMAT_VERSION}; update cutaway"
        )
    config, reader = read_config(data["config"]), open_safetensors(directory)
    check_config_fits_weights(config, reader, str(directory))
    return load_model(NativeFamily(config), {}, reader, source=str(directory), **load_options)
