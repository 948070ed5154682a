"""RoBERTa as a decoder: `generate` passes position ids that start at 0, but a forward pass numbers tokens from
`pad_token_id + 1`, so generation runs the model at other positions. Found by `generation`."""

import torch
from transformers import RobertaConfig, RobertaForCausalLM

torch.manual_seed(0)
size = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 64}
model = RobertaForCausalLM(RobertaConfig(**size, is_decoder=True, pad_token_id=1, max_position_embeddings=66)).eval()
tokens = torch.randint(4, 64, (1, 8))
used = []
hook = model.roberta.embeddings.position_embeddings.register_forward_hook(lambda _, args, out: used.append(args[0]))
with torch.no_grad():
    expected = model(tokens).logits[:, -1]
    options = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options).logits[0]
print(f"positions of the forward pass: {used[0].flatten().tolist()}")
print(f"positions of generate:         {used[-1].flatten().tolist()}")
print(f"logits of the next token are {(generated - expected).abs().max().item():.2g} apart")
