"""x-transformers with `tie_embedding`: the output layer is a lambda that keeps the model it was made for, so a deep
copy (an average of the weights, a reference model) computes its logits with the embeddings of the original model.
An untied model is copied. Found by reading the code."""

import copy

import torch
from x_transformers import Decoder, TransformerWrapper

for tied in (False, True):
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=16)
    model = TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers, tie_embedding=tied).eval()
    tokens, reference = torch.randint(64, (1, 16)), copy.deepcopy(model)
    with torch.no_grad():
        before = reference(tokens)
        for parameter in model.parameters():  # train the model
            parameter.mul_(1.5)
        change = (reference(tokens) - before).abs().max()
    print(f"tie_embedding={tied}: training the model changes the logits of its copy by {change:.1e}")
