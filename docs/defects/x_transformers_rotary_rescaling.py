"""x-transformers: `rotary_base_rescale_factor` is for longer texts without fine-tuning, but the RoPE frequencies are
saved with the weights: loading a checkpoint silently restores the frequencies without the factor. The interpolation
factor is not saved, and works. Found by `config-fields`."""

import torch
from x_transformers import Decoder, TransformerWrapper


def build(**options: float) -> TransformerWrapper:
    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=16, rotary_pos_emb=True, verbose=False, **options)
    return TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers).eval()


torch.manual_seed(0)
trained, tokens = build(), torch.randint(64, (1, 64))
for name in ("rotary_interpolation_factor", "rotary_base_rescale_factor"):
    model = build(**{name: 4.0})
    model.load_state_dict(trained.state_dict())
    with torch.no_grad():
        change = (model(tokens) - trained(tokens)).abs().max()
    print(f"{name}=4: logits after loading the checkpoint change by {change:.1e}")
