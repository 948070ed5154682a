"""curated-transformers does not divide the ALiBi bias of Falcon by sqrt(d_head). Falcon's code, with which Falcon-RW
was trained, computes softmax((q·k + bias) / sqrt(d_head)), as the SDPA attention of transformers does.
Found by `parity`."""

import torch
from curated_transformers.layers import AttentionMask
from curated_transformers.models.falcon import FalconCausalLM
from transformers import FalconConfig, FalconForCausalLM

tokens, mask = torch.arange(40)[None], AttentionMask(torch.ones(1, 40, dtype=torch.bool))
for alibi in (False, True):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    sizes |= {"multi_query": False, "parallel_attn": False, "bias": True}
    config = FalconConfig(**sizes, alibi=alibi, initializer_range=0.2)
    reference = FalconForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    model = FalconCausalLM.from_hf_config(hf_config={**config.to_dict(), "torch_dtype": "float32"}).eval()
    model.load_state_dict(FalconCausalLM.state_dict_from_hf(reference.state_dict()), strict=False)
    expected = reference(tokens, use_cache=False).logits
    apart = (model(tokens, mask).logits - expected).abs().max()
    for layer in model.decoder.layers if alibi else ():
        layer.mha.attention_scorer.linear_biases.slopes /= 8**0.5
    scaled = (model(tokens, mask).logits - expected).abs().max()
    print(f"alibi={alibi}: difference {apart:.1e}" + f", with slopes / sqrt(d_head) {scaled:.1e}" * alibi)
