"""BioGPT: GPT with learned positions and a scaled embedding. https://arxiv.org/abs/2210.10341"""

from cutaway.families.config_fields import Custom, HFConfigReader, Key, SupportedValues, activation, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.tables import llama
from cutaway.families.weight_conversion import WeightMapping

LAYER_WEIGHTS = (
    WeightMapping("self_attn_layer_norm", "attn.norm_in"),
    WeightMapping("final_layer_norm", "ffn.norm_in"),
    *llama.ATTENTION_WEIGHTS[:3],
    WeightMapping("self_attn.out_proj", "attn.f.o"),
    WeightMapping("fc1", "ffn.f.up"),
    WeightMapping("fc2", "ffn.f.down"),
)


def _read_embedding_scale(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    tree.set("decoder.embedding.scale", "sqrt_d_model" if hf_config.get("scale_embedding", True) else 1.0)


def _write_embedding_scale(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["scale_embedding"] = tree.get("decoder.embedding.scale") != 1.0


SCALE_EMBEDDING = Custom(("scale_embedding",), _read_embedding_scale, _write_embedding_scale)
LAYERDROP = SupportedValues("layerdrop", (0.0,), "LayerDrop would skip layers in training")

FAMILY = llama.build_family(
    "biogpt",
    "BioGptForCausalLM",
    llama.build_template(
        {"bias": llama.QKVO, "position": {"kind": "none"}},
        {"kind": "mlp"},
        norm=llama.LAYERNORM,
        embedding={"position": {"kind": "learned", "offset": 2}},
    ),
    fields=(
        Key("vocab_size", "vocab_size", 42384),
        Key("hidden_size", "d_model", 1024),
        Key("num_hidden_layers", "decoder.layers", 24),
        Key("num_attention_heads", f"{llama.ATTENTION}.heads", 16),
        Key("intermediate_size", f"{llama.FFN}.hidden", 4096),
        activation("hidden_act", f"{llama.FFN}.activation", "gelu"),
        Key("max_position_embeddings", ("decoder.embedding.position.length", "context"), 1024),
        Key("hidden_dropout_prob", ("decoder.dropout", "decoder.embedding.dropout"), 0.1),
        Key("attention_probs_dropout_prob", f"{llama.ATTENTION}.dropout", 0.1),
        Key("activation_dropout", f"{llama.FFN}.dropout", 0.0),
        SCALE_EMBEDDING,
        LAYERDROP,
        flag("tie_word_embeddings", "head.tied", True),
    ),
    weight_mappings=(
        WeightMapping("biogpt.embed_positions", "decoder.embed.position.table"),
        *llama.weights(
            *LAYER_WEIGHTS,
            embed="biogpt.embed_tokens",
            norm="biogpt.layer_norm",
            head="output_projection",
            layer="biogpt.layers",
        ),
    ),
    ignored_config_keys={"layer_norm_eps": "transformers ignores this key: eps is 1e-5"},
)
