"""MPT's `attn_config.alibi_bias_max` is accepted but not used: the ALiBi slopes are always computed with 8. Found by
`config-fields`."""

import torch
from transformers import MptConfig, MptForCausalLM

found = []
for most in (8, 2):
    torch.manual_seed(0)
    config = MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=50, attn_config={"alibi_bias_max": most})
    with torch.no_grad():
        found.append(MptForCausalLM(config).eval()(torch.arange(20)[None]).logits)
print(f"logits with alibi_bias_max of 8 and of 2 are {(found[0] - found[1]).abs().max():.1e} apart")
