"""x-transformers: for prompts of different lengths, `generate` pads on the left and passes `seq_start_pos`. It is wrong
with memory tokens (padding stays visible, memory tokens are masked), shifted tokens (padding is shifted into the text),
selective attention (the first token loses its protection) and memory keys with RoPE (positions count the padding).
Found by `left-padding`, `padding-leak` and `generation`."""

import torch
from x_transformers import Decoder, TransformerWrapper

options = {"memory tokens": {}, "shift_tokens": {"shift_tokens": 1}, "attn_selective": {"attn_selective": True}}
for name, changes in {"none": {}, **options, "attn_num_mem_kv": {"attn_num_mem_kv": 2}}.items():
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=16, rotary_pos_emb=True, verbose=False, **changes)
    memories = 2 if name == "memory tokens" else None
    model = TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers, num_memory_tokens=memories).eval()
    tokens = torch.randint(64, (1, 12))
    with torch.no_grad():
        rows = [torch.cat([torch.full((1, 4), pad), tokens], dim=1) for pad in (0, 1)]
        first, second = (model(row, seq_start_pos=torch.tensor([4]))[:, 4:] for row in rows)
        alone = model(tokens)
    print(f"option {name}: padding changes the logits by {(first - alone).abs().max():.1e}", end="")
    print(f", another padding token by {(first - second).abs().max():.1e}")
