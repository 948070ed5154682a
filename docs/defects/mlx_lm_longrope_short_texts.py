"""mlx-lm uses the long factors of LongRoPE (Phi-3) for all texts. `short_factor` is for texts that are not longer than
the original length, in the paper (arXiv 2402.13753), in transformers and in the docstring of mlx-lm.
Found by `parity`."""

import logging

import mlx.core as mx
import torch
from mlx_lm.models.rope_utils import SuScaledRoPE
from transformers import Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

logging.disable(logging.ERROR)
mx.set_default_device(mx.cpu)
factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
lengths = {"original_max_position_embeddings": 32, "max_position_embeddings": 128}
sizes = {"hidden_size": 32, "num_attention_heads": 4}
config = Phi3Config(**sizes, **lengths, rope_parameters={"rope_type": "longrope", "rope_theta": 10_000.0, **factors})
rope = SuScaledRoPE(8, 10_000.0, **lengths, **factors)
x = mx.broadcast_to(mx.array([1.0] * 4 + [0.0] * 4), (1, 1, 64, 8))
for length in (16, 64):
    expected, _ = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
    rotated = torch.tensor(rope(x[:, :, :length]).tolist())[0, 0, 1]
    print(f"{length} tokens: frequencies {rotated[4:].atan2(rotated[:4]).tolist()}, expected {expected.tolist()}")
