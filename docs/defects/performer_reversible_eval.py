"""performer-pytorch with `reversible=True`: a backward pass in eval mode raises an error, because the random state is
recorded in training mode only but always restored. `reversible=False` works. linear-attention-transformer and
reformer-pytorch have the same code. Found by `causality-gradient`."""

import torch
from performer_pytorch import PerformerLM

sizes = {"num_tokens": 64, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
for reversible in (False, True):
    for training in (True, False):
        model = PerformerLM(**sizes, generalized_attention=True, reversible=reversible).train(training)
        try:
            model(torch.randint(64, (1, 16))).sum().backward()
            result = "gradients"
        except TypeError as error:
            result = f"TypeError: {error}"
        print(f"reversible={reversible}, training={training}: {result}")
