"""litgpt's ring-buffer cache for sliding windows: a prompt longer than the window raises an error, which recommends
chunks of at most the window. But from the second chunk on, a token attends to later tokens of its chunk, and keys in
its window are already overwritten. Found by `causality-paths` and `cache-decode`."""

import torch
from litgpt import GPT, Config

torch.manual_seed(0)
sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "head_size": 8, "n_query_groups": 1, "intermediate_size": 64}
window = {"sliding_window_size": 8, "sliding_window_indices": [1, 0], "rope_indices": [1, 0]}
model = GPT(Config.from_name("Gemma-3-1b-it", **sizes, **window, block_size=32, padded_vocab_size=64)).eval()
tokens = torch.randint(64, (1, 16))
with torch.no_grad():
    full = model(tokens)
    for size in (1, 4, 8):
        model.set_kv_cache(batch_size=1)
        positions = torch.arange(16).split(size)
        logits = torch.cat([model(tokens[:, where], where) for where in positions], dim=1)
        print(f"chunks of {size}: largest difference from the uncached logits {(logits - full).abs().max().item():.2g}")
