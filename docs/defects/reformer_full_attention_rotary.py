"""reformer-pytorch: full attention (`use_full_attn`, or texts up to `full_attn_thres`) ignores the rotary positions,
which are the default, so a bidirectional model has no positions at all. Learned positions are used. Expected: the
rotation of LSH attention. Found by `position-encoding`."""

import torch
from reformer_pytorch import ReformerLM

for name, options in {"learned": {"absolute_position_emb": True}, "rotary (default)": {}}.items():
    torch.manual_seed(0)
    sizes = {"num_tokens": 64, "dim": 32, "depth": 2, "max_seq_len": 64, "heads": 4, "dim_head": 8, "ff_chunks": 1}
    model = ReformerLM(**sizes, bucket_size=8, use_full_attn=True, **options).eval()
    tokens, order = torch.randint(64, (1, 16)), torch.randperm(16)
    with torch.no_grad():
        change = (model(tokens[:, order]) - model(tokens)[:, order]).abs().max()
    print(f"{name} positions: another order of the tokens changes their logits by {change:.1e}")
