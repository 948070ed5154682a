"""The architecture query describes every form of model, and its parameter counts add up to the model."""

from typing import Any

import pytest
from support.inspector import open_inspector, run_query

import cutaway as ct
from cutaway.config.presets import presets
from cutaway.serve.inspect.inspector import Inspector, build_inspector
from cutaway.size.parameters import count_parameters

pytestmark = pytest.mark.unchecked
TINY_PRESETS = [name for name in presets() if name.startswith("tiny-")]


def describe(source: str) -> dict[str, Any]:
    return run_query(open_inspector(source), "architecture")[0]


def sum_parameters(data: dict[str, Any]) -> int:
    total = (data["head"] or {}).get("parameters", 0) + (data["pooler"] or 0)
    for stack in data["stacks"].values():
        total += stack["embedding"]["token_parameters"] + stack["embedding"]["other_parameters"]
        total += stack["final_norm"] or 0
        for block in stack["blocks"]:
            total += block["norm"] or 0
            for sublayer in block["sublayers"].values():
                total += sum(sublayer[name] or 0 for name in ("parameters", "norm_in", "norm_out", "norm_after"))
    return total


@pytest.mark.parametrize("source", [*TINY_PRESETS, "tiny-english", "tiny-english-encoder", "tiny-dates"])
def test_parameters_add_up_to_the_model(source: str) -> None:
    inspector = open_inspector(source)
    data, _ = run_query(inspector, "architecture")
    counts = count_parameters(inspector.config)
    assert sum_parameters(data) == data["num_parameters"] == counts.total
    layers = [block for stack in data["stacks"].values() for block in stack["blocks"]]
    for layer, count in zip(layers, counts.per_layer, strict=True):
        assert layer["shared_with"] == count.shared_with
        if count.shared_with is None:
            sublayers = layer["sublayers"]
            assert sublayers["attn"]["parameters"] == count.attention
            assert sublayers["ffn"]["parameters"] == count.ffn
            assert sublayers.get("cross", {}).get("parameters", 0) == count.cross_attention


def norms(data: dict[str, Any], stack: str, layer: int = 0) -> dict[str, list[str]]:
    """Names of the norms of each sublayer."""
    sublayers = data["stacks"][stack]["blocks"][layer]["sublayers"]
    fields = ("norm_in", "norm_out", "norm_after")
    return {name: [field for field in fields if sublayer[field] is not None] for name, sublayer in sublayers.items()}


def test_placement_of_norms() -> None:
    assert norms(describe("tiny-gpt"), "decoder") == {"attn": ["norm_in"], "ffn": ["norm_in"]}
    assert norms(describe("tiny-bert"), "encoder") == {"attn": ["norm_after"], "ffn": ["norm_after"]}
    assert norms(describe("tiny-gemma"), "decoder")["attn"] == ["norm_in", "norm_out"]
    assert norms(describe("tiny-bart"), "decoder")["cross"] == ["norm_after"]
    modernbert = describe("tiny-modernbert")
    assert norms(modernbert, "encoder")["attn"] == []
    assert norms(modernbert, "encoder", 1)["attn"] == ["norm_in"]


@pytest.mark.parametrize(("num_norms", "block_norm"), [("one", True), ("two", False)])
def test_parallel_attention_and_ffn(num_norms: str, block_norm: bool) -> None:
    config = ct.config("tiny-gpt").replace({"decoder.placement": {"kind": "parallel", "norms": num_norms}})
    inspector = build_inspector(ct.build(config, seed=0))
    data, _ = run_query(inspector, "architecture")
    assert sum_parameters(data) == data["num_parameters"]
    assert data["stacks"]["decoder"]["placement"] == "parallel"
    assert (data["stacks"]["decoder"]["blocks"][0]["norm"] is not None) == block_norm
    assert norms(data, "decoder")["attn"] == ([] if block_norm else ["norm_in"])


