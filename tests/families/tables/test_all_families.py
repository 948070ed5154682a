"""All families: defaults match transformers, every config key is used or ignored, and configs round-trip."""

import json
from typing import Any

import pytest
import torch
import transformers
from support.family_configs import REQUIRED_KEYS
from transformers.activations import ACT2FN

import cutaway as ct
from cutaway.errors import ConfigError
from cutaway.families import families, find_family
from cutaway.families.config_fields import HF_ACTIVATIONS
from cutaway.families.config_tree import diff_configs, shortest_layer_pattern
from cutaway.families.family import COMMON_FIELDS, IGNORED_CONFIG_KEYS
from cutaway.families.registry import _UNSUPPORTED_FAMILIES
from cutaway.model.activations import ACTIVATIONS


def peer_config(name: str) -> Any:
    return transformers.CONFIG_MAPPING[name]


def defaults(name: str) -> dict[str, Any]:
    return json.loads(peer_config(name)(**REQUIRED_KEYS.get(name, {})).to_json_string(use_diff=False))


@pytest.mark.parametrize("name", families())
def test_every_config_key_is_used_or_ignored_with_a_reason(name: str) -> None:
    family = families()[name]
    known = {key for entry in (*COMMON_FIELDS, *family.fields) for key in entry.keys}
    handled = known | IGNORED_CONFIG_KEYS.keys() | family.ignored_config_keys.keys()
    assert not defaults(name).keys() - handled
    assert all(len(reason) > 5 for reason in family.ignored_config_keys.values())


@pytest.mark.parametrize("name", families())
def test_defaults_match_transformers(name: str) -> None:
    family = families()[name]
    required = REQUIRED_KEYS.get(name, {})
    assert not diff_configs(family.config_from_hf(required)[0], family.config_from_hf(defaults(name))[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", families())
def test_attribute_map_matches_transformers(name: str) -> None:
    aliases = {key for key, value in peer_config(name).attribute_map.items() if key != value}
    family = families()[name]
    known = {key for entry in family.fields for key in entry.keys}
    assert (
        not {key for key in aliases if peer_config(name).attribute_map[key] in known}
        - family.attribute_map.keys()
        - known
    )


@pytest.mark.parametrize("name", families())
def test_config_round_trip(name: str) -> None:
    family = families()[name]
    config = family.config_from_hf(defaults(name))[0]
    assert not diff_configs(family.config_from_hf(family.config_to_hf(config))[0], config)


PRESETS_WITHOUT_FAMILY = {"transformer-base", "transformer-big"}
"""The 2017 Transformer, which no library stores."""


@pytest.mark.sample(20)
@pytest.mark.parametrize("preset", [name for name in ct.presets() if not name.startswith("tiny-")])
def test_every_published_preset_has_a_family(preset: str) -> None:
    config = ct.config(preset)
    if preset in PRESETS_WITHOUT_FAMILY:
        with pytest.raises(ConfigError, match="no family can represent"):
            find_family(config)
        return
    family, hf_config = find_family(config)
    head_and_pooler = {"head": config.head.kind != "none", "pooler": getattr(config, "pooler", False)}
    assert not diff_configs(family.config_from_hf(hf_config, **head_and_pooler)[0], config)


def test_conflicting_aliases_are_an_error() -> None:
    config_from_hf = families()["gpt2"].config_from_hf
    assert (
        config_from_hf({"n_head": 4, "num_attention_heads": 4, "n_embd": 16})[0]
        == config_from_hf({"n_head": 4, "n_embd": 16})[0]
    )
    with pytest.raises(ConfigError, match="the same setting"):
        config_from_hf({"n_head": 12, "num_attention_heads": 16})


def test_base_model_has_a_pooler() -> None:
    base_model = families()["bert"].config_from_hf({"architectures": ["BertModel"]})[0]
    assert (base_model.head.kind, base_model.pooler) == ("none", True)


@pytest.mark.parametrize("name", HF_ACTIVATIONS)
def test_activations_match_transformers(name: str) -> None:
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[HF_ACTIVATIONS[name]](x), ACT2FN[name](x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("blocks", "leading", "pattern"),
    [
        ("a", "", "a"),
        ("aaaa", "", "a"),
        ("abab", "", "ab"),
        ("abb", "a", "b"),
        ("aabaab", "", "aab"),
        ("abc", "", "abc"),
    ],
)
def test_shortest_layer_pattern(blocks: str, leading: str, pattern: str) -> None:
    assert shortest_layer_pattern(list(blocks)) == (list(leading), list(pattern))


def test_unsupported_families_are_errors_with_a_reason() -> None:
    assert not _UNSUPPORTED_FAMILIES.keys() & families().keys()
    assert _UNSUPPORTED_FAMILIES.keys() <= set(transformers.CONFIG_MAPPING)
    with pytest.raises(ConfigError, match="model_type 'apertus' is not supported: its activation"):
        ct.config({"model_type": "apertus"})
