"""RoBERTa as a decoder: with a KV cache, the position of a new token counts cached padding, so decoding from a
left-padded batch continues at other positions than the text alone. Found by `cache-padding`."""

import torch
from transformers import RobertaConfig, RobertaForCausalLM

torch.manual_seed(0)
size = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 64}
model = RobertaForCausalLM(RobertaConfig(**size, is_decoder=True, pad_token_id=1, max_position_embeddings=66)).eval()
tokens = torch.randint(4, 64, (1, 8))
for padding in (0, 5):
    padded = torch.cat([torch.ones(1, padding, dtype=torch.long), tokens], dim=1)
    mask = padded.ne(1).long()
    with torch.no_grad():
        full = model(padded, attention_mask=mask).logits[:, -1]
        cache = model(padded[:, :-1], attention_mask=mask[:, :-1], use_cache=True).past_key_values
        step = model(padded[:, -1:], attention_mask=mask, past_key_values=cache).logits[:, -1]
    print(f"{padding} padding tokens: cached and uncached logits are {(step - full).abs().max().item():.2g} apart")
