"""PaLM-rlhf-pytorch with `qk_rmsnorm`: the factor of 8 on the products of normalized q and k (`qk_scale`) is stored but
not used. Attention multiplies by 1/sqrt(d_head), so scores are within 0.125 of 0 and attention is almost uniform, for
any weights. Expected: scores up to 8. Found by reading the code."""

import torch
from palm_rlhf_pytorch import PaLM

for name, factor in {"weights": 1.0, "weights of q and k times 100": 100.0}.items():
    for normalized in (False, True):
        torch.manual_seed(0)
        sizes = {"num_tokens": 64, "dim": 32, "depth": 1, "dim_head": 64, "heads": 1}
        model, patterns = PaLM(**sizes, qk_rmsnorm=normalized).eval(), []
        block = model.layers[0].fn
        block.fused_attn_ff_proj.weight.data[:128] *= factor
        block.attend.attn_dropout.register_forward_hook(lambda module, args, out, found=patterns: found.append(out))
        with torch.no_grad():
            model(torch.randint(64, (1, 16)))
        largest = patterns[0][0, 0, -1].max()
        print(f"{name}, qk_rmsnorm={normalized}, scale {block.scale}: largest of 16 attention weights {largest:.3f}")
