"""curated-transformers ignores `rope_theta` and `rope_scaling` of Llama checkpoints (CodeLlama, Llama 3) and
`use_parallel_residual` of GPT-NeoX checkpoints (RedPajama-INCITE): the models are loaded without an error and give
wrong logits. Found by `parity`."""

import torch
from curated_transformers.layers import AttentionMask
from curated_transformers.models.gpt_neox import GPTNeoXCausalLM
from curated_transformers.models.llama import LlamaCausalLM
from transformers import AutoConfig, AutoModelForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
tokens, mask = torch.arange(40)[None], AttentionMask(torch.ones(1, 40, dtype=torch.bool))
linear = {"rope_scaling": {"type": "linear", "factor": 4.0}}
cases = [("llama", fields) for fields in ({}, {"rope_theta": 500_000.0}, linear)]
for family, fields in [*cases, ("gpt_neox", {}), ("gpt_neox", {"use_parallel_residual": False})]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **fields, vocab_size=50, initializer_range=0.2)
    reference = AutoModelForCausalLM.from_config(config).eval()
    causal_lm = LlamaCausalLM if family == "llama" else GPTNeoXCausalLM
    model = causal_lm.from_hf_config(hf_config={**config.to_dict(), "torch_dtype": "float32"}).eval()
    model.load_state_dict(causal_lm.state_dict_from_hf(reference.state_dict()), strict=False)
    print(f"{family} {fields}: difference {(model(tokens, mask).logits - reference(tokens).logits).abs().max():.1e}")
