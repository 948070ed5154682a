"""DeepSeek-V3 and R1: latent attention, a few dense layers, then many small experts. https://arxiv.org/abs/2412.19437"""

import math
from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.family import Family
from cutaway.families.fields import Custom, Key, Only, Theirs, activation, flag
from cutaway.families.mixed import Where
from cutaway.families.rope import Rope, yarn_mscale
from cutaway.families.rows import Row, Stacked
from cutaway.families.tables.llama import BESIDE, ENDS, FFN, NORMS, layer
from cutaway.families.tables.mistral import template
from cutaway.families.tree import Tree

AT, MOE = "decoder.block.attention", "decoder.block.ffn"
ATTENTION = {"kind": "latent", "norm": {"kind": "rmsnorm", "eps": 1e-6}}
EXPERTS = {
    "kind": "moe",
    "router": {"score": "sigmoid", "selection_bias": True},
    "expert": {"kind": "gated"},
    "shared": {"kind": "gated"},
}


class LoudRope(Rope):
    """YaRN's `mscale_all_dim` makes all scores louder, not those alone that turn: it goes into their scale."""

    def read(self, theirs: Theirs, ours: Tree) -> None:
        super().read(theirs, ours)
        table = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
        for block in ours.blocks("decoder"):
            at, factor = block["attention"], block["attention"]["position"]["scaling"].get("factor", 1.0)
            loud = yarn_mscale(factor, table.get("mscale_all_dim") or 0.0)
            at["scale"] = (at["d_nope"] + at["d_rope"]) ** -0.5 * loud * loud

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        super().write(ours, theirs)
        at = ours.blocks("decoder")[0]["attention"]
        loud = math.sqrt(ours.get(f"{AT}.scale") * (at["d_nope"] + at["d_rope"]) ** 0.5)
        factor = at["position"]["scaling"].get("factor", 1.0)
        if factor > 1 and not math.isclose(loud, 1.0):
            theirs["rope_parameters"]["mscale_all_dim"] = round((loud - 1) / (0.1 * math.log(factor)), 10)


def read_heads(theirs: Theirs, ours: Tree) -> None:
    """Every head has a key of its own."""
    if theirs.get("num_key_value_heads") not in (None, ours.get(f"{AT}.heads")):
        raise ConfigError("'num_key_value_heads' is not 'num_attention_heads', and latent attention shares no heads")


def write_heads(ours: Tree, theirs: dict[str, Any]) -> None:
    theirs["num_key_value_heads"] = ours.get(f"{AT}.heads")


def read_dense(theirs: Theirs, ours: Tree) -> None:
    """The first layers have no experts."""
    for block in ours.blocks("decoder")[: theirs.number("first_k_dense_replace", 3)]:
        block["ffn"] = {"kind": "gated"}


def write_dense(ours: Tree, theirs: dict[str, Any]) -> None:
    theirs["first_k_dense_replace"] = sum(block["ffn"]["kind"] != "moe" for block in ours.blocks("decoder"))


def read_shared(theirs: Theirs, ours: Tree) -> None:
    """Shared experts are one network as wide as all of them."""
    wide = theirs.number("n_shared_experts", 1) * theirs.number("moe_intermediate_size", 2048)
    ours.set(f"{MOE}.shared.hidden", wide)


def write_shared(ours: Tree, theirs: dict[str, Any]) -> None:
    theirs["n_shared_experts"] = ours.get(f"{MOE}.shared.hidden") // ours.get(f"{MOE}.expert.hidden")


def read_groups(theirs: Theirs, ours: Tree) -> None:
    """One group of all experts is no grouping."""
    count, keep = theirs.number("n_group", 8), theirs.number("topk_group", 4)
    groups = {"count": count, "keep": keep, "score": "top2"}
    ours.set(f"{MOE}.router.groups", None if count == 1 else groups)


def write_groups(ours: Tree, theirs: dict[str, Any]) -> None:
    groups = ours.get(f"{MOE}.router.groups") or {"count": 1, "keep": 1}
    theirs["n_group"], theirs["topk_group"] = groups["count"], groups["keep"]


