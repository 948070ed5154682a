"""mlx-lm's Gemma-2 cannot generate for a batch of prompts: the mask (batch, 1, queries, keys) is not extended for the
scores of grouped heads, which have five dimensions. If there are as many prompts as kv heads, the mask of a prompt is
used for a kv head, and padding is not masked. Found by `generation`."""

from types import SimpleNamespace

import mlx.core as mx
from mlx_lm.generate import batch_generate
from mlx_lm.models import gemma2, qwen3

mx.set_default_device(mx.cpu)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
sizes |= {"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
tokenizer = SimpleNamespace(eos_token_ids=[], decode=lambda ids: "")
for library in (qwen3, gemma2):
    fields = {"model_type": "", "tie_word_embeddings": True, "rope_theta": 10_000.0}
    model = library.Model(library.ModelArgs.from_dict(sizes | fields))
    for prompts in ([[4, 5]], [[1, 2, 3, 6, 7], [4, 5]], [[1, 2, 3, 6, 7], [4, 5], [8]]):
        try:
            result = batch_generate(model, tokenizer, prompts, max_tokens=3, return_logprobs=True).logprobs
            found = [round(value, 4) for value in result[prompts.index([4, 5])]]
        except ValueError as error:
            found = f"ValueError: {error}"
        print(f"{library.__name__}, {len(prompts)} prompts: log-probabilities after [4, 5]: {found}")
