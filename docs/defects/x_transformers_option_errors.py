"""x-transformers: these pairs of options raise errors: shapes use the number of query heads instead of kv heads, count
memory keys twice, or take the latent instead of the input. Each option works alone. `attn_sparse_topk` fails for texts
shorter than k, such as the first steps of generation. Found before the checks, as the models do not run."""

import torch
from x_transformers import Decoder, TransformerWrapper

latent = {"attn_use_latent_q": True, "attn_dim_latent_q": 16, "attn_use_latent_kv": True, "attn_dim_latent_kv": 16}
heads, memory = {"attn_kv_heads": 2}, {"attn_num_mem_kv": 2}
for option, other, length in (
    ({"attn_value_rmsnorm": True}, heads, 16),
    ({"add_value_residual": True}, heads, 16),
    ({"polar_pos_emb": True}, heads, 16),
    ({"attn_use_rel_proj_pos_bias": True}, memory, 16),
    ({"add_value_residual": True}, latent, 16),
    ({"attn_sparse_topk": 8}, {}, 7),
):
    for changes, tokens in (({}, torch.zeros(1, 16).long()), (other, torch.zeros(1, length).long())):
        layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=16, **option, **changes)
        try:
            result = str(tuple(TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers)(tokens).shape))
        except RuntimeError as error:
            result = f"RuntimeError: {str(error)[:60]}"
        print(f"{', '.join([*option, *changes])}, {tokens.shape[1]} tokens: {result}")
