"""curated-transformers' TopPTransform keeps all tokens during generation. It sets `retain[:, 0]` to True for the first
token of sorted logits of shape (batch, vocabulary), but `Generator` passes (batch, 1, vocabulary), whose index 0 of
the second dimension is the whole vocabulary. Found by `sampling`."""

import torch
from curated_transformers.generation import SampleGeneratorConfig

logits = torch.tensor([0.6, 0.3, 0.05, 0.05]).log()
for top_p in (1.0, 0.7):
    transform = SampleGeneratorConfig(top_p=top_p).logits_transform()
    flat = transform(logits[None]).softmax(-1).flatten().tolist()
    as_in_generator = transform(logits[None, None]).softmax(-1).flatten().tolist()
    for name, found in (("(1, 4)", flat), ("(1, 1, 4), as in Generator", as_in_generator)):
        print(f"top_p={top_p}, logits of shape {name}: probabilities {[round(p, 2) for p in found]}")
print("expected for top_p=0.7: [0.67, 0.33, 0.0, 0.0]")
