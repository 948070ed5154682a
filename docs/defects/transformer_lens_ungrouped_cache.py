"""TransformerLens cannot use a KV cache with `ungroup_grouped_query_attention`: the cache has the kv heads, but the
layers then compute keys and values of all heads. `generate` fails too. Found by `cache-decode`."""

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 64, "d_head": 8, "n_heads": 4, "d_mlp": 64, "d_vocab": 50}
config = HookedTransformerConfig(**sizes, n_key_value_heads=2, act_fn="gelu", device="cpu")
model = HookedTransformer(config)
options = {"stop_at_eos": False, "return_type": "tokens", "verbose": False, "do_sample": False}
for ungrouped in (False, True):
    model.set_ungroup_grouped_query_attention(ungrouped)
    print(f"ungrouped={ungrouped}: logits of shape {tuple(model(torch.arange(10)[None]).shape)}")
    for use_cache in (False, True):
        try:
            result = tuple(model.generate(torch.arange(10)[None], 5, use_past_kv_cache=use_cache, **options).shape)
        except RuntimeError as error:
            result = f"RuntimeError: {error}"
        print(f"ungrouped={ungrouped}, use_past_kv_cache={use_cache}: generated {result}")
