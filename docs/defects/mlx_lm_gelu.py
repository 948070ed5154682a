"""mlx-lm has the wrong GELU in three families: exact in Gemma and Starcoder-2, whose configurations say
`gelu_pytorch_tanh`, and the tanh approximation in GPT-NeoX (Pythia), whose configuration says `gelu`.
Found by `parity`."""

import tempfile

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import Path, load_model
from transformers import AutoConfig, AutoModelForCausalLM

mx.set_default_device(mx.cpu)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
sizes |= {"vocab_size": 50, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 64, "pad_token_id": None}
tokens, fields = torch.arange(20)[None], {"rope_theta": 10_000, "rotary_emb_base": 10_000, "rotary_pct": 0.25}
for family in ("gemma2", "gemma", "starcoder2", "gpt_neox"):
    for gelu in ("gelu_python", "gelu_pytorch_tanh"):  # the exact GELU, the approximation
        config = AutoConfig.for_model(family, **sizes, hidden_act=gelu, hidden_activation=gelu, initializer_range=0.2)
        reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with tempfile.TemporaryDirectory() as folder:
            reference.save_pretrained(folder)
            model = load_model(Path(folder), model_config=fields)[0]
        apart = np.abs(np.array(model(mx.array(tokens.numpy()))) - reference(tokens).logits.detach().numpy())
        print(f"{family}: difference from transformers with {gelu}: {apart.max():.0e}")
