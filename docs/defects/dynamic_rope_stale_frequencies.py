"""RoPE with `dynamic` scaling keeps the frequencies of the longest sequence that the model has processed: the logits
of a text change after a longer text, until a short text resets them. Found by `rope-scaling` if `max_seq_len=`
allows texts beyond `original_max_position_embeddings`."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
size = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
model = LlamaForCausalLM(LlamaConfig(**size, max_position_embeddings=16, rope_parameters=rope)).eval()
for weight in model.parameters():
    weight.data.normal_(0, 0.3)
text, longer = torch.randint(50, (1, 20)), torch.randint(50, (1, 60))
with torch.no_grad():
    first = model(text, use_cache=False).logits
    again = model(text, use_cache=False).logits
    model(longer, use_cache=False)
    after = model(text, use_cache=False).logits
print(f"the same text twice: {(first - again).abs().max():.1e} apart")
print(f"after a longer text: {(first - after).abs().max():.1e} apart")
