"""x-transformers with `shift_tokens`: with a KV cache, the shifted features of the token before are zero, because a
layer gets one token and the cache holds keys and values only. `generate` uses the cache, and generates other tokens
than without it. Found by `cache-decode`."""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

for shift in (0, 1):
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=16, rotary_pos_emb=True, shift_tokens=shift, verbose=False)
    model = TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers).eval()
    tokens = torch.randint(64, (1, 16))
    with torch.no_grad():
        full = model(tokens)
        _, cache = model(tokens[:, :15], return_intermediates=True)
        step = model(tokens, cache=cache)
    wrapper = AutoregressiveWrapper(model).eval()
    cached, uncached = (wrapper.generate(tokens, 20, temperature=0.0, cache_kv=use) for use in (True, False))
    print(
        f"shift_tokens={shift}: logits of the last token differ by {(step[:, -1] - full[:, -1]).abs().max():.1e},",
        end="",
    )
    print(f" {(cached != uncached).sum()} of 20 generated tokens differ")