def test_block_kinds() -> None:
    gemma = describe("tiny-gemma")["stacks"]["decoder"]
    assert [(kind["label"], kind["count"]) for kind in gemma["block_kinds"]] == [("window 8", 2), ("full attention", 2)]
    assert [block["kind"] for block in gemma["blocks"]] == [0, 1, 0, 1]
    mla = describe("tiny-mla")["stacks"]["decoder"]
    assert [(kind["label"], kind["count"]) for kind in mla["block_kinds"]] == [
        ("dense FFN", 1),
        ("mixture of experts", 2),
    ]
    llama = describe("tiny-llama")["stacks"]["decoder"]
    assert [(kind["label"], kind["count"]) for kind in llama["block_kinds"]] == [("", 4)]


def test_sizes_and_formulas() -> None:
    data = describe("tiny-llama")
    [kind] = data["stacks"]["decoder"]["block_kinds"]
    assert {name: kind["attn"][name] for name in ("heads", "kv_heads", "d_head", "position", "window")} == {
        "heads": 4, "kv_heads": 2, "d_head": 16, "position": "rope", "window": None,
    }  # fmt: skip
    assert (kind["ffn"]["kind"], kind["ffn"]["hidden"], kind["ffn"]["activation"]) == ("gated", 128, "silu")
    assert kind["formulas"]["attn.q"] == ["q", "position.rope.half"]
    assert kind["formulas"]["ffn.hidden"] == ["hidden.gated"]
    matrices = data["stacks"]["decoder"]["blocks"][0]["sublayers"]["ffn"]["matrices"]
    assert {matrix["name"]: matrix["shape"] for matrix in matrices} == {
        "gate": [128, 64], "up": [128, 64], "down": [64, 128],
    }  # fmt: skip
    moe = describe("tiny-moe")["stacks"]["decoder"]["block_kinds"][0]["ffn"]
    assert (moe["kind"], moe["experts"], moe["top_k"], moe["hidden"]) == ("moe", 4, 2, 64)
    latent = describe("tiny-mla")["stacks"]["decoder"]["block_kinds"][0]["attn"]
    assert (latent["kind"], latent["q_rank"], latent["kv_rank"]) == ("latent", 24, 16)


def test_embedding_and_head() -> None:
    gpt = describe("tiny-gpt")
    assert gpt["head"]["is_tied"]
    assert gpt["head"]["parameters"] == 0
    embedding = gpt["stacks"]["decoder"]["embedding"]
    assert (embedding["position"], embedding["max_positions"]) == ("learned", 64)
    albert = describe("tiny-albert")
    assert albert["head"] is None
    assert [block["shared_with"] for block in albert["stacks"]["encoder"]["blocks"]] == [None, 0, 0, 0]
    assert albert["stacks"]["encoder"]["embedding"]["table_dim"] == 16
    t5 = describe("tiny-t5")
    assert list(t5["stacks"]) == ["encoder", "decoder"]
    assert t5["stacks"]["decoder"]["embedding"]["is_shared"]
    assert "cross.q" in t5["stacks"]["decoder"]["block_kinds"][0]["formulas"]


def test_every_preset_family_has_labels_for_its_block_kinds() -> None:
    from cutaway.serve.inspect.queries.architecture import _label_kinds

    for name in presets():
        config = ct.config(name)
        for stack in config.stacks.values():
            skips_first = getattr(stack.placement, "skip_first_prenorm", False)
            kinds = list(dict.fromkeys((block, skips_first and i == 0) for i, block in enumerate(stack.blocks)))
            labels = _label_kinds(kinds, config.d_model)
            assert len(set(labels)) == len(labels), (name, labels)


def test_inspector_of_a_fixed_model_lists_no_models() -> None:
    inspector: Inspector = build_inspector(ct.build("tiny-gpt", seed=0))
    assert run_query(inspector, "list_models")[0] == {"models": [], "current": None}
