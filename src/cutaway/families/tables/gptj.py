"""GPT-J: parallel attention and FFN, interleaved RoPE. https://github.com/kingoflolz/mesh-transformer-jax"""

from cutaway.families.config_fields import Key, activation, flag, four_times
from cutaway.families.family import Family
from cutaway.families.tables import gpt2, llama
from cutaway.families.weight_conversion import WeightMapping, add_prefix

FAMILY = Family(
    name="gptj",
    architecture="GPTJForCausalLM",
    template=llama.build_template(
        {"position": {"kind": "rope", "layout": "interleaved"}},
        {"kind": "mlp"},
        norm=llama.LAYERNORM,
        placement="parallel",
        head={"bias": "learned"},
    ),
    fields=(
        Key("vocab_size", "vocab_size", 50400),
        Key("n_embd", "d_model", 4096),
        Key("n_layer", "decoder.layers", 28),
        Key("n_head", f"{llama.ATTENTION}.heads", 16),
        Key("n_positions", "context", 2048),
        Key("rotary_dim", f"{llama.ATTENTION}.position.rotary_dim", 64),
        Key("n_inner", f"{llama.FFN}.hidden", four_times("n_embd", 4096)),
        activation("activation_function", f"{llama.FFN}.activation", "gelu_new"),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        Key("attn_pdrop", f"{llama.ATTENTION}.dropout", 0.0),
        Key("embd_pdrop", "decoder.embedding.dropout", 0.0),
        Key("resid_pdrop", "decoder.dropout", 0.0),
        flag("tie_word_embeddings", "head.tied", False),
    ),
    weight_mappings=(
        WeightMapping("transformer.wte", "decoder.embed.token"),
        WeightMapping("transformer.ln_f", "decoder.final_norm"),
        WeightMapping("lm_head", "head.matrix"),
        WeightMapping("lm_head.bias", "head.bias"),
        *add_prefix(
            "transformer.h.{i}",
            "decoder.blocks.{i}",
            WeightMapping("ln_1", "norm"),
            *(WeightMapping(f"attn.{p}_proj", f"attn.f.{p}") for p in "qkv"),
            WeightMapping("attn.out_proj", "attn.f.o"),
            WeightMapping("mlp.fc_in", "ffn.f.up"),
            WeightMapping("mlp.fc_out", "ffn.f.down"),
        ),
    ),
    base_model_prefix="transformer.",
    attribute_map=gpt2.FAMILY.attribute_map,
    ignored_weights={
        **gpt2.FAMILY.ignored_weights,
        r"transformer\.h\.\d+\.attn\.embed_positions": "RoPE angles, computed from the configuration",
    },
    ignored_config_keys={
        **gpt2.FAMILY.ignored_config_keys,
        "rotary": "this family always has RoPE",
        "scale_attn_weights": "scores are always scaled",
    },
)
