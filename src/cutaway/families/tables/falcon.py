"""Falcon, in three layouts: 7b, 40b (`new_decoder_architecture`) and rw. https://arxiv.org/abs/2311.16867"""

from dataclasses import replace

from cutaway.config import Config
from cutaway.families.config_fields import Custom, HFConfigReader, Key, SupportedValues, activation, flag, four_times
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField, resolve_head_dim
from cutaway.families.tables import llama
from cutaway.families.tables.gpt_neox import MEGATRON_KEYS, megatron_weights
from cutaway.families.weight_conversion import WeightMapping

LAYOUT_KEYS = ("new_decoder_architecture", "parallel_attn", "num_ln_in_parallel_attn", "multi_query", "num_kv_heads")


def _get_bool(hf_config: HFConfigReader, key: str, default: bool) -> bool:
    value = hf_config.get(key)
    return default if value is None else bool(value)


def _read_layout(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read the block layout, and whether the positions are ALiBi.

    Layouts: 40b (GQA, parallel, one or two norms), 7b (MQA, parallel, one norm), rw (MHA, sequential).
    """
    new_architecture = _get_bool(hf_config, "new_decoder_architecture", False)
    two_norms = new_architecture and hf_config.get("num_ln_in_parallel_attn") in (None, 2)
    parallel = new_architecture or _get_bool(hf_config, "parallel_attn", True)
    placement = {"kind": "parallel", "norms": "two" if two_norms else "one"} if parallel else {"kind": "pre"}
    tree.set("decoder.placement", placement)
    kv_heads = 1 if _get_bool(hf_config, "multi_query", True) else None
    tree.set(f"{llama.ATTENTION}.kv_heads", hf_config.get("num_kv_heads") if new_architecture else kv_heads)
    if _get_bool(hf_config, "alibi", False):
        scale = resolve_head_dim(tree, "decoder") ** -0.5
        tree.set(f"{llama.ATTENTION}.position", {"kind": "alibi", "scale": scale, "round_to_bf16": True})


def _write_layout(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    heads, kv_heads = tree.get(f"{llama.ATTENTION}.heads"), tree.get(f"{llama.ATTENTION}.kv_heads")
    placement = tree.get("decoder.placement")
    two_norms = placement.get("norms") == "two"
    new_architecture = two_norms or (placement["kind"] == "parallel" and 1 < kv_heads < heads)
    hf_config["new_decoder_architecture"] = new_architecture
    hf_config["multi_query"] = new_architecture or kv_heads == 1
    hf_config["parallel_attn"] = placement["kind"] == "parallel"
    hf_config["num_ln_in_parallel_attn"] = (2 if two_norms else 1) if new_architecture else None
    hf_config["num_kv_heads"] = kv_heads if new_architecture else heads
    hf_config["alibi"] = tree.get(f"{llama.ATTENTION}.position.kind") == "alibi"


def _is_parallel(config: Config) -> bool:
    return config.stacks["decoder"].placement.kind == "parallel"


def _is_sequential(config: Config) -> bool:
    return not _is_parallel(config)


FAMILY = Family(
    name="falcon",
    architecture="FalconForCausalLM",
    template=llama.build_template(ffn={"kind": "mlp"}, norm=llama.LAYERNORM),
    fields=(
        *llama.size_fields(65024, 4544, None, 32, 2048, tie_word_embeddings=True),
        Key("num_attention_heads", f"{llama.ATTENTION}.heads", 71),
        Key("ffn_hidden_size", f"{llama.FFN}.hidden", four_times("hidden_size", 4544)),
        activation("activation", f"{llama.FFN}.activation", "gelu"),
        flag("bias", f"{llama.ATTENTION}.bias", False, on=llama.QKVO, off=()),
        flag("bias", f"{llama.FFN}.bias", False),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        Custom((*LAYOUT_KEYS, "alibi"), _read_layout, _write_layout),
        RopeField(full_rotary_only=True),
        SupportedValues("hidden_dropout", (0.0, None), "in training, attention and FFN would share one dropout mask"),
        SupportedValues("attention_dropout", (0.0, None), "in training, the layout determines where it is applied"),
        SupportedValues(
            "apply_residual_connection_post_layernorm", (False,), "the residual would be taken after the norm"
        ),
    ),
    weight_mappings=llama.weights(
        WeightMapping("input_layernorm", "norm"),
        *(replace(mapping, condition=_is_sequential) for mapping in llama.NORM_WEIGHTS),
        WeightMapping("ln_attn", "attn.norm_in", condition=_is_parallel),
        WeightMapping("ln_mlp", "ffn.norm_in", condition=_is_parallel),
        *megatron_weights("self_attention"),
        **MEGATRON_KEYS,
    ),
    base_model_prefix="transformer.",
    attribute_map={"n_embed": "hidden_size"},
    ignored_weights={
        r"transformer\.(h\.\d+\.self_attention\.)?(maybe_rotary|rotary_emb)\.inv_freq": "RoPE frequencies",
        **llama.IGNORED_CLASSIFIER_WEIGHTS,
    },
)
