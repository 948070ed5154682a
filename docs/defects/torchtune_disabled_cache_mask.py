"""torchtune after `setup_caches`: within `disable_kv_cache`, a forward pass without a mask is not causal, because the
causal default is used only if there is no cache. Found by `causality`."""

import torch
from torchtune.models.llama3 import llama3
from torchtune.modules.common_utils import disable_kv_cache

torch.manual_seed(0)
sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "intermediate_dim": 64}
model = llama3(vocab_size=64, max_seq_len=32, **sizes).eval()
tokens = torch.randint(64, (1, 12))
changed = tokens.clone()
changed[0, -1] = (tokens[0, -1] + 1) % 64  # only the last token differs
with torch.no_grad():
    effect = (model(changed) - model(tokens))[:, :-1].abs().max().item()
    print(f"before setup_caches: the last token changes earlier logits by {effect:.2g}")
    model.setup_caches(batch_size=1, dtype=torch.float32)
    with disable_kv_cache(model):
        effect = (model(changed) - model(tokens))[:, :-1].abs().max().item()
    print(f"within disable_kv_cache: the last token changes earlier logits by {effect:.2g}")
