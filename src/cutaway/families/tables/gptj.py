"""GPT-J: parallel attention and FFN, interleaved RoPE. https://github.com/kingoflolz/mesh-transformer-jax"""

from cutaway.families.config_fields import Key
from cutaway.families.family import Family
from cutaway.families.tables import gpt2, llama
from cutaway.families.weight_conversion import WeightMapping

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
        *gpt2.common_fields(50400, 4096, 28, 16, tie_word_embeddings=False, dropout=0.0),
        Key("n_positions", "context", 2048),
        Key("rotary_dim", f"{llama.ATTENTION}.position.rotary_dim", 64),
    ),
    weight_mappings=(
        WeightMapping("lm_head.bias", "head.bias"),
        *llama.weights(
            WeightMapping("ln_1", "norm"),
            *(WeightMapping(f"attn.{p}_proj", f"attn.f.{p}") for p in "qkv"),
            WeightMapping("attn.out_proj", "attn.f.o"),
            WeightMapping("mlp.fc_in", "ffn.f.up"),
            WeightMapping("mlp.fc_out", "ffn.f.down"),
            **gpt2.CHECKPOINT_KEYS,
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
