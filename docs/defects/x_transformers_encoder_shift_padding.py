"""x-transformers: an `Encoder` with `shift_tokens` mixes the features of padding into the last token, because the mask
is passed to attention layers but not to feed-forward layers, which shift too. Expected: zeros, as `ShiftTokens` does
with a mask. Found by `right-padding` and `padding-leak`."""

import torch
from x_transformers import Encoder, TransformerWrapper

for name, shift in {"none": 0, "in attention layers": (1, 0, 1, 0), "in all layers": 1}.items():
    torch.manual_seed(0)
    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=16, shift_tokens=shift)
    model = TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers).eval()
    tokens, mask = torch.randint(64, (1, 16)), torch.arange(16)[None] < 12
    with torch.no_grad():
        first, second = (model(tokens.masked_fill(~mask, pad), mask=mask)[mask] for pad in (0, 1))
    print(f"shift {name}: the padding token changes the logits by {(first - second).abs().max():.1e}")
