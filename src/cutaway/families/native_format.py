"""Native checkpoint format: cutaway.json (the Config) and safetensors with state dict keys."""

import json
from pathlib import Path

from cutaway.bounded_files import read_json_object
from cutaway.config import Config, EmbeddingHead, to_dict
from cutaway.config import config as read_config
from cutaway.errors import ConfigError
from cutaway.families.family import Family, HFConfig, Parsed
from cutaway.families.load_report import LoadReport
from cutaway.families.safetensors_reader import open_safetensors
from cutaway.families.weight_conversion import WeightMapping
from cutaway.families.weight_loader import LoadOptions, check_config_fits_weights, load_model
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

    def config_from_hf(
        self, hf_config: HFConfig, *, head: bool | EmbeddingHead | None = None, pooler: bool | None = None
    ) -> Parsed:
        return self.config, dict(hf_config), {}

    def weight_mappings_for(self, config: Config) -> tuple[WeightMapping, ...]:
        return self.weight_mappings


def write_native_config(config: Config, directory: Path) -> None:
    """Write the Config to cutaway.json, the file by which a native checkpoint is recognized."""
    text = json.dumps({"format": FORMAT_VERSION, "config": to_dict(config)}, indent=2)
    (directory / NATIVE_CONFIG_NAME).write_text(text + "\n")


def load_native_checkpoint(directory: Path, options: LoadOptions) -> tuple[Transformer, Config, LoadReport]:
    """Load a checkpoint directory in the native format; return (model, Config, load report)."""
    data = read_json_object(directory / NATIVE_CONFIG_NAME, ConfigError)
    version, tree = data.get("format"), data.get("config")
    if version != FORMAT_VERSION:
        reason = f"this version of cutaway reads format {FORMAT_VERSION}"
        raise ConfigError(f"'{NATIVE_CONFIG_NAME}' has format {version!r}, but {reason}; update cutaway")
    if not isinstance(tree, dict):
        raise ConfigError(f"'{NATIVE_CONFIG_NAME}' has no object 'config'; write the checkpoint again with ct.save")
    config, reader = read_config(tree), open_safetensors(directory)
    check_config_fits_weights(config, reader, str(directory))
    return load_model(NativeFamily(config), {}, reader, str(directory), options)
