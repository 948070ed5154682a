"""x-transformers: a `Decoder` with `orthog_residual`, `attn_orthog_projected_values` (also per head) or
`mv_split_residual` attends to later tokens: the projection flattens all tokens into one vector, and the mean is over
all tokens. Expected: statistics of each token, or of the tokens before it. Found by `causality`."""

import torch
from x_transformers import Decoder, TransformerWrapper

names = (
    "orthog_residual",
    "attn_orthog_projected_values",
    "attn_orthog_projected_values_per_head",
    "mv_split_residual",
)
for name in ("gate_residual", *names):
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=16, rotary_pos_emb=True, verbose=False, **{name: True})
    model = TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers).eval()
    tokens = torch.randint(64, (1, 16))
    other = torch.cat([tokens[:, :15], (tokens[:, 15:] + 1) % 64], dim=1)
    with torch.no_grad():
        change = (model(tokens) - model(other))[:, :15].abs().max()
    print(f"{name}: the last token changes earlier logits by {change:.1e}")
