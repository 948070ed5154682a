"""linear-attention-transformer with `shift_tokens`: the shift looks for the argument `mask`, but the mask is passed as
`input_mask`, and to attention layers only, so the features of padding are shifted into the text. Without the option
padding is masked. Found by `right-padding` and `padding-leak`."""

import torch
from linear_attention_transformer import LinearAttentionTransformerLM

for shift in (False, True):
    torch.manual_seed(0)
    sizes = {"num_tokens": 64, "dim": 32, "depth": 2, "max_seq_len": 64, "heads": 4, "dim_head": 8}
    model = LinearAttentionTransformerLM(**sizes, use_rotary_emb=True, shift_tokens=shift).eval()
    tokens, mask = torch.randint(64, (1, 16)), torch.arange(16)[None] < 12
    with torch.no_grad():
        first, second = (model(tokens.masked_fill(~mask, pad), input_mask=mask)[mask] for pad in (0, 1))
    print(f"shift_tokens={shift}: the padding token changes the logits by {(first - second).abs().max():.1e}")
