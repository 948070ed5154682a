"""Command R7B and Command A: three sliding-window layers with RoPE, then a full-attention layer without RoPE. https://arxiv.org/abs/2504.00698"""

from cutaway.families import config_fields
from cutaway.families.config_fields import Custom, HFConfigReader, Key, LayerTypes, SupportedValues
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.tables.cohere import BLOCK_WEIGHTS, COMMON_FIELDS, TEMPLATE

PERIOD_KEY = "sliding_window_pattern"
LAYER_TYPES = config_fields.full_attention_every(4, PERIOD_KEY)
UNREAD_KEYS = {
    "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
}
"""Keys that transformers does not read → their usual value."""
UNREAD_KEY_REASON = "transformers ignores this key and builds the model as for the usual value"


def _read_nope_layers(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Remove the position encoding of full-attention layers (NoPE). No key stores this: `layer_types` determines it."""
    for block in tree.blocks("decoder"):
        if block["attention"]["window"] is None:
            block["attention"]["position"] = {"kind": "none"}


FAMILY = llama.build_family(
    "cohere2",
    "Cohere2ForCausalLM",
    TEMPLATE,
    fields=(
        *COMMON_FIELDS,
        Key("num_attention_heads", f"{llama.ATTENTION}.heads", 64),
        Key("num_key_value_heads", f"{llama.ATTENTION}.kv_heads", None),
        LayerTypes(LAYER_TYPES, default_window=4096, extra_keys=(PERIOD_KEY,)),
        Custom((), _read_nope_layers),
        RopeField(layout="interleaved", default_max_positions=8192, full_rotary_only=True),
        *(SupportedValues(key, (value, None), UNREAD_KEY_REASON) for key, value in UNREAD_KEYS.items()),
    ),
    weight_mappings=llama.weights(*BLOCK_WEIGHTS),
    ignored_config_keys={
        "head_dim": "always hidden_size / num_attention_heads",
        "cache_implementation": "generation setting",
        "use_embedding_sharing": "tie_word_embeddings is used instead",
        "use_parallel_embedding": "sharding of the embedding over devices",
    },
)
