"""GPTBigCode (StarCoder, SantaCoder): GPT-2 with multi-query attention. https://arxiv.org/abs/2305.06161"""

from cutaway.families.config_fields import Custom, HFConfigReader, Key, activation
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family, keys_by_reason
from cutaway.families.tables import gpt2, llama
from cutaway.families.tables.llama import ATTENTION
from cutaway.families.weight_conversion import QKV, SplitGroupedQKV, WeightMapping

ACTIVATION = activation("activation_function", f"{llama.FFN}.activation", "gelu_pytorch_tanh")
SIZE_FIELDS = gpt2.common_fields(50257, 768, 12, 12, tie_word_embeddings=True, dropout=0.1)


def _read_kv_heads(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    tree.set(f"{ATTENTION}.kv_heads", 1 if hf_config.get("multi_query", True) else tree.get(f"{ATTENTION}.heads"))


def _write_multi_query(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["multi_query"] = tree.get(f"{ATTENTION}.kv_heads") == 1


def _read_scale(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    is_scaled = hf_config.get("scale_attn_weights", True)
    tree.set(
        f"{ATTENTION}.scale", (tree.data["d_model"] // tree.get(f"{ATTENTION}.heads")) ** -0.5 if is_scaled else 1.0
    )


def _write_scale(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["scale_attn_weights"] = tree.get(f"{ATTENTION}.scale") != 1.0


FAMILY = Family(
    name="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    template=gpt2.build_template({"bias": llama.QKVO}),
    fields=(
        *(ACTIVATION if field.keys == ACTIVATION.keys else field for field in SIZE_FIELDS),
        Key("n_positions", ("decoder.embedding.position.length", "context"), 1024),
        Custom(("multi_query",), _read_kv_heads, _write_multi_query),
        Custom(("scale_attn_weights",), _read_scale, _write_scale),
    ),
    weight_mappings=(
        gpt2.POSITION_WEIGHT,
        *llama.weights(
            *gpt2.NORM_WEIGHTS,
            WeightMapping("attn.c_attn", QKV, SplitGroupedQKV()),
            WeightMapping("attn.c_proj", "attn.f.o"),
            WeightMapping("mlp.c_fc", "ffn.f.up"),
            WeightMapping("mlp.c_proj", "ffn.f.down"),
            **gpt2.CHECKPOINT_KEYS,
        ),
    ),
    base_model_prefix="transformer.",
    attribute_map=gpt2.FAMILY.attribute_map,
    ignored_weights=gpt2.FAMILY.ignored_weights,
    ignored_config_keys=keys_by_reason(
        {
            "computes scores in fp32; no difference in fp32": "attention_softmax_in_fp32"
            " scale_attention_softmax_in_fp32",
            "the same as multi_query": "num_key_value_heads",
            "attention kernel; does not change the result": "inference_runner validate_runner_input"
            " pre_allocate_kv_cache max_sequence_length max_batch_size pad_key_length",
            "classification head, which is not loaded": "summary_activation summary_first_dropout"
            " summary_proj_to_labels summary_type summary_use_proj",
        }
    ),
)