FAMILY = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    template=template(ATTENTION, EXPERTS),
    fields=(
        Key("vocab_size", "vocab_size", 129280),
        Key("hidden_size", "d_model", 7168),
        Key("num_hidden_layers", "decoder.layers", 61),
        Key("max_position_embeddings", "context", 4096),
        flag("tie_word_embeddings", "head.tied", False),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        Key("num_attention_heads", f"{AT}.heads", 128),
        Custom(("num_key_value_heads",), read_heads, write_heads),
        Key("q_lora_rank", f"{AT}.q_rank", 1536),
        Key("kv_lora_rank", f"{AT}.kv_rank", 512),
        Key("qk_nope_head_dim", f"{AT}.d_nope", 128),
        Key("qk_rope_head_dim", f"{AT}.d_rope", 64),
        Key("v_head_dim", f"{AT}.d_value", 128),
        flag("attention_bias", f"{AT}.bias", False),
        Key("attention_dropout", f"{AT}.dropout", 0.0),
        LoudRope(length_default=4096, whole=True),
        flag("rope_interleave", f"{AT}.position.layout", True, on="interleaved", off="half"),
        Custom(("first_k_dense_replace",), read_dense, write_dense),
        Where(
            "moe",
            (
                Key("moe_intermediate_size", f"{MOE}.expert.hidden", 2048),
                Custom(("n_shared_experts",), read_shared, write_shared),
                activation("hidden_act", (f"{MOE}.expert.activation", f"{MOE}.shared.activation"), "silu"),
                Key("n_routed_experts", f"{MOE}.experts", 256),
                Key("num_experts_per_tok", f"{MOE}.router.top_k", 8),
                flag("norm_topk_prob", f"{MOE}.router.renormalise", True),
                Key("routed_scaling_factor", f"{MOE}.router.scale", 2.5),
                Custom(("n_group", "topk_group"), read_groups, write_groups),
            ),
        ),
        Where(
            "gated",
            (
                Key("intermediate_size", f"{MOE}.hidden", 18432),
                activation("hidden_act", f"{MOE}.activation", "silu"),
            ),
        ),
        Only("topk_method", ("noaux_tc",), "its router chooses with a balance term"),
        Only("scoring_func", ("sigmoid",), "its router scores by sigmoid"),
        Only("moe_layer_freq", (1,), "every layer after the first few has experts"),
    ),
    rows=(
        *ENDS,
        *layer(
            *NORMS,
            Row("self_attn.q_proj", "attn.f.q"),
            Row("self_attn.q_a_proj", "attn.f.q.0"),
            Row("self_attn.q_a_layernorm", "attn.f.q.1"),
            Row("self_attn.q_b_proj", "attn.f.q.2"),
            Row("self_attn.kv_a_proj_with_mqa", "attn.f.kv_down"),
            Row("self_attn.kv_a_layernorm", "attn.f.kv_norm"),
            Row("self_attn.kv_b_proj", "attn.f.kv_up"),
            Row("self_attn.o_proj", "attn.f.o"),
            *FFN,
            Row("mlp.gate", "ffn.f.router"),
            Row("mlp.gate.e_score_correction_bias", "ffn.f.router.selection_bias"),
            *(Row(f"mlp.experts.{{e}}.{p}_proj", f"ffn.f.experts.{p}", Stacked()) for p in ("gate", "up", "down")),
            *(Row(f"mlp.shared_experts.{p}_proj", f"ffn.f.shared.{p}") for p in ("gate", "up", "down")),
        ),
    ),
    prefix="model.",
    ignored=BESIDE
    | {r"model\.layers\.{past}\..*": "a layer past the last, which guesses one token further; not loaded"},
    aliases={"num_local_experts": "n_routed_experts"},
    harmless={
        "head_dim": "worked out from the parts of a head",
        "qk_head_dim": "worked out from the parts of a head",
        "num_mtp_layers": "layers past the last, which guess further tokens; not loaded",
        "num_nextn_predict_layers": "layers past the last, which guess further tokens; not loaded",
        "ep_size": "how experts were spread over devices",
        "aux_loss_alpha": "the weight of a loss in training",
        "seq_aux": "a loss in training",
    },
)
