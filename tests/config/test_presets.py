"""Presets against published models: exact parameter counts, round trips, closed form against built models."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from support.config_strategies import HEADS, configs

from cutaway.config import Config, config, presets, to_json, to_toml
from cutaway.config.presets import PRESET_TABLES, PRESETS
from cutaway.errors import ConfigError
from cutaway.model import build
from cutaway.size import LayerParameterCounts, count_parameters

REFERENCES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "config/data/published_models.json").read_text()
)["models"]
TINY = [name for name in presets() if name.startswith("tiny-")]

# Totals of the `transformers` models with the published configurations, built on the meta device.
# T5 1.1, Flan-T5 and mT5 include the output matrix that their checkpoints contain;
# transformer-big follows from the dimensions in the 2017 paper.
TOTALS = {
    "gpt2-large": 774_030_080,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-176b": 176_247_271_424,
    "mpt-30b": 29_957_200_896,
    "falcon-rw-1b": 1_311_625_216,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "falcon-40b": 41_303_293_952,
    "falcon-180b": 178_557_088_768,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "command-r": 34_980_831_232,
    "command-r-plus": 103_810_674_688,
    "command-r7b": 8_028_033_024,
    "aya-23-8b": 8_028_033_024,
    "aya-23-35b": 34_980_831_232,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "phi-3.5-mini": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "granite-3.0-2b": 2_533_531_648,
    "granite-3.0-8b": 8_170_848_256,
    "granite-3.3-8b": 8_170_864_640,
    "smollm3-3b": 3_075_098_624,
    "olmo-1b": 1_176_764_416,
    "olmo-7b": 6_888_095_744,
    "olmo-7b-0424": 6_888_095_744,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "stablelm-3b": 2_795_443_200,
    "stablelm-2-1.6b": 1_644_515_328,
    "stablelm-2-12b": 12_143_185_920,
    "gemma-2b": 2_506_172_416,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-270m": 268_098_176,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "mixtral-8x22b": 140_630_071_296,
    "dbrx-132b": 131_596_523_520,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "granite-3.0-1b-a400m": 1_334_628_352,
    "granite-3.0-3b-a800m": 3_298_793_472,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "bert-large": 335_141_888,
    "bert-base-mlm": 109_514_298,
    "bert-large-mlm": 335_174_458,
    "all-minilm-l6": 22_713_216,
    "distilbert-base": 66_985_530,
    "roberta-large": 355_412_057,
    "xlm-roberta-base": 278_295_186,
    "xlm-roberta-large": 560_142_482,
    "mpnet-base": 109_518_527,
    "albert-large-v2": 17_683_968,
    "albert-xlarge-v2": 58_724_864,
    "albert-xxlarge-v2": 222_595_584,
    "albert-base-v2-mlm": 11_221_680,
    "electra-small": 13_483_008,
    "electra-base": 108_891_648,
    "electra-large": 334_092_288,
    "deberta-v3-xsmall": 70_682_112,
    "deberta-v3-small": 141_304_320,
    "deberta-v3-base": 183_831_552,
    "deberta-v3-large": 434_012_160,
    "mdeberta-v3-base": 278_218_752,
    "modernbert-large": 395_881_664,
    "transformer-big": 214_171_648,
    "t5-base": 222_903_552,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
    "flan-t5-small": 76_961_152,
    "flan-t5-base": 247_577_856,
    "flan-t5-large": 783_150_080,
    "flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
    "mt5-xxl": 12_921_057_280,
    "bart-large": 406_291_456,
    "mbart-large-cc25": 610_851_840,
    "opus-mt-en-de": 74_410_496,
    "opus-mt-en-es": 77_943_296,
    "pegasus-large": 570_797_056,
}


@pytest.mark.parametrize("fact", REFERENCES, ids=lambda fact: fact["name"])
def test_parameter_counts_match_reference(fact: dict[str, Any]) -> None:
    preset = config(fact["name"])
    counts, expected = count_parameters(preset), fact["params"]
    assert counts.total == expected["total"]
    assert counts.active == expected["active_per_token"]
    assert counts.positions == expected["position_embedding"]
    assert counts.non_embedding == expected["non_embedding"]
    components = {
        "token_embedding": counts.embedding,
        "token_type_embedding": counts.token_types,
        "output_head_untied": counts.head,
        "embedding_projection": counts.embedding_projection,
        "embedding_norm": counts.embedding_norm,
        "final_norm": counts.final_norm,
        "head_transform": counts.head_transform,
        "pooler": counts.pooler,
    }
    assert components == {component: expected.get(component, 0) for component in components}


@pytest.mark.parametrize("fact", REFERENCES, ids=lambda fact: fact["name"])
def test_layer_counts_match_reference(fact: dict[str, Any]) -> None:
    assert config(fact["name"]).form == fact["form"]
    expected = [reference for reference in fact["per_layer"] for _ in range(reference["layers"])]
    layers = count_parameters(config(fact["name"])).unique_layers
    assert len(layers) == len(expected)
    for layer, reference in zip(layers, expected, strict=True):
        assert layer.stack == reference.get("stack", layer.stack)
        assert layer.attention == reference["attention"]
        assert layer.cross_attention == reference.get("cross_attention", 0)
        assert layer.ffn == reference["ffn"]
        assert layer.active_ffn == reference.get("ffn_active", reference["ffn"])
        assert layer.norm == reference["norm"]
        assert layer.total == reference["layer_total"]


def test_every_preset_has_a_reference_total() -> None:
    assert set(TOTALS) == set(presets()) - set(TINY) - {fact["name"] for fact in REFERENCES}


@pytest.mark.parametrize("name", TOTALS)
def test_totals_match_published_totals(name: str) -> None:
    assert count_parameters(config(name)).total == TOTALS[name]


@pytest.mark.parametrize("name", presets())
def test_preset_toml_and_json_round_trip(name: str, tmp_path: Path) -> None:
    preset = config(name)
    for suffix, text in ((".toml", to_toml(preset)), (".json", to_json(preset))):
        path = tmp_path / f"model{suffix}"
        path.write_text(text, encoding="utf-8")
        assert config(path) == preset


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", presets())
def test_closed_form_matches_built_presets(name: str) -> None:
    """Built on the meta device, so that 671 billion parameters take no memory."""
    parameters = build(config(name), device="meta").parameters()
    assert count_parameters(config(name)).total == sum(parameter.numel() for parameter in parameters)


@given(model=configs(heads=HEADS))
def test_closed_form_matches_random_configs(model: Config) -> None:
    assert count_parameters(model).total == sum(
        parameter.numel() for parameter in build(model, device="meta").parameters()
    )


def test_shared_layers_are_counted_once() -> None:
    layers = count_parameters(config("albert-base-v2")).per_layer
    assert [layer.shared_with for layer in layers] == [None] + [0] * 11
    assert {layer.total for layer in layers} == {layers[0].total}


def test_layer_total_and_active() -> None:
    layer = LayerParameterCounts(stack="decoder", attention=1, cross_attention=2, ffn=300, active_ffn=30, norm=4)
    assert (layer.total, layer.active) == (307, 37)


def test_preset_names_are_unique() -> None:
    assert sum(len(table) for table in PRESET_TABLES) == len(PRESETS) == len(presets())
    assert len(presets()) >= 60
    assert all(name == name.lower() and " " not in name for name in presets())


@pytest.mark.parametrize("form", ["decoder", "encoder", "encoder-decoder"])
def test_every_form_has_a_tiny_preset(form: str) -> None:
    names = [name for name in TINY if config(name).form == form]
    assert names
    assert all(count_parameters(config(name)).total < 250_000 for name in names)


def test_misspelled_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*llama-3\.1-8b"):
        config("lama-3.1-8b")
