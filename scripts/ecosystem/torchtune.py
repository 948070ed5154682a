"""torchtune: decoders with `setup_caches`; a cached forward pass takes a mask over all cache slots and `input_pos`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

HOMEPAGE = "https://github.com/pytorch/torchtune"
REQUIREMENTS = ("torchtune==0.6.1", "torchao==0.17.0", "transformers==5.23.0")
LENGTH, VOCAB = 96, 64
SIZES = {
    "vocab_size": VOCAB,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 64,
    "max_seq_len": LENGTH,
}
HF_SIZES = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = {"head_dim": 8, "query_pre_attn_scalar": 16}
PARITY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama3": ({"model_type": "llama"}, {"rope_base": 10_000}),
    "mistral": ({"model_type": "mistral", "sliding_window": None}, {"rope_base": 10_000}),
    "qwen2": ({"model_type": "qwen2"}, {"rope_base": 10_000}),
    "phi3": ({"model_type": "phi3", "sliding_window": None}, {"rope_base": 10_000}),
    "gemma": ({"model_type": "gemma", "head_dim": 8}, {"head_dim": 8}),
    "gemma2": ({"model_type": "gemma2", "sliding_window": 8, **WINDOW}, {"sliding_window_size": 8, **WINDOW}),
}
"""Module of torchtune → config of transformers, arguments of the builder of torchtune."""
LORA = {"lora_attn_modules": ["q_proj", "v_proj"], "lora_rank": 4, "lora_alpha": 8}
GEMMA = {"head_dim": 8}


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "Llama-2", partial(make, "llama2", {"num_kv_heads": 4})
    yield "Llama-3, grouped heads", partial(make, "llama3", {})
    yield "Llama-3, one kv head", partial(make, "llama3", {"num_kv_heads": 1})
    yield "Llama-3.1, RoPE scaling", partial(make, "llama3_1", {"scale_factor": 4, "rope_base": 10_000})
    yield "Llama-3.2, tied embeddings", partial(make, "llama3_2", {})
    yield "Mistral", partial(make, "mistral", {})
    yield "Qwen2, tied embeddings", partial(make, "qwen2", {"tie_word_embeddings": True})
    yield "Phi-3", partial(make, "phi3", {})
    yield "Gemma", partial(make, "gemma", {**GEMMA, "num_kv_heads": 1})
    yield "Gemma-2, window", partial(make, "gemma2", {**GEMMA, "sliding_window_size": 8})
    yield "Gemma-2, window longer than the text", partial(make, "gemma2", {**GEMMA, "sliding_window_size": LENGTH})
    yield "Llama-3 with caches set up and disabled", partial(make, "llama3", {}, disabled_cache=True)
    yield "Gemma-2 with caches set up and disabled", partial(make, "gemma2", GEMMA, disabled_cache=True)
    yield "Llama-3, LoRA", partial(make, "lora_llama3", LORA)
    for family in PARITY:
        yield f"{family}, compared with transformers", partial(make_parity, family)


def make_parity(family: str) -> tuple[nn.Module, dict[str, Any]]:
    """A random model of transformers, converted by torchtune."""
    from importlib import import_module

    import transformers
    from torchtune.models.convert_weights import hf_to_tune

    config_changes, changes = PARITY[family]
    config = transformers.AutoConfig.for_model(**HF_SIZES | config_changes)
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    models = import_module(f"torchtune.models.{family}")
    model = getattr(models, family)(**SIZES | {"norm_eps": 1e-6} | changes).eval()
    convert, sizes = hf_to_tune, {"num_heads": 4, "num_kv_heads": 2, "dim": 32, "head_dim": 8}
    if family in ("phi3", "qwen2", "gemma2"):
        convert = getattr(import_module(f"torchtune.models.{family}._convert_weights"), f"{family}_hf_to_tune")
    if family == "phi3":
        del sizes["head_dim"]
    weights = convert(reference.state_dict(), **sizes)
    if config.tie_word_embeddings:
        weights.pop("output.weight", None)
    model.load_state_dict(weights)

    def reference_logits(tokens: Tensor) -> Tensor:
        return reference(tokens, use_cache=False).logits

    facts = {"vocab_size": VOCAB, "max_seq_len": LENGTH, "only": ["parity", "causality", "batch-isolation"]}
    return model, {"reference_logits": reference_logits, **facts}


def make(family: str, changes: dict[str, Any], disabled_cache: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    from importlib import import_module

    from torchtune.generation import generate as generate_tokens
    from torchtune.modules.common_utils import delete_kv_caches, disable_kv_cache

    models = import_module(f"torchtune.models.{family.removeprefix('lora_')}")
    sizes = SIZES | changes

    def build() -> nn.Module:
        return getattr(models, family)(**sizes).eval()

    model, cached_model = build(), build()

    def set_up(batch_size: int) -> None:
        if cached_model.caches_are_setup():
            delete_kv_caches(cached_model)
        cached_model.load_state_dict(model.state_dict())
        dtype = next(model.parameters()).dtype
        cached_model.setup_caches(batch_size=batch_size, dtype=dtype, decoder_max_seq_len=LENGTH)

    def logits_with_cache(tokens: Tensor, start: int | None) -> tuple[Tensor, int]:
        if start is None:
            set_up(len(tokens))
        begin, end = start or 0, (start or 0) + tokens.shape[1]
        mask = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))[begin:end].expand(len(tokens), -1, -1)
        positions = torch.arange(begin, end)[None].expand(len(tokens), -1)
        return cached_model(tokens, mask=mask, input_pos=positions), end

    def logits_with_mask(tokens: Tensor, mask: Tensor) -> Tensor:
        from torchtune.generation import get_causal_mask_from_padding_mask, get_position_ids_from_padding_mask

        causal = get_causal_mask_from_padding_mask(mask)
        return model(tokens, mask=causal, input_pos=get_position_ids_from_padding_mask(mask))

    def generate(tokens: Tensor, count: int) -> Tensor:
        set_up(len(tokens))
        options = {"max_generated_tokens": count, "top_k": 1, "pad_id": -1}
        return generate_tokens(cached_model, tokens, **options)[0][:, tokens.shape[1] :]

    def generate_padded(tokens: Tensor, mask: Tensor, count: int) -> Tensor:
        set_up(len(tokens))
        prompts = tokens.masked_fill(~mask, VOCAB - 1)
        options = {"max_generated_tokens": count, "top_k": 1, "pad_id": VOCAB - 1}
        return generate_tokens(cached_model, prompts, **options)[0][:, tokens.shape[1] :]

    def logits_with_documents(tokens: Tensor, documents: Tensor) -> Tensor:
        same = documents[:, :, None] == documents[:, None, :]
        first = (documents[:, :, None] > documents[:, None, :]).sum(-1)
        return model(tokens, mask=same.tril(), input_pos=torch.arange(tokens.shape[1]) - first)

    def logits_with_disabled_cache(tokens: Tensor) -> Tensor:
        set_up(len(tokens))
        with disable_kv_cache(cached_model):
            return cached_model(tokens)

    arguments = {
        "logits_with_cache": logits_with_cache,
        "logits_with_mask": logits_with_mask,
        "logits_with_documents": logits_with_documents,
        "generate": generate,
        "generate_padded": generate_padded,
        "padding_side": "left",
        "positions_skip_padding": True,
        "special_token_ids": (VOCAB - 1,),
        "build_module": build,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "kv_heads": sizes["num_kv_heads"],
        "relative_positions": True,
        "trained": False,
    }
    if "sliding_window_size" in sizes:
        arguments["windows"] = (sizes["sliding_window_size"],)
    if disabled_cache:
        arguments = {"logits": logits_with_disabled_cache, "vocab_size": VOCAB, "max_seq_len": LENGTH}
        arguments["only"] = ["causality", "causality-paths", "batch-isolation", "causality-tile-edges"]
    return model, arguments
