"""llms-from-scratch: GPT-2 with a KV cache selects columns instead of rows of the causal mask, so a decode step
fails; `generate_text_simple` needs attributes that GPT-2 lacks; and the position counter of the cache also shifts
forward passes without a cache. Found by `cache-decode`, `generation` and `save-load`."""

import torch
from llms_from_scratch.kv_cache.generate import generate_text_simple
from llms_from_scratch.kv_cache.gpt2 import GPTModel
from llms_from_scratch.kv_cache.utils import KVCache

torch.manual_seed(0)
sizes = {"vocab_size": 64, "context_length": 32, "emb_dim": 32, "n_heads": 4, "n_layers": 2}
model = GPTModel({**sizes, "drop_rate": 0.0, "qkv_bias": False}).eval()
tokens, cache = torch.randint(64, (1, 12)), KVCache(n_layers=2)
before = model(tokens)
difference = (model(tokens, use_cache=True, cache=cache) - before).abs().max().item()
print(f"prefill: {difference:.2g} from the uncached logits")
print(f"without a cache, after the prefill: {(model(tokens) - before).abs().max().item():.2g} from those before it")
calls = {"decode step": lambda: model(tokens[:, :1], use_cache=True, cache=cache)}
calls["generate_text_simple"] = lambda: generate_text_simple(model, tokens, 4)
for name, call in calls.items():
    try:
        print(f"{name}: {tuple(call().shape)}")
    except (RuntimeError, AttributeError) as error:
        print(f"{name}: {type(error).__name__}: {error}")
