"""linear-attention-transformer: `attend_axially` with `use_rotary_emb` raises an error: the layer folds the text into
columns, but gets the positions of the whole text. Learned positions work. Found before the checks, as the model does
not run."""

import torch
from linear_attention_transformer import LinearAttentionTransformerLM

for rotary in (False, True):
    sizes = {"num_tokens": 64, "dim": 32, "depth": 2, "max_seq_len": 64, "heads": 4, "dim_head": 8}
    options = {"local_attn_window_size": 8, "attend_axially": True, "use_axial_pos_emb": False}
    model = LinearAttentionTransformerLM(**sizes, **options, use_rotary_emb=rotary)
    for length in (8, 16):
        try:
            result = str(tuple(model(torch.zeros(1, length).long()).shape))
        except RuntimeError as error:
            result = f"RuntimeError: {str(error)[:60]}"
        print(f"use_rotary_emb={rotary}, {length} tokens: {result}")
