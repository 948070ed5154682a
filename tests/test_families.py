"""What holds for every family: its defaults are theirs, every key is accounted for, and both directions agree."""

import json
from typing import Any

import pytest
import torch
import transformers
from transformers.activations import ACT2FN

import cutaway as ct
from cutaway.errors import ConfigError
from cutaway.families import families, family_for
from cutaway.families.family import EVERYWHERE, HARMLESS
from cutaway.families.fields import ACTIVATIONS
from cutaway.families.tree import differences, pattern
from cutaway.model.activations import ACTIVATIONS as FUNCTIONS


def peer_config(name: str) -> Any:
    return transformers.CONFIG_MAPPING[name]


def defaults(name: str) -> dict[str, Any]:
    return json.loads(peer_config(name)().to_json_string(use_diff=False))


@pytest.mark.parametrize("name", families())
def test_every_key_is_honoured_or_cannot_matter(name: str) -> None:
    family = families()[name]
    known = {key for entry in (*EVERYWHERE, *family.fields) for key in entry.keys}
    accounted = known | HARMLESS.keys() | family.harmless.keys()
    assert not defaults(name).keys() - accounted
    assert all(len(why) > 5 for why in family.harmless.values())


@pytest.mark.parametrize("name", families())
def test_defaults_are_the_peers(name: str) -> None:
    family = families()[name]
    assert not differences(family.read({})[0], family.read(defaults(name))[0])


@pytest.mark.parametrize("name", families())
def test_aliases_are_the_peers(name: str) -> None:
    theirs = {key for key, value in peer_config(name).attribute_map.items() if key != value}
    family = families()[name]
    known = {key for entry in family.fields for key in entry.keys}
    assert not {key for key in theirs if peer_config(name).attribute_map[key] in known} - family.aliases.keys() - known


@pytest.mark.parametrize("name", families())
def test_a_configuration_survives_the_way_out_and_back(name: str) -> None:
    family = families()[name]
    config = family.read(defaults(name))[0]
    assert not differences(family.read(family.write(config))[0], config)


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
            family_for(config)
        return
    family, theirs = family_for(config)
    ends = {"head": config.head.kind != "none", "pooler": getattr(config, "pooler", False)}
    assert not differences(family.read(theirs, **ends)[0], config)


def test_two_names_for_one_key_must_agree() -> None:
    read = families()["gpt2"].read
    assert read({"n_head": 4, "num_attention_heads": 4, "n_embd": 16})[0] == read({"n_head": 4, "n_embd": 16})[0]
    with pytest.raises(ConfigError, match="are one"):
        read({"n_head": 12, "num_attention_heads": 16})


def test_a_trunk_has_its_pooler() -> None:
    trunk = families()["bert"].read({"architectures": ["BertModel"]})[0]
    assert (trunk.head.kind, trunk.pooler) == ("none", True)


@pytest.mark.parametrize("word", ACTIVATIONS)
def test_activations_are_the_peers(word: str) -> None:
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    torch.testing.assert_close(FUNCTIONS[ACTIVATIONS[word]](x), ACT2FN[word](x), rtol=1e-6, atol=1e-6)


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
    assert pattern(list(blocks)) == (list(lead), list(tile))
