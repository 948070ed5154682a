"""local-attention: a bidirectional text whose length is not a multiple of the window is padded with zero keys that
every token of the last buckets attends to, unless a mask is passed, so the logits differ from those with a mask of
ones. Expected: padding that the layer adds is masked. Found by `right-padding`."""

import torch
from local_attention import LocalTransformer

torch.manual_seed(0)
sizes = {"num_tokens": 64, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
model = LocalTransformer(**sizes, local_attn_window_size=8, causal=False).eval()
for length in (16, 13):
    tokens = torch.randint(64, (1, length))
    with torch.no_grad():
        change = (model(tokens) - model(tokens, mask=torch.ones_like(tokens).bool())).abs().max()
    print(f"{length} tokens: logits without a mask and with a mask of ones differ by {change:.1e}")
