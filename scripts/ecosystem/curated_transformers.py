"""curated-transformers: decoders from shared layers; the cache is a list of keys and values, the mask an object.

The mask of a cached forward pass covers the cached and the new tokens, as in `Generator`.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

NAME = "curated-transformers"
HOMEPAGE = "https://github.com/explosion/curated-transformers"
REQUIREMENTS = ("curated-transformers==2.0.1", "transformers==4.57.6", "huggingface-hub==0.36.2", "requests==2.34.2")
LENGTH, VOCAB = 96, 64
SIZES = {"hidden_width": 32, "n_hidden_layers": 2, "n_pieces": VOCAB, "dtype": torch.float32}
QUERY_HEADS = {"n_query_heads": 4}
LLAMA = {"intermediate_width": 64, "rotary_embedding_fraction": 1.0, **QUERY_HEADS}
FALCON = {"rotary_embedding_fraction": 1.0, **QUERY_HEADS}
NEOX = {"n_attention_heads": 4, "intermediate_width": 64}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {**LLAMA, "n_key_value_heads": 4}),
    "Llama, grouped heads": ("Llama", {**LLAMA, "n_key_value_heads": 2}),
    "Llama, one kv head": ("Llama", {**LLAMA, "n_key_value_heads": 1}),
    "GPT-NeoX, partial RoPE": ("GPTNeoX", {**NEOX, "rotary_embedding_fraction": 0.5}),
    "Falcon, one kv head": ("Falcon", {**FALCON, "n_key_value_heads": 1}),
    "Falcon, sequential": ("Falcon", {**FALCON, "n_key_value_heads": 4, "use_parallel_attention": False}),
    "Falcon, new architecture, grouped heads": (
        "Falcon",
        {**FALCON, "n_key_value_heads": 2, "new_decoder_architecture": True},
    ),
    "Falcon, ALiBi": ("Falcon", {**FALCON, "n_key_value_heads": 4, "use_alibi": True, "use_bias": True}),
    "Falcon, ALiBi, new architecture, grouped heads": (
        "Falcon",
        {**FALCON, "n_key_value_heads": 2, "use_alibi": True, "new_decoder_architecture": True},
    ),
    "MPT, ALiBi": ("MPT", {"n_attention_heads": 4, "intermediate_width_multiplier": 2}),
}
HF_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HF_LLAMA = {"model_type": "llama", "intermediate_size": 64, "num_key_value_heads": 2}
HF_NEOX = {"model_type": "gpt_neox", "intermediate_size": 64}
HF_FALCON = {"model_type": "falcon"}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PARITY: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", HF_LLAMA),
    "Llama, rope_theta 500000": ("Llama", {**HF_LLAMA, "rope_theta": 500_000.0}),
    "Llama, Llama-3 RoPE scaling": (
        "Llama",
        {**HF_LLAMA, "rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 32}},
    ),
    "GPT-NeoX": ("GPTNeoX", HF_NEOX),
    "GPT-NeoX, sequential residual": ("GPTNeoX", {**HF_NEOX, "use_parallel_residual": False}),
    "Falcon, one kv head": ("Falcon", HF_FALCON),
    "Falcon, new architecture": ("Falcon", {**HF_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon, ALiBi": ("Falcon", {**HF_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False}),
    "MPT": ("MPT", {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": LENGTH}),
    "MPT, six heads": ("MPT", {"model_type": "mpt", "d_model": 48, "n_heads": 6, "n_layers": 2}),
}
"""Class of curated-transformers → config of transformers."""


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, (family, changes) in DECODERS.items():
        yield name, partial(make, family, changes)
        if name in ("Llama, grouped heads", "Falcon, one kv head", "MPT, ALiBi"):
            yield f"{name}, enable_torch_sdp", partial(make, family, changes, torch_sdp=True)
    yield "Llama, dropout, enable_torch_sdp", partial(make_training, torch_sdp=True)
    yield "Llama, dropout", partial(make_training, torch_sdp=False)
    yield "Llama, texts longer than 512 tokens", partial(make, "Llama", DECODERS["Llama"][1], length=700)
    long_texts = partial(make, "Llama", DECODERS["Llama"][1], length=700, dtype=torch.bfloat16)
    yield "Llama, bfloat16, texts longer than 512 tokens", long_texts
    for family in ("BERT", "RoBERTa", "ALBERT"):
        yield family, partial(make_encoder, family, torch_sdp=False)
        yield f"{family}, enable_torch_sdp", partial(make_encoder, family, torch_sdp=True)
    for name in PARITY:
        yield f"{name}, compared with transformers", partial(make_parity, name)


def find_class(family: str, suffix: str) -> Any:
    from importlib import import_module

    module = {"GPTNeoX": "gpt_neox"}.get(family, family.lower())
    return getattr(import_module(f"curated_transformers.models.{module}"), f"{family}{suffix}")


def make_mask(mask: Tensor) -> Any:
    from curated_transformers.layers import AttentionMask

    return AttentionMask(mask)


def attention_context(torch_sdp: bool) -> Any:
    from curated_transformers.layers import enable_torch_sdp

    return enable_torch_sdp() if torch_sdp else nullcontext()


def make(
    family: str,
    changes: dict[str, Any],
    torch_sdp: bool = False,
    length: int = LENGTH,
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, dict[str, Any]]:
    from curated_transformers.generation import GreedyGeneratorConfig, SampleGeneratorConfig
    from curated_transformers.generation.generator import Generator
    from torch.distributions import Categorical

    config = find_class(family, "Config")(**SIZES, **changes)

    def build() -> nn.Module:
        return find_class(family, "CausalLM")(config).to(dtype).eval()

    model = build()

    def run(tokens: Tensor, mask: Tensor, **options: Any) -> Any:
        with attention_context(torch_sdp):
            return model(tokens, make_mask(mask), **options)

    def logits(tokens: Tensor) -> Tensor:
        return run(tokens, torch.ones_like(tokens, dtype=torch.bool)).logits

    def logits_with_mask(tokens: Tensor, mask: Tensor) -> Tensor:
        return run(tokens, mask, positions=(mask.cumsum(1) - 1).clamp(min=0)).logits

    def logits_with_cache(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        length = tokens.shape[1] + (state[0].key.shape[2] if state else 0)
        output = run(tokens, torch.ones(len(tokens), length, dtype=torch.bool), cache=state, store_cache=True)
        return output.logits, output.cache

    def logits_with_padded_cache(tokens: Tensor, mask: Tensor, state: Any) -> tuple[Tensor, Any]:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        output = run(tokens, mask, positions=positions, cache=state, store_cache=True)
        return output.logits, output.cache

    def generate_padded(tokens: Tensor, mask: Tensor, count: int) -> Tensor:
        options = GreedyGeneratorConfig(eos_id=VOCAB, max_generated_pieces=count)  # no token has this id
        with attention_context(torch_sdp):
            steps = list(Generator(model)(attention_mask=make_mask(mask), ids=tokens, config=options))
        return torch.stack([ids.view(-1) for _, ids in steps], dim=1)

    def sample(logits: Tensor, count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
        # as in Generator: the logits have the shape (batch, 1, vocabulary)
        options = SampleGeneratorConfig(temperature=temperature, top_k=top_k, top_p=top_p)
        transform = options.logits_transform()
        scores = logits.expand(count, 1, -1).clone()
        return Categorical(logits=transform(scores, inplace=True)).sample().view(-1)

    arguments: dict[str, Any] = {
        "logits": logits,
        "logits_with_mask": logits_with_mask,
        "logits_with_cache": logits_with_cache,
        "logits_with_padded_cache": logits_with_padded_cache,
        "generate": lambda tokens, count: generate_padded(tokens, torch.ones_like(tokens, dtype=torch.bool), count),
        "generate_padded": generate_padded,
        "padding_side": "left",
        "positions_skip_padding": True,
        "sample": sample,
        "build_module": build,
        "vocab_size": VOCAB,
        "max_seq_len": length,
        "kv_heads": config.layer.attention.n_key_value_heads,
        "relative_positions": True,
        "trained": False,
    }
    if not config.layer.attention.use_alibi:
        arguments["logits_with_positions"] = lambda tokens, positions: (
            run(tokens, torch.ones_like(tokens, dtype=torch.bool), positions=positions).logits
        )
    return model, arguments


def make_training(torch_sdp: bool) -> tuple[nn.Module, dict[str, Any]]:
    config = {**LLAMA, "n_key_value_heads": 2, "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}
    model, arguments = make("Llama", config, torch_sdp)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(arguments["logits"](tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return model, arguments | {
        "loss": loss,
        "only": ["eval-determinism", "eval-dropout", "loss", "overfit", "causality"],
    }


def make_encoder(family: str, torch_sdp: bool) -> tuple[nn.Module, dict[str, Any]]:
    changes: dict[str, Any] = {"embedding_width": 16 if family == "ALBERT" else 32, "n_attention_heads": 4}
    changes |= {"intermediate_width": 64, "model_max_length": LENGTH, "n_positions": LENGTH}
    changes |= {"n_positions": LENGTH + 2} if family == "RoBERTa" else {}
    config = find_class(family, "Config")(**SIZES, **changes)
    padding_id = getattr(config, "padding_id", 0)

    def build() -> nn.Module:
        return find_class(family, "Encoder")(config).eval()

    model = build()

    def logits_with_mask(tokens: Tensor, mask: Tensor) -> Tensor:
        with attention_context(torch_sdp):
            return model(tokens.masked_fill(~mask, padding_id), make_mask(mask)).last_hidden_layer_state

    return model, {
        "kind": "encoder",
        "logits": lambda tokens: logits_with_mask(tokens, torch.ones_like(tokens, dtype=torch.bool)),
        "logits_with_mask": logits_with_mask,
        "build_module": build,
        "padding_side": "right",
        "special_token_ids": (padding_id,),
        "pad_token_id": padding_id,
        "positions_from_pad_token": family == "RoBERTa",
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "relative_positions": False,
    }


def make_parity(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A random model of transformers, converted by curated-transformers."""
    import transformers

    family, changes = PARITY[name]
    sizes = {} if family == "MPT" else HF_SIZES
    hf_config = transformers.AutoConfig.for_model(**{"vocab_size": VOCAB} | sizes | changes)
    kernel = "sdpa" if "alibi" in changes else "eager"  # eager attention has a defect: falcon_alibi_kernels.py
    reference = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation=kernel).eval()
    for parameter in reference.parameters():  # also biases, which are zero
        parameter.data.normal_(0, 0.2)
    # files on the hub have the fields of the original configs, such as rope_theta
    fields = {**hf_config.to_dict(), **changes, "torch_dtype": "float32", "architectures": [type(reference).__name__]}
    causal_lm = find_class(family, "CausalLM")
    model = causal_lm.from_hf_config(hf_config=fields).eval()
    model.load_state_dict(causal_lm.state_dict_from_hf(reference.state_dict()), strict=False)

    def logits(tokens: Tensor) -> Tensor:
        return model(tokens, make_mask(torch.ones_like(tokens, dtype=torch.bool))).logits

    def reference_logits(tokens: Tensor) -> Tensor:
        return reference(tokens, use_cache=False).logits

    facts = {"vocab_size": VOCAB, "max_seq_len": LENGTH, "only": ["parity", "causality", "batch-isolation"]}
    return model, {"logits": logits, "reference_logits": reference_logits, **facts}
