"""litgpt's models with attention softcapping (Gemma-2) add the boolean mask of the KV cache to the scores, which adds
1 to visible positions and 0 to the others: a prefill with a cache attends to later tokens. Found by `causality-
paths`."""

import torch
from litgpt import GPT, Config

sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": 2, "head_size": 8, "intermediate_size": 64}
for name in ("Llama-3.1-8B", "Gemma-2-2b"):
    torch.manual_seed(0)
    config = Config.from_name(name, **sizes, block_size=32, padded_vocab_size=64, sliding_window_size=None)
    model = GPT(config).eval()
    model.set_kv_cache(batch_size=1)
    tokens = torch.randint(64, (1, 12))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 64  # only the last token differs
    with torch.no_grad():
        cached = model(tokens, torch.arange(12))
        effect = (model(changed, torch.arange(12)) - cached)[:, :-1].abs().max().item()
        difference = (cached - model(tokens)).abs().max().item()
    print(
        f"{name}: the last token changes earlier logits by {effect:.2g}; cached and uncached differ by {difference:.2g}"
    )
