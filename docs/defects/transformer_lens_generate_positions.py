"""TransformerLens' `generate` gives new tokens wrong positions if the model has learned positions, no tokenizer and a
KV cache (the default): it numbers all tokens from the length of the cache on, so that the last one of n tokens has
position 2 (n - 1). Beyond half of n_ctx, it raises. Found by `generation`."""

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 64, "d_head": 8, "n_heads": 4, "d_mlp": 64, "d_vocab": 50}
for positions in ("rotary", "standard"):
    config = HookedTransformerConfig(
        **sizes, act_fn="gelu", device="cpu", seed=0, positional_embedding_type=positions, initializer_range=0.5
    )
    model = HookedTransformer(config)
    options = {"stop_at_eos": False, "do_sample": False, "return_type": "tokens", "verbose": False}
    for use_cache in (False, True):
        found = model.generate(torch.arange(10)[None], 8, use_past_kv_cache=use_cache, **options)[0, 10:]
        print(f"{positions}, use_past_kv_cache={use_cache}: {found.tolist()}")
