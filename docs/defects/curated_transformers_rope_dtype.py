"""curated-transformers' RoPE frequencies are a buffer, which is converted with the model (`from_hf_hub` does so). For
more than 512 tokens, the table of cos and sin is computed again from frequencies and angles in fp16 or bf16.
Found by `rope-precision`."""

import torch
from curated_transformers.layers.embeddings import RotaryEmbeddings

width, length = 16, 500
frequencies = 10_000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
expected = (torch.arange(length)[:, None] * frequencies).cos()
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    rope = RotaryEmbeddings(width).to(dtype)
    for total in (500, 700):
        x = torch.zeros(1, 1, total, width, dtype=dtype)
        x[..., : width // 2] = 1.0  # rotated to cos, sin
        error = (rope(x)[0, 0, :length, : width // 2] - expected).abs().max()
        print(f"{dtype}, text of {total} tokens: error of cos at the first {length} tokens {error:.0e}")
