"""Seeded bugs in small random transformers models."""

from typing import Any

import torch
import transformers
from support.seeded_bugs.config_and_weights import NO_SPECIAL_TOKENS, SMALL_CONFIG
from support.seeded_bugs.registry import seeded_bug


@seeded_bug("attention-kernels", also_caught_by=("parity", "cache-unused-slots"))
def falcon_alibi_added_twice() -> Any:
    """Falcon has one class per attention implementation, so the model is rebuilt for the other one."""
    torch.manual_seed(0)
    config = transformers.FalconConfig(**SMALL_CONFIG, **NO_SPECIAL_TOKENS, alibi=True, initializer_range=0.2)
    return transformers.FalconForCausalLM._from_config(config, attn_implementation="eager").eval(), {}


@seeded_bug("loss-reduction")
def t5_labels_not_shifted() -> Any:
    """decoder_input_ids are the labels themselves instead of the shifted labels."""
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config).eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.2)
    model._shift_right = lambda labels: labels
    return model, {}


@seeded_bug("left-padding", also_caught_by=("generation", "position-encoding"))
def opt_positions_count_padding() -> Any:
    """The position embedding ignores the mask from which it should derive positions."""
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        **SMALL_CONFIG, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64, init_std=0.2
    )
    model = transformers.OPTForCausalLM(config).eval()
    embedding = model.model.decoder.embed_positions
    original = embedding.forward
    embedding.forward = lambda attention_mask, past_key_values_length=0, position_ids=None: original(
        torch.ones_like(attention_mask), past_key_values_length, None
    )
    return model, {}


@seeded_bug("unused-parameters", also_caught_by=("parity", "save-load"))
def shared_experts_unused() -> Any:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

    torch.manual_seed(0)
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    }
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = transformers.DeepseekV3Config(
        **SMALL_CONFIG,
        **NO_SPECIAL_TOKENS,
        **experts,
        **heads,
        num_key_value_heads=4,
        intermediate_size=48,
        moe_intermediate_size=16,
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    for name, module in model.named_modules():
        if name.endswith("shared_experts"):
            assert isinstance(module, DeepseekV3MLP)
            module.forward = torch.zeros_like
    return model, {}
