"""x-transformers with `attn_data_dependent_alibi`: with a KV cache, the bias of a decode step is computed from the new
token alone, so no earlier token is forgotten; a step with several tokens raises an error. `generate` uses the cache,
and generates other tokens than without it. Found by `cache-decode`."""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

for name in ("alibi_pos_bias", "attn_data_dependent_alibi"):
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=16, disable_abs_pos_emb=True, **{name: True})
    model = TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers).eval()
    for module in model.modules():
        if hasattr(module, "to_forget_gates"):
            torch.nn.init.zeros_(module.to_forget_gates[0].bias)  # initially 5: almost nothing is forgotten
    tokens = torch.randint(64, (1, 16))
    with torch.no_grad():
        full = model(tokens)
        _, cache = model(tokens[:, :15], return_intermediates=True)
        step = model(tokens, cache=cache)
    wrapper = AutoregressiveWrapper(model).eval()
    cached, uncached = (wrapper.generate(tokens, 20, temperature=0.0, cache_kv=use) for use in (True, False))
    print(f"{name}: logits of the last token differ by {(step[:, -1] - full[:, -1]).abs().max():.1e},", end="")
    print(f" {(cached != uncached).sum()} of 20 generated tokens differ")
