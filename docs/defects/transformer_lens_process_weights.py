"""TransformerLens' `process_weights_` changes the probabilities of models with logit softcapping (center_unembed) and
of Shortformer (fold_ln, center_writing_weights). `from_pretrained` disables these steps for such models with a
warning. Found by `parity`."""

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 64, "d_head": 8, "n_heads": 4, "d_mlp": 64, "d_vocab": 50}
cases = ({}, {"output_logits_soft_cap": 3.0}, {"positional_embedding_type": "shortformer"})
for fields in cases:
    torch.manual_seed(0)
    config = HookedTransformerConfig(**sizes, **fields, act_fn="gelu", device="cpu")
    model, processed = HookedTransformer(config), HookedTransformer(config)
    for weight in model.parameters():
        weight.data += 0.5 * torch.randn_like(weight)
    processed.load_state_dict(model.state_dict())
    processed.process_weights_()
    tokens = torch.arange(20)[None]
    difference = (processed(tokens).log_softmax(-1) - model(tokens).log_softmax(-1)).abs().max()
    print(f"{fields}: log-probabilities change by {difference:.1e}")
