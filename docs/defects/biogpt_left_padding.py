"""BioGPT has code that numbers tokens by the attention mask, as OPT has, but a forward pass always gives it position
ids that count padding, so the logits of a left-padded text are those of other positions. Found by `left-padding`."""

import torch
from transformers import BioGptConfig, BioGptForCausalLM, OPTConfig, OPTForCausalLM

size = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 1}
opt = OPTConfig(**size, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64)
biogpt = BioGptConfig(**size, intermediate_size=64, max_position_embeddings=64)
for model_class, config in ((OPTForCausalLM, opt), (BioGptForCausalLM, biogpt)):
    torch.manual_seed(0)
    model = model_class(config).eval()
    tokens = torch.randint(4, 64, (1, 8))
    padded = torch.cat([torch.ones(1, 5, dtype=torch.long), tokens], dim=1)
    mask = padded.ne(1).long()
    with torch.no_grad():
        difference = (model(padded, attention_mask=mask).logits[:, 5:] - model(tokens).logits).abs().max().item()
    print(f"{model_class.__name__}: with 5 padding tokens on the left, the logits change by {difference:.2g}")
