"""x-transformers: `attn_max_attend_past` of a decoder is also used for cross-attention, where it aligns the end of the
source with the end of the target. So the visible source tokens depend on the length of the target, and the first
logits change when more tokens follow. Expected: a window of the self-attention only. Found by `causality`."""

import torch
from x_transformers import XTransformer

sizes = {"num_tokens": 64, "max_seq_len": 64, "depth": 2, "heads": 4, "attn_dim_head": 16}
for window in (None, 8):
    torch.manual_seed(0)
    options = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    model = XTransformer(dim=32, **options, dec_attn_max_attend_past=window).eval()
    source, target = torch.randint(64, (1, 32)), torch.randint(64, (1, 16))
    with torch.no_grad():
        encoded = model.encoder(source, return_embeddings=True)
        alone, followed = (model.decoder.net(target[:, :n], context=encoded)[:, 0] for n in (1, 16))
        print(f"dec_attn_max_attend_past={window}: the first logits change with the length by ", end="")
        print(f"{(alone - followed).abs().max():.1e}")
