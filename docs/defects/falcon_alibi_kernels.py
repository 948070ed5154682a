"""Falcon with ALiBi: eager and SDPA attention give different logits from the same weights, far beyond rounding.
Found by `attention-kernels`."""

import torch
from transformers import FalconConfig, FalconForCausalLM

found = {}
for alibi in (False, True):
    for kernel in ("eager", "sdpa"):
        torch.manual_seed(0)
        size = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}
        model = FalconForCausalLM._from_config(FalconConfig(**size, alibi=alibi), attn_implementation=kernel).eval()
        for weight in model.parameters():
            weight.data.normal_(0, 0.3)
        with torch.no_grad():
            found[kernel] = model(torch.arange(20)[None], use_cache=False).logits
    apart = (found["eager"] - found["sdpa"]).abs().max()
    print(f"alibi={alibi}: eager and SDPA are {apart:.1e} apart")
