"""nanochat's smear adds the previous token's embedding, but `GPT.forward` omits it for the first token of a chunk of
two or more tokens after cached ones. The attention supports such chunks; `Engine` prefills prompts in one call.
Found by `cache-chunked-prefill`. Run it with a clone of nanochat in PYTHONPATH."""

import torch
from nanochat.engine import KVCache
from nanochat.gpt import GPT, GPTConfig

torch.manual_seed(0)
model = GPT(GPTConfig(sequence_len=64, vocab_size=50, n_layer=2, n_head=4, n_kv_head=4, n_embd=32, window_pattern="L"))
model.init_weights()
for weight in model.parameters():
    weight.data.normal_(0, 0.2)
tokens = torch.arange(12)[None]
for smear in (0.0, 1.0):
    model.smear_lambda.data.fill_(smear)
    full = model(tokens)
    for size in (12, 1, 4):
        cache = KVCache(1, num_heads=4, seq_len=64, head_dim=8, num_layers=2, device="cpu", dtype=torch.float32)
        chunks = torch.cat([model(chunk, kv_cache=cache) for chunk in tokens.split(size, 1)], dim=1)
        print(f"smear_lambda={smear}, chunks of {size}: difference {(chunks - full).abs().max():.0e}")
