"""torchtune's Gemma-2 computes the sliding window from the row and column numbers of the mask, not from positions.
With a KV cache, the mask of a decode step has one row, so the token attends to the first tokens of the text instead
of the last ones. Found by `cache-decode`."""

import torch
from torchtune.models.gemma2 import gemma2

sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "embed_dim": 32, "intermediate_dim": 64}
for window in (32, 8):
    torch.manual_seed(0)
    model = gemma2(vocab_size=64, max_seq_len=32, sliding_window_size=window, **sizes).eval()
    tokens, mask = torch.randint(64, (1, 24)), torch.ones(1, 32, 32, dtype=torch.bool).tril()
    with torch.no_grad():
        full = model(tokens)
        model.setup_caches(batch_size=1, dtype=torch.float32)
        steps = [model(tokens[:, i : i + 1], mask=mask[:, i : i + 1], input_pos=torch.tensor([[i]])) for i in range(24)]
    error = (torch.cat(steps, dim=1) - full).abs().amax(-1)[0]
    print(
        f"window {window}: difference at tokens 0 to 7 {error[:8].max():.2g}, at tokens 8 to 23 {error[8:].max():.2g}"
    )
