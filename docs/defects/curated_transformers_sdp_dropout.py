"""curated-transformers' models cannot be trained with `enable_torch_sdp`: the attention reads `self.dropout_prob`,
which does not exist. Found by `batch-isolation`."""

import torch
from curated_transformers.layers import AttentionMask, enable_torch_sdp
from curated_transformers.models.bert import BERTConfig, BERTEncoder

sizes = {"embedding_width": 32, "hidden_width": 32, "intermediate_width": 64, "n_attention_heads": 4}
model = BERTEncoder(BERTConfig(**sizes, n_hidden_layers=1, n_pieces=50))
tokens = torch.arange(8)[None]
mask = AttentionMask(torch.ones(1, 8, dtype=torch.bool))
for training in (False, True):
    for use_sdp in (False, True):
        model.train(training)
        with enable_torch_sdp(use_sdp):
            try:
                result = f"output of shape {tuple(model(tokens, mask).last_hidden_layer_state.shape)}"
            except AttributeError as error:
                result = f"AttributeError: {error}"
        print(f"training={training}, enable_torch_sdp({use_sdp}): {result}")
