"""performer-pytorch: the softmax kernel of a causal model subtracts the maximum over all keys of the text, also later
ones, and then adds a constant, so the maximum does not cancel. The ReLU kernel is right. Expected: a stabilizer that
is a constant, or the maximum up to each token. Found by `causality`."""

import torch
from performer_pytorch import PerformerLM

for generalized in (True, False):
    torch.manual_seed(0)
    sizes = {"num_tokens": 64, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
    model = PerformerLM(**sizes, causal=True, generalized_attention=generalized).eval()
    tokens, change = torch.randint(64, (1, 16)), 0.0
    with torch.no_grad():
        for last in range(64):
            other = torch.cat([tokens[:, :15], torch.tensor([[last]])], dim=1)
            change = max(change, (model(tokens) - model(other))[:, :15].abs().max().item())
    print(f"{'ReLU' if generalized else 'softmax'} kernel: the last token changes earlier logits by {change:.1e}")
