"""CodeGen: GPT-J with one matrix for queries, values and keys. https://arxiv.org/abs/2203.13474"""

from cutaway.errors import ConfigError
from cutaway.families.config_fields import Custom, HFConfigReader, Key
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.tables import gpt2, gptj, llama
from cutaway.families.weight_conversion import SplitShardedQVK, WeightMapping

NUM_SHARDS = 4
"""The rows of the matrix are grouped by the four TPU cores that trained the model."""


def _check_heads(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    heads = tree.get(f"{llama.ATTENTION}.heads")
    if heads % NUM_SHARDS:
        raise ConfigError(
            f"config.json's 'n_head' is {heads}, not a multiple of {NUM_SHARDS}; this family requires one"
        )


FAMILY = Family(
    name="codegen",
    architecture="CodeGenForCausalLM",
    template=gptj.FAMILY.template,
    fields=(
        *gpt2.common_fields(50400, 4096, 28, 16, tie_word_embeddings=False, dropout=0.0),
        Custom((), _check_heads),
        Key("n_positions", "context", 2048),
        Key("rotary_dim", f"{llama.ATTENTION}.position.rotary_dim", 64),
    ),
    weight_mappings=(
        WeightMapping("lm_head.bias", "head.bias"),
        *llama.weights(
            WeightMapping("ln_1", "norm"),
            WeightMapping("attn.qkv_proj", ("attn.f.q", "attn.f.v", "attn.f.k"), SplitShardedQVK(NUM_SHARDS)),
            WeightMapping("attn.out_proj", "attn.f.o"),
            WeightMapping("mlp.fc_in", "ffn.f.up"),
            WeightMapping("mlp.fc_out", "ffn.f.down"),
            **gpt2.CHECKPOINT_KEYS,
        ),
    ),
    base_model_prefix="transformer.",
    attribute_map=gpt2.FAMILY.attribute_map,
    ignored_weights={
        r"transformer\.h\.\d+\.attn\.causal_mask": "causal mask, computed from positions",
        **gptj.FAMILY.ignored_weights,
    },
    ignored_config_keys={**gptj.FAMILY.ignored_config_keys, "n_ctx": "the same as n_positions"},
)
