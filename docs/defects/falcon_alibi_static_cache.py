"""Falcon with ALiBi declares support for a static cache (`_can_compile_fullgraph`) and raises an error with one.
Found by `cache-unused-slots`."""

import torch
from transformers import FalconConfig, FalconForCausalLM

for alibi in (False, True):
    for kernel in ("eager", "sdpa"):
        torch.manual_seed(0)
        size = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}
        model = FalconForCausalLM._from_config(FalconConfig(**size, alibi=alibi), attn_implementation=kernel).eval()
        how = {"do_sample": False, "max_new_tokens": 4, "cache_implementation": "static", "disable_compile": True}
        try:
            said = f"returns {model.generate(torch.arange(3, 10)[None], **how)[0, -4:].tolist()}"
        except (ValueError, RuntimeError) as error:
            said = f"raises {type(error).__name__}: {error}"
        print(f"alibi={alibi}, {kernel}, declares static cache support: {model._can_compile_fullgraph}; it {said}")
