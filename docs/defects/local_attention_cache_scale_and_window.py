"""local-attention: with a KV cache, scores are multiplied by 1/sqrt(d_head) also with `qk_rmsnorm`, which needs
`qk_scale`; and with `exact_windowsize=False`, the last token of a bucket attends to its own bucket only, not to the one
before. The control is right. Found by `cache-decode`."""

import torch
from local_attention import LocalTransformer

for changes in ({}, {"qk_rmsnorm": True}, {"exact_windowsize": False}):
    torch.manual_seed(0)
    sizes = {"num_tokens": 64, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
    options = {"local_attn_window_size": 8, "use_dynamic_pos_bias": True, **changes}
    model = LocalTransformer(**sizes, **options, causal=True).eval()
    tokens, steps = torch.randint(64, (1, 32)), []
    with torch.no_grad():
        full = model(tokens)
        _, cache = model(tokens[:, :16], return_cache=True)
        for length in range(17, 33):
            logits, cache = model(tokens[:, :length], cache=cache, return_cache=True)
            steps.append(logits)
    errors = (torch.cat(steps, dim=1) - full[:, 16:]).abs().amax(-1)[0]
    print(f"options {changes}: difference at tokens 16 to 22 {errors[:7].max():.1e}, at token 23 {errors[7]:.1e}")
