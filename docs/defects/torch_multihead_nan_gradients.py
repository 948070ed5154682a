"""nn.MultiheadAttention with `need_weights=True` (the default): if a row of the batch is padding only, all gradients
are NaN, also if the loss uses the other rows only. With `need_weights=False` they are finite. Found by `fully-masked-
row`."""

import torch
from torch import nn

for need_weights in (False, True):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [True] * 5])  # the second row is padding only
    out = attention(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0]
    out[0].sum().backward()  # a loss on the first row only
    grad = attention.in_proj_weight.grad
    print(f"need_weights={need_weights}: {grad.isnan().float().mean():.0%} of the gradient of in_proj_weight is NaN")
