"""gpt-fast's speculative decoding always raises since FlexAttention is used: draft tokens of shape (k, 1) are
concatenated with one of shape (1,), and `model_forward` calls the model without its block mask. Found by
`speculative-decoding`. Run it with a clone of gpt-fast in PYTHONPATH."""

import generate as library
import torch
from model import ModelArgs, Transformer
from torch.nn.attention.flex_attention import create_block_mask

library.create_block_mask = create_block_mask  # without torch.compile
sizes = {"block_size": 64, "vocab_size": 50, "n_layer": 2, "n_head": 4, "dim": 64, "intermediate_size": 64}
model, draft_model = Transformer(ModelArgs(**sizes)).eval(), Transformer(ModelArgs(**sizes)).eval()
for draft in (None, draft_model):
    options = {"interactive": False, "draft_model": draft, "speculate_k": 3, "temperature": 0.0}
    try:
        result = library.generate(model, torch.arange(8), 5, 1, **options)[0].tolist()
    except (AttributeError, RuntimeError, TypeError) as error:
        result = f"{type(error).__name__}: {error}"
    print(f"speculative={draft is not None}: {result}")
