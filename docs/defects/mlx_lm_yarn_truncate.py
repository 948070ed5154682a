"""mlx-lm ignores `truncate` of YaRN: it rounds the pair indices between which frequencies are interpolated, also if the
configuration disables it, as that of GPT-OSS does. Found by `parity`."""

import logging

import mlx.core as mx
import torch
from mlx_lm.models.rope_utils import initialize_rope
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

logging.disable(logging.ERROR)
mx.set_default_device(mx.cpu)
scaling = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
scaling["original_max_position_embeddings"] = 4096
for truncate in (True, False):  # the values of GPT-OSS
    fields = {**scaling, "truncate": truncate}
    config = LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters={**fields, "rope_theta": 150000})
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    rope = initialize_rope(64, 150000, False, fields, max_position_embeddings=131072)
    found = 1 / torch.tensor(rope._freqs.tolist())
    apart = (found / expected - 1).abs().max()
    print(f"truncate={truncate}: frequencies differ from transformers by up to {apart:.1%}")
