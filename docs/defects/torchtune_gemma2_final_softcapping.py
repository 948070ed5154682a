"""torchtune's Gemma-2 applies `final_capping_value` to the hidden states before the output layer. Gemma-2 (technical
report, section 2; transformers) applies it to the logits, which are then below the value. Found by reading the
code."""

import torch
from torchtune.models.gemma2 import gemma2

torch.manual_seed(0)
sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "embed_dim": 32, "intermediate_dim": 64}
for scale in (1, 10, 100):
    model = gemma2(vocab_size=64, max_seq_len=32, final_capping_value=30.0, **sizes).eval()
    with torch.no_grad():
        model.tok_embeddings.weight.mul_(scale)  # also the output layer: the weights are tied
        logits = model(torch.randint(64, (1, 12)))
    print(f"embeddings times {scale}: largest logit {logits.abs().max().item():.1f}, final_capping_value 30.0")
