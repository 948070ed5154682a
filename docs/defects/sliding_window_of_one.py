"""Sliding window of 1: with a cache every token is kept, so each decode step attends to all earlier tokens, while
without a cache each token attends only to itself. Windows of 2 and more agree. Found by `cache-decode` (Mistral,
Phi-3 and all models with a rolling cache)."""

import torch
from transformers import MistralConfig, MistralForCausalLM

for window in (1, 2):
    torch.manual_seed(0)
    size = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = MistralForCausalLM(MistralConfig(**size, **heads, sliding_window=window)).eval()
    tokens, past, steps = torch.randint(3, 50, (1, 10)), None, []
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        for token in tokens.split(1, 1):
            out = model(token, past_key_values=past, use_cache=True)
            past, steps = out.past_key_values, [*steps, out.logits]
    apart = (torch.cat(steps, 1) - whole).abs().max()
    print(f"window {window}: cached and uncached logits are {apart:.1e} apart")
