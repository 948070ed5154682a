"""OPT and Galactica; OPT-350m has post-norm and a factorized embedding. https://arxiv.org/abs/2205.01068"""

from cutaway.errors import ConfigError
from cutaway.families.config_fields import Custom, HFConfigReader, Key, SupportedValues, activation, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.tables import llama
from cutaway.families.weight_conversion import WeightMapping


def _read_norm_placement(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    pre_norm = hf_config.get("do_layer_norm_before", True)
    final_norm = bool(pre_norm and not hf_config.get("_remove_final_layer_norm", False))
    tree.set("decoder.placement", {"kind": "pre" if pre_norm else "post", "final_norm": final_norm})


def _write_norm_placement(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    pre_norm = tree.get("decoder.placement.kind") == "pre"
    hf_config["do_layer_norm_before"] = pre_norm
    hf_config["_remove_final_layer_norm"] = pre_norm and not tree.get("decoder.placement.final_norm")


def _read_embedding_projection(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read the factorized embedding (OPT-350m): projections to d_model after the embedding, back before the logits."""
    width = hf_config.get("word_embed_proj_dim")
    if width in (None, tree.get("d_model")):
        return
    if not tree.get("head.tied"):
        reason = "'word_embed_proj_dim' differs from 'hidden_size', which requires a tied head"
        raise ConfigError(f"{reason}; set 'tie_word_embeddings' to true")
    tree.set("decoder.embedding.factorization", {"width": width, "bias": False, "positions": "after_projection"})
    tree.set("head.transform", {"activation": "identity", "bias": False})


def _write_embedding_projection(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    factorization = tree.get("decoder.embedding.factorization")
    hf_config["word_embed_proj_dim"] = factorization["width"] if factorization else tree.get("d_model")


FAMILY = llama.build_family(
    "opt",
    "OPTForCausalLM",
    llama.build_template(
        {"position": {"kind": "none"}},
        {"kind": "mlp"},
        norm=llama.LAYERNORM,
        embedding={"position": {"kind": "learned", "offset": 2}},
    ),
    fields=(
        Key("vocab_size", "vocab_size", 50272),
        Key("hidden_size", "d_model", 768),
        Key("num_hidden_layers", "decoder.layers", 12),
        Key("num_attention_heads", f"{llama.ATTENTION}.heads", 12),
        Key("ffn_dim", f"{llama.FFN}.hidden", 3072),
        Key("max_position_embeddings", ("decoder.embedding.position.length", "context"), 2048),
        activation("activation_function", f"{llama.FFN}.activation", "relu"),
        flag("enable_bias", f"{llama.ATTENTION}.bias", True, on=llama.QKVO, off=()),
        flag("enable_bias", f"{llama.FFN}.bias", True),
        flag("layer_norm_elementwise_affine", ("decoder.norm.gain", "decoder.norm.bias"), True),
        Key("dropout", "decoder.dropout", 0.1),
        llama.ATTENTION_DROPOUT,
        SupportedValues("layerdrop", (0.0,), "LayerDrop would skip layers in training"),
        flag("tie_word_embeddings", "head.tied", True),
        Custom(("do_layer_norm_before", "_remove_final_layer_norm"), _read_norm_placement, _write_norm_placement),
        Custom(("word_embed_proj_dim",), _read_embedding_projection, _write_embedding_projection),
    ),
    weight_mappings=(
        WeightMapping("model.decoder.embed_positions", "decoder.embed.position.table"),
        WeightMapping("model.decoder.project_in", "decoder.embed.project"),
        WeightMapping("model.decoder.project_out", "head.transform.dense"),
        *llama.weights(
            *(WeightMapping("self_attn_layer_norm", norm) for norm in ("attn.norm_in", "norm_after_attn")),
            *(WeightMapping("final_layer_norm", norm) for norm in ("ffn.norm_in", "norm_after_ffn")),
            *llama.ATTENTION_WEIGHTS[:3],
            WeightMapping("self_attn.out_proj", "attn.f.o"),
            WeightMapping("fc1", "ffn.f.up"),
            WeightMapping("fc2", "ffn.f.down"),
            embed="model.decoder.embed_tokens",
            norm="model.decoder.final_layer_norm",
            layer="model.decoder.layers",
        ),
    ),
    ignored_weights={r"model\.decoder\.version": "version of a legacy file layout", **llama.IGNORED_CLASSIFIER_WEIGHTS},
    ignored_config_keys={
        "init_std": "initialization; weights are loaded",
        "activation_dropout": "unused, also in training",
    },
)
