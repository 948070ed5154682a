"""What holds for every family: its defaults are theirs, every key is accounted for, and both directions agree."""

import json
from typing import Any

import pytest
import torch
import transformers
from transformers.activations import ACT2FN

import cutaway as ct
from cutaway.errors import ConfigError
from cutaway.families import families, find_family
from cutaway.families.config_fields import HF_ACTIVATIONS
from cutaway.families.config_tree import diff_configs, shortest_layer_pattern
from cutaway.families.family import COMMON_FIELDS, IGNORED_CONFIG_KEYS
from cutaway.model.activations import ACTIVATIONS as FUNCTIONS


def peer_config(name: str) -> Any:
    return transformers.CONFIG_MAPPING[name]


def defaults(name: str) -> dict[str, Any]:
    return json.loads(peer_config(name)().to_json_string(use_diff=False))


@pytest.mark.parametrize("name", families())
def test_every_key_is_honoured_or_cannot_matter(name: str) -> None:
    family = families()[name]
    known = {key for entry in (*COMMON_FIELDS, *family.fields) for key in entry.keys}
    accounted = known | IGNORED_CONFIG_KEYS.keys() | family.ignored_config_keys.keys()
    assert not defaults(name).keys() - accounted
    assert all(len(why) > 5 for why in family.ignored_config_keys.values())


@pytest.mark.parametrize("name", families())
def test_defaults_are_the_peers(name: str) -> None:
    family = families()[name]
    assert not diff_configs(family.config_from_hf({})[0], family.config_from_hf(defaults(name))[0])


@pytest.mark.parametrize("name", families())
def test_aliases_are_the_peers(name: str) -> None:
    theirs = {key for key, value in peer_config(name).attribute_map.items() if key != value}
    family = families()[name]
    known = {key for entry in family.fields for key in entry.keys}
    assert (
        not {key for key in theirs if peer_config(name).attribute_map[key] in known}
        - family.attribute_map.keys()
        - known
    )


@pytest.mark.parametrize("name", families())
def test_a_configuration_survives_the_way_out_and_back(name: str) -> None:
    family = families()[name]
    config = family.config_from_hf(defaults(name))[0]
    assert not diff_configs(family.config_from_hf(family.config_to_hf(config))[0], config)


WITHOUT_A_TABLE = {
    "olmoe-1b-7b", "dbrx-132b", "deepseek-v2", "deepseek-v2-lite",
    "granite-3.0-1b-a400m", "granite-3.0-3b-a800m", "mbart-large-cc25", "transformer-base", "transformer-big",
}  # fmt: skip
"""Presets of families that cutaway does not open, and the 2017 Transformer, which no library stores."""


@pytest.mark.parametrize("preset", [name for name in ct.presets() if not name.startswith("tiny-")])
def test_every_published_preset_can_be_written_for_others(preset: str) -> None:
    config = ct.config(preset)
    if preset in WITHOUT_A_TABLE:
        with pytest.raises(ConfigError, match="no published family"):
            find_family(config)
        return
    family, theirs = find_family(config)
    ends = {"head": config.head.kind != "none", "pooler": getattr(config, "pooler", False)}
    assert not diff_configs(family.config_from_hf(theirs, **ends)[0], config)


def test_two_names_for_one_key_must_agree() -> None:
    read = families()["gpt2"].config_from_hf
    assert read({"n_head": 4, "num_attention_heads": 4, "n_embd": 16})[0] == read({"n_head": 4, "n_embd": 16})[0]
    with pytest.raises(ConfigError, match="are one"):
        read({"n_head": 12, "num_attention_heads": 16})


def test_a_trunk_has_its_pooler() -> None:
    trunk = families()["bert"].config_from_hf({"architectures": ["BertModel"]})[0]
    assert (trunk.head.kind, trunk.pooler) == ("none", True)


@pytest.mark.parametrize("word", HF_ACTIVATIONS)
def test_activations_are_the_peers(word: str) -> None:
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    torch.testing.assert_close(FUNCTIONS[HF_ACTIVATIONS[word]](x), ACT2FN[word](x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("blocks", "lead", "tile"),
    [
        ("a", "", "a"),
        ("aaaa", "", "a"),
        ("abab", "", "ab"),
        ("abb", "a", "b"),
        ("aabaab", "", "aab"),
        ("abc", "", "abc"),
    ],
)
def test_layers_are_written_as_the_shortest_pattern(blocks: str, lead: str, tile: str) -> None:
    assert shortest_layer_pattern(list(blocks)) == (list(lead), list(tile))
