"""gpt-fast: Llama with FlexAttention; all forward passes use the KV cache and take a block mask and `input_pos`.

FlexAttention without torch.compile cannot run in the dispatch modes of the checks; SDPA with the same mask replaces it.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NAME = "gpt-fast"
HOMEPAGE = "https://github.com/meta-pytorch/gpt-fast"
REQUIREMENTS = ("sentencepiece==0.2.1", "tiktoken==0.14.0")
REPOSITORY = ("meta-pytorch/gpt-fast", "6ecad9b5b6b987d17ac4303965545873d0192086")
LENGTH, VOCAB = 96, 64
SIZES = {"block_size": LENGTH, "vocab_size": VOCAB, "n_layer": 2, "n_head": 4, "dim": 32, "intermediate_size": 64}
LLAMA3_ROPE = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "Llama", partial(make, {})
    yield "Llama, grouped heads", partial(make, {"n_local_heads": 2})
    yield "Llama, one kv head", partial(make, {"n_local_heads": 1})
    yield "Llama-3.1, RoPE scaling", partial(make, {"n_local_heads": 2, "rope_scaling": LLAMA3_ROPE})
    yield "Llama, cache for a longer text", partial(make, {"n_local_heads": 2}, cache_length=2 * LENGTH)
    yield "Llama, speculative decoding", partial(make, {}, speculative=True)
    yield "Mixtral, bfloat16", make_mixtral


def attend(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, enable_gqa: bool) -> Tensor:
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    mask = block_mask.mask_mod(0, 0, rows, columns)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)


def make(
    changes: dict[str, Any], cache_length: int = LENGTH, speculative: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    import generate as library
    import model as model_library
    from model import ModelArgs, Transformer
    from torch.nn.attention.flex_attention import create_block_mask

    model_library.flex_attention = attend
    base_mask = cache(partial(create_block_mask, library.causal_mask, 1, 1, device="cpu"))

    def make_mask(mask_mod: Any, batch: int, heads: int, rows: int, columns: int, device: Any = None) -> Any:
        return copy(base_mask(rows, columns))  # `forward` changes the mask_mod of the mask

    library.create_block_mask = make_mask  # without torch.compile
    sizes = SIZES | changes

    def build() -> nn.Module:
        return Transformer(ModelArgs(**sizes)).eval()

    model, draft_model = build(), build()

    def set_up(batch_size: int) -> None:
        model.max_seq_length = model.max_batch_size = -1  # as for a new model
        model.setup_caches(max_batch_size=batch_size, max_seq_length=cache_length)

    def logits_with_cache(tokens: Tensor, start: int | None) -> tuple[Tensor, int]:
        if start is None:
            set_up(len(tokens))
            mask = make_mask(library.causal_mask, 1, 1, tokens.shape[1], model.max_seq_length)
            return model(mask, tokens, torch.arange(tokens.shape[1])), tokens.shape[1]
        block_mask = make_mask(library.causal_mask, 1, 1, model.max_seq_length, model.max_seq_length)
        steps = []
        for i in range(tokens.shape[1]):  # as in decode_one_token
            position = torch.tensor([start + i])
            mask = block_mask[:, :, position // block_mask.BLOCK_SIZE[0]]
            mask.mask_mod = block_mask.mask_mod
            mask.seq_lengths = (1, model.max_seq_length)
            steps.append(model(mask, tokens[:, i : i + 1], position))
        return torch.cat(steps, dim=1), start + tokens.shape[1]

    def generate(tokens: Tensor, count: int, draft_model: nn.Module | None = None) -> Tensor:
        options = {"interactive": False, "draft_model": draft_model, "speculate_k": 3, "temperature": 0.0}
        rows = []
        for row in tokens:
            model.max_seq_length = model.max_batch_size = -1
            rows.append(library.generate(model, row, count, 1, **options)[0][0, len(row) :])
        return torch.stack(rows)

    def sample(logits: Tensor, count: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        return library.sample(logits.expand(count, 1, -1), temperature, top_k)[0].view(-1)

    arguments = {
        "logits": lambda tokens: logits_with_cache(tokens, None)[0],
        "logits_with_cache": logits_with_cache,
        "generate": generate,
        "sample": sample,
        "build_module": build,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "kv_heads": model.config.n_local_heads,
        "relative_positions": True,
        "trained": False,
    }
    if speculative:
        arguments["generate_speculative"] = partial(generate, draft_model=draft_model)
        arguments["only"] = ["speculative-decoding", "generation", "sampling", "causality"]
    return model, arguments


def make_mixtral() -> tuple[nn.Module, dict[str, Any]]:
    import model as llama

    # a package of its own, whose modules have the names of those of Llama
    path = Path(llama.__file__).parent / "mixtral-moe" / "model.py"
    spec = spec_from_file_location("mixtral_model", path)
    assert spec is not None
    assert spec.loader is not None
    library = module_from_spec(spec)
    spec.loader.exec_module(library)
    sizes = SIZES | {"n_local_heads": 2, "num_experts": 4, "num_activated_experts": 2}

    def build() -> nn.Module:
        model = library.Transformer(library.ModelArgs(**sizes))
        for parameter in model.parameters():
            if parameter.dim() == 3:  # experts, which are not initialized
                parameter.data.normal_(0, 0.1)
        return model.bfloat16().eval()  # the KV cache is always in bfloat16

    model = build()

    def logits_with_cache(tokens: Tensor, start: int | None) -> tuple[Tensor, int]:
        if start is None:
            model.max_seq_length = model.max_batch_size = -1
            model.setup_caches(max_batch_size=len(tokens), max_seq_length=LENGTH)
        begin, end = start or 0, (start or 0) + tokens.shape[1]
        # `forward` flattens batch and positions in the experts and takes one text
        rows = []
        for row in tokens[:, None]:
            rows.append(model(row, torch.arange(begin, end)).view(1, end - begin, VOCAB))
        return torch.cat(rows), end

    def logits(tokens: Tensor) -> Tensor:
        return torch.cat([logits_with_cache(row, None)[0] for row in tokens[:, None]])

    return model, {
        "logits": logits,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "kv_heads": 2,
        "relative_positions": True,
        "trained": False,
    }
