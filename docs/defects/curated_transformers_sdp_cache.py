"""curated-transformers cannot generate with `enable_torch_sdp`: the attention multiplies its output by the mask of all
keys as if it were the mask of the queries, so that a cached token gets one output per key. Found by `cache-decode`."""

import torch
from curated_transformers.generation import GreedyGeneratorConfig
from curated_transformers.generation.generator import Generator
from curated_transformers.layers import AttentionMask, enable_torch_sdp
from curated_transformers.models.llama import LlamaCausalLM, LlamaConfig

sizes = {"hidden_width": 32, "intermediate_width": 64, "n_query_heads": 4, "n_key_value_heads": 4, "n_pieces": 50}
model = LlamaCausalLM(LlamaConfig(**sizes, n_hidden_layers=2, rotary_embedding_fraction=1.0))
tokens, mask = torch.arange(8)[None], AttentionMask(torch.ones(1, 8, dtype=torch.bool))
for use_sdp in (False, True):
    for count in (1, 3):
        config = GreedyGeneratorConfig(eos_id=50, max_generated_pieces=count)
        with enable_torch_sdp(use_sdp):
            try:
                found = [ids.item() for _, ids in Generator(model)(attention_mask=mask, ids=tokens, config=config)]
            except RuntimeError as error:
                found = f"RuntimeError: {str(error)[:70]} …"
        print(f"enable_torch_sdp({use_sdp}), {count} new tokens: {found}")
