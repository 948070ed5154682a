"""local-attention: with a KV cache, the keys are cached after their rotation, and rotated again in each step, so from
the second step on the logits are wrong. `LocalTransformer.generate` uses the cache by default. The dynamic position
bias is right. Expected: unrotated keys in the cache. Found by `cache-decode`."""

import torch
from local_attention import LocalTransformer

for dynamic in (True, False):
    torch.manual_seed(0)
    sizes = {"num_tokens": 64, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
    model = LocalTransformer(**sizes, local_attn_window_size=8, causal=True, use_dynamic_pos_bias=dynamic).eval()
    tokens, steps = torch.randint(64, (1, 32)), []
    with torch.no_grad():
        full = model(tokens)
        _, cache = model(tokens[:, :16], return_cache=True)
        for length in range(17, 33):
            logits, cache = model(tokens[:, :length], cache=cache, return_cache=True)
            steps.append(logits)
    errors = (torch.cat(steps, dim=1) - full[:, 16:]).abs().amax(-1)[0]
    name = "dynamic position bias" if dynamic else "rotary"
    print(f"{name}: difference at the first step {errors[0]:.1e}, the second {errors[1]:.1e}, later {errors.max():.1e}")
