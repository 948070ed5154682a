"""Reading, writing and validation of configurations; errors name the key path and the allowed values."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from pydantic import ValidationError
from support.config_strategies import HEADS, configs

import cutaway as ct
from cutaway import config as c
from cutaway.config.field_docstrings import read_field_docstrings
from cutaway.errors import ConfigError

SMALL = {
    "form": "decoder",
    "vocab_size": 10,
    "d_model": 8,
    "decoder": {"layers": 2, "block": {"attention": {"heads": 2}}},
}


def with_value(path: str, value: object) -> dict:
    data = json.loads(json.dumps(SMALL))
    *parents, last = path.split(".")
    node = data
    for name in parents:
        node = node.setdefault(name, {})
    node[last] = value
    return data


def test_minimal_config() -> None:
    config = ct.config(SMALL)
    assert config.decoder.blocks == config.decoder.block * 2
    assert isinstance(config.decoder.block[0].attention.position, c.Rope)


@given(config=configs(heads=HEADS))
def test_toml_json_and_dict_round_trip(config: c.Config) -> None:
    for text, suffix in ((c.to_toml(config), ".toml"), (c.to_json(config), ".json")):
        path = Path(f"/tmp/cutaway-test-{abs(hash(text))}{suffix}")
        path.write_text(text, encoding="utf-8")
        assert ct.config(path) == config
        path.unlink()
    assert ct.config(c.to_dict(config)) == config
    assert hash(ct.config(c.to_dict(config))) == hash(config)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("d_model", 0, "d_model: input should be greater than or equal to 1, not 0"),
        ("d_model", "8", "d_model: input should be a valid integer, not '8'"),
        ("d_model", True, "d_model: input should be a valid integer, not True"),
        ("d_modle", 8, "unknown key 'd_modle' (did you mean 'd_model'?); allowed here: context, d_model"),
        ("form", "decodr", "unknown form 'decodr'; allowed here: decoder, encoder, encoder-decoder"),
        ("decoder.layers", 0, "decoder.layers: input should be greater"),
        ("decoder.block.attention.heads", 3, "decoder.block.attention.heads: 3 heads do not divide d_model 8"),
        ("decoder.block.attention.kv_heads", 3, "decoder.block.attention: kv_heads 3 does not divide heads 2"),
        ("decoder.block.attention.d_head", 3, "RoPE rotates pairs of dimensions, but a head has 3"),
        (
            "decoder.block.attention.position",
            {"kind": "rop"},
            "decoder.block.attention.position: unknown kind 'rop'; allowed here: none, rope, alibi, relative-bias,"
            " disentangled",
        ),
        (
            "decoder.block.attention.position",
            {"theta": 5.0},
            "decoder.block.attention.position: this table needs the key 'kind'",
        ),
        (
            "decoder.block.attention.position",
            {"kind": "alibi", "theta": 5.0},
            "unknown key 'theta'; allowed here: kind, max_bias, round_to_bf16, scale",
        ),
        (
            "decoder.block.attention.position",
            {"kind": "rope", "rotary_dim": 6},
            "decoder.block.attention.position.rotary_dim: 6 is more than the head's 4 dimensions",
        ),
        (
            "decoder.block.attention.position",
            {"kind": "rope", "scaling": {"kind": "yarn"}},
            "decoder.block.attention.position.scaling.factor: this key is required",
        ),
        (
            "decoder.block.attention.bias",
            ["w"],
            "decoder.block.attention.bias[0]: input should be 'q', 'k', 'v' or 'o', not 'w'",
        ),
        (
            "decoder.block.attention.softcap",
            -1.0,
            "decoder.block.attention.softcap: input should be greater than 0, not -1.0",
        ),
        ("decoder.block.attention.dropout", 1.0, "decoder.block.attention.dropout: input should be less than 1"),
        (
            "decoder.block.ffn",
            {"kind": "moe", "experts": 2, "router": {"top_k": 3}},
            "decoder.block.ffn: router.top_k 3 is more than experts 2",
        ),
        ("decoder.block.cross", {"heads": 2}, "decoder.block: unknown key 'cross'; allowed here: attention, ffn"),
        (
            "decoder.block",
            [{"attention": {"heads": 2}}, {"attention": {"heads": 5}}],
            "decoder.block[1].attention.heads: 5 heads do not divide",
        ),
        (
            "decoder.norm",
            {"kind": "rmsnorm", "bias": True},
            "decoder.norm: unknown key 'bias'; allowed here: eps, kind, unit_offset",
        ),
        (
            "decoder.embedding.factorization",
            {"width": 4},
            "head: a tied head needs inputs of the token table's dimension 4, not 8",
        ),
        ("decoder.embedding.position", {"kind": "learned"}, "decoder.embedding.position.length: this key is required"),
        ("decoder.layer_groups", 3, "decoder: layer_groups 3 is more than the 2 layers"),
        ("decoder.layers_per_group", 2, "decoder: layers_per_group needs layer_groups"),
        ("head", {"kind": "none"}, "head: kind 'none' is not for decoders"),
        ("pooler", True, "unknown key 'pooler'"),
    ],
)
def test_errors_name_the_key_path(path: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ct.config(with_value(path, value))
    assert message in str(error.value)


def test_replace_by_path() -> None:
    """A path through a block pattern changes every block; an unknown path is named in the error."""
    config = c.config("gemma-2-2b")
    assert len(config.decoder.block) == 2
    changed_config = config.replace({"decoder.block.attention.kv_heads": 2, "decoder.layers": 4}, d_model=1024)
    assert {block.attention.kv_heads for block in changed_config.decoder.blocks} == {2}
    assert (changed_config.decoder.layers, changed_config.d_model, changed_config.vocab_size) == (
        4,
        1024,
        config.vocab_size,
    )
    assert config.replace({}) == config
    with pytest.raises(ConfigError, match=r"window\.width: 'window' is not a nested configuration"):
        config.replace({"decoder.block.attention.window.width": 3})
    with pytest.raises(ValidationError, match=r"unknown key 'kv_head' \(did you mean 'kv_heads'\?\)"):
        config.replace({"decoder.block.attention.kv_head": 2})


def test_config_is_frozen() -> None:
    config = ct.config("gpt2")
    with pytest.raises(ValidationError):
        config.d_model = 5
    assert config.replace(d_model=1536).d_model == 1536
    with pytest.raises(ValidationError, match="heads do not divide"):
        config.replace(d_model=770)


def test_cross_attention_requires_an_encoder_and_sequential_placement() -> None:
    block = {"attention": {"heads": 2}, "cross": {"heads": 2}}
    data = {
        "form": "encoder-decoder",
        "vocab_size": 9,
        "d_model": 8,
        "encoder": SMALL["decoder"],
        "decoder": {"layers": 1, "block": block},
    }
    assert ct.config(data).decoder.block[0].cross.heads == 2
    with pytest.raises(ConfigError, match=r"decoder\.block\[0\]\.cross|decoder\.block\.cross: this key is required"):
        ct.config(data | {"decoder": SMALL["decoder"]})
    with pytest.raises(ConfigError, match="does not support cross-attention"):
        ct.config(data | {"decoder": {"layers": 1, "block": block, "placement": {"kind": "parallel"}}})


def test_block_pattern_repeats() -> None:
    local, full = c.MultiHead(heads=2, window=4), c.MultiHead(heads=2)
    stack = c.Stack(
        layers=8,
        leading_blocks=(c.Block(attention=full),),
        block=(c.Block(attention=local),) * 2 + (c.Block(attention=full),),
    )
    assert [block.attention.window for block in stack.blocks] == [None, 4, 4, None, 4, 4, None, 4]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "form = ", "is not valid TOML"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[1]", "holds a list, not a JSON object"),
        ("a.json", '{"model_type": "lama"}', "is not a supported family"),
        ("a.toml", "\x00", "is not valid TOML"),
    ],
)
def test_invalid_files_are_errors(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        ct.config(path)


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ct.config(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        ct.config(tmp_path / "bytes.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        ct.config(tmp_path / "folder.toml")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"nested too deeply|not valid JSON"):
        ct.config(tmp_path / "deep.json")


def test_schema_has_field_docstrings() -> None:
    """Field docstrings include inherited fields; an overridden field has only its own."""
    cross_docs = read_field_docstrings(c.Cross)
    assert cross_docs["dropout"] == "Dropout on the attention pattern."
    assert read_field_docstrings(c.MultiHead).items() > cross_docs.items()
    definitions = c.schema()["$defs"]
    for name, definition in definitions.items():
        docs = {key: value["description"] for key, value in definition["properties"].items() if "description" in value}
        assert docs == read_field_docstrings(getattr(c, name)), name
    assert (
        sum(
            "description" in field for definition in definitions.values() for field in definition["properties"].values()
        )
        >= 60
    )


def test_presets_is_callable_and_a_module() -> None:
    assert ct.presets() == c.presets() == c.presets.presets() == list(c.presets.PRESETS)
    with pytest.raises(AttributeError, match="has no 'preset'"):
        c.preset  # noqa: B018


def test_schema_has_every_node() -> None:
    schema = c.schema()
    assert {"Decoder", "Encoder", "EncoderDecoder", "Rope", "Yarn", "Moe", "LatentAttention"} <= schema["$defs"].keys()
    assert schema["$defs"]["MultiHead"]["properties"]["window"]["description"].startswith(
        "Sliding window: a query attends to keys"
    )
    assert schema["$defs"]["Rope"]["additionalProperties"] is False


@pytest.mark.parametrize("source", [None, 5, [], b"gpt2", "", "\0.toml", "x" * 5000])
def test_invalid_source_is_an_error(source: object) -> None:
    with pytest.raises(ConfigError):
        ct.config(source)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("decoder.norm", {"kind": "rmsnorm", "eps": -1.0}),
        ("decoder.norm", {"kind": "layernorm", "eps": 0.0}),
        ("decoder.block.attention.scale", 1e300),
        ("decoder.block.attention.position", {"kind": "rope", "theta": 1e-320}),
        (
            "decoder.block.attention.position",
            {"kind": "rope", "scaling": {"kind": "yarn", "factor": 2.0, "original_length": 8, "beta_fast": 1e308}},
        ),
        ("vocab_size", 2**62),
        ("decoder.layers", 2_000_000),
    ],
)
def test_out_of_range_numbers_are_errors(path: str, value: object) -> None:
    with pytest.raises(ConfigError, match="input should be"):
        ct.config(with_value(path, value))


def test_schema_key_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"$schema": "cutaway.schema.json"} | SMALL))
    assert ct.config(path) == ct.config(SMALL)


def test_transformers_config_is_read(tmp_path: Path) -> None:
    hf_config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 50,
    }
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    config = c.config(tmp_path)
    assert config == c.config(tmp_path / "config.json") == c.config(hf_config)
    assert (config.d_model, config.decoder.layers, config.vocab_size) == (64, 2, 50)
