"""TransformerLens' `fold_value_biases` (default of `from_pretrained`) adds b_V @ W_O to b_O, since "attention patterns
add up to 1". With attention sinks (GPT-OSS, which has value biases) they do not, and with `clip_qkv` values are not
linear in b_V: the logits change. Found by `parity`."""

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 64, "d_head": 8, "n_heads": 4, "d_mlp": 64, "d_vocab": 50}
off = {"fold_ln": False, "center_writing_weights": False, "center_unembed": False}
for fields in ({}, {"use_attention_sinks": True}, {"clip_qkv": 1.0}):
    torch.manual_seed(0)
    config = HookedTransformerConfig(**sizes, **fields, act_fn="silu", device="cpu", normalization_type="RMS")
    model, folded = HookedTransformer(config), HookedTransformer(config)
    for weight in model.parameters():
        weight.data += 0.5 * torch.randn_like(weight)
    folded.load_and_process_state_dict(model.state_dict(), **off, fold_value_biases=True)
    tokens = torch.arange(20)[None]
    difference = (folded(tokens) - model(tokens)).abs().max()
    print(f"{fields}: logits change by {difference:.1e}, their standard deviation is {model(tokens).std():.1f}")
