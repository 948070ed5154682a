"""mlx-lm ignores `sliding_window` of Gemma-2, Mistral, Mixtral, Qwen2 and Phi-3 (and Starcoder-2): all layers attend to
the whole text, and logits beyond the window differ from transformers. Found by `parity`."""

import tempfile

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import Path, load_model
from transformers import AutoConfig, AutoModelForCausalLM

mx.set_default_device(mx.cpu)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
tokens, heads = torch.arange(40)[None], {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}
for family in ("gemma2", "mistral", "mixtral", "qwen2", "phi3"):
    for window in (64, 8):
        fields = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0, "rope_theta": 10_000}
        config = AutoConfig.for_model(family, **sizes, **heads, **fields, initializer_range=0.2)
        reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with tempfile.TemporaryDirectory() as folder:
            reference.save_pretrained(folder)
            model = load_model(Path(folder), model_config={"rope_theta": config.rope_parameters["rope_theta"]})[0]
        apart = np.abs(np.array(model(mx.array(tokens.numpy()))) - reference(tokens).logits.detach().numpy())
        print(f"{family}, window {window}: difference within 8 tokens {apart[0, :8].max():.0e}, all {apart.max():.0e}")
