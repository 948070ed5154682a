"""x-transformers: padding raises errors in two configurations: `seq_start_pos` (prompts of different lengths) with
scaled sinusoidal positions, which take one row of positions, and a mask with interspersed memory tokens, which are not
added to it. Found by `batch-invariance`, `right-padding` and `generation`."""

import torch
from x_transformers import Decoder, TransformerWrapper

tokens, start, mask = torch.randint(64, (2, 16)), torch.tensor([0, 4]), torch.ones(2, 16).bool()
sinusoidal, memory = {"scaled_sinu_pos_emb": True}, {"num_memory_tokens": 2}
for options, padding in (
    ({}, {"seq_start_pos": start}),
    (sinusoidal, {}),
    (sinusoidal, {"seq_start_pos": start}),
    (memory, {"mask": mask}),
    (memory | {"memory_tokens_interspersed_every": 4}, {}),
    (memory | {"memory_tokens_interspersed_every": 4}, {"mask": mask}),
):
    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=16)
    model = TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers, **options)
    try:
        result = str(tuple(model(tokens, **padding).shape))
    except RuntimeError as error:
        result = f"RuntimeError: {str(error)[:50]}"
    print(f"{', '.join(options) or 'no option'}; {', '.join(padding) or 'no padding'}: {result}")
