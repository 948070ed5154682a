"""GPU tests: FlexAttention with gradients, grouped matmul, torch.compile, CUDA graphs, memory. `make gpu` runs them."""

from typing import Any

import pytest
import torch
from support.config_strategies import build_randomized_model, compute_logits, random_tokens, tolerance

import cutaway as ct
from cutaway import config as c
from cutaway.errors import KernelError

pytestmark = [pytest.mark.gpu, pytest.mark.unchecked]
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa and rope": {"heads": 4, "kv_heads": 2},
    "window": {"heads": 2, "window": 9},
    "alibi": {"heads": 3, "position": {"kind": "alibi"}},
    "relative bias": {"heads": 2, "position": {"kind": "relative-bias"}},
    "softcap and sink": {"heads": 2, "softcap": 3.0, "sink": True},
    "softcap, alibi, window": {"heads": 2, "softcap": 3.0, "window": 20, "position": {"kind": "alibi"}},
    "latent": {"kind": "latent", "heads": 2, "kv_rank": 16, "d_nope": 16, "d_rope": 16, "d_value": 16},
}


@pytest.fixture(autouse=True)
def _fp32_matmul_precision() -> None:
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()


def build_config(name: str) -> c.Config:
    attention = VARIANTS[name] | ({} if name == "latent" else {"d_head": 32})
    block = {"attention": attention, "ffn": {"kind": "moe", "experts": 4, "router": {"top_k": 2}}}
    stack = {"layers": 2, "block": block}
    return c.config({"form": "decoder", "vocab_size": 97, "d_model": 64, "decoder": stack})


def mask_kwargs(length: int) -> dict[str, dict[str, torch.Tensor]]:
    order = torch.arange(length, device="cuda").expand(2, length)
    num_padding = torch.tensor([[0], [length // 3]], device="cuda")
    return {
        "plain": {},
        "left": {"mask": order >= num_padding},
        "right": {"mask": order < length - num_padding},
        "packed": {"document_ids": (order > length // 2).long()},
        "prefix": {"prefix_lengths": torch.tensor([0, length // 2], device="cuda")},
    }


def gradients(model: torch.nn.Module, out: torch.Tensor, is_real: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out[is_real].square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compare_kernels(name: str, kernels: tuple[str, ...], mask_names: tuple[str, ...]) -> None:
    config = build_config(name)
    model = build_randomized_model(config).cuda()
    tokens = random_tokens(config, 2, 70, 0).cuda()
    for mask_name in mask_names:
        kwargs = mask_kwargs(70)[mask_name]
        is_real = kwargs.get("mask", torch.ones_like(tokens, dtype=torch.bool))
        reference = model.use_kernel("explicit")(tokens, **kwargs)
        reference_grads = gradients(model, reference, is_real)
        for kernel in kernels:
            out = model.use_kernel(kernel)(tokens, **kwargs)
            max_error = float((out - reference)[is_real].abs().max())
            assert max_error <= tolerance(torch.float32, reference.detach()), (mask_name, kernel)
            for grad, reference_grad in zip(gradients(model, out, is_real), reference_grads, strict=True):
                assert torch.isfinite(grad).all(), (mask_name, kernel)
                assert (grad - reference_grad).norm() <= 1e-4 * max(1e-3, float(reference_grad.norm())), (
                    mask_name,
                    kernel,
                )


@pytest.mark.parametrize("name", [name for name in VARIANTS if "softcap" not in name])
def test_sdpa_equals_explicit_forward_and_backward(name: str) -> None:
    compare_kernels(name, ("sdpa",), tuple(mask_kwargs(70)))


@pytest.mark.parametrize("name", VARIANTS)
def test_flex_equals_explicit_forward_and_backward(name: str) -> None:
    compare_kernels(name, ("flex",), ("left",))


def test_flex_with_packed_documents_and_prefixes() -> None:
    compare_kernels("gqa and rope", ("flex",), ("packed", "prefix"))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("feature", "value"), [("softcap", 30.0), ("sink", True)])
@torch.no_grad()
def test_auto_needs_no_memory_for_scores(feature: str, value: object, *, padded: bool) -> None:
    """For long sequences, `auto` uses flex attention where SDPA has no soft-cap and no sinks."""
    config = c.config("tiny-llama").replace({"context": 4096, f"decoder.block.attention.{feature}": value})
    model = build_randomized_model(config).cuda()
    tokens = random_tokens(config, 2, 4096, 0).cuda()
    mask = torch.arange(4096, device="cuda")[None] >= torch.tensor([[0], [100]], device="cuda") if padded else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = model.hidden_states(tokens, mask)
    assert torch.cuda.max_memory_allocated() - before < 2 * config.decoder.blocks[0].attention.heads * 4096**2
    reference = model.use_kernel("explicit").hidden_states(tokens, mask)
    is_real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    assert (x - reference)[is_real].abs().max() <= tolerance(torch.float32, reference)


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_flex_memory_is_linear_in_the_sequence_length(padded: bool) -> None:
    """A mask of all query-key pairs would have 32768² entries, 1 GiB."""
    config = c.config("tiny-llama").replace(context=32768)
    model = ct.build(config, device="cuda", dtype=torch.bfloat16, seed=0).use_kernel("flex")
    tokens = torch.randint(0, 97, (1, 32768), device="cuda")
    mask = torch.arange(32768, device="cuda")[None] >= 100 if padded else None
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.hidden_states(tokens, mask)
    assert torch.cuda.max_memory_allocated() - before < 2**29


@torch.no_grad()
def test_flex_is_causal() -> None:
    """For every length up to 70, with and without padding, one changed token at a time."""
    config = build_config("gqa and rope")
    model = build_randomized_model(config).cuda().use_kernel("flex")
    for length in range(1, 71):
        tokens = random_tokens(config, 1, length, length).cuda()
        for num_padding in {0, length // 4}:
            positions = [num_padding, (num_padding + length) // 2, length - 1]
            changed = tokens.repeat(3, 1)
            for row, position in enumerate(positions):
                changed[row, position] = (changed[row, position] + 1) % 97
            mask = (torch.arange(length, device="cuda") >= num_padding).expand(3, length)
            before, after = model(tokens.repeat(3, 1), mask), model(changed, mask)
            for row, position in enumerate(positions):
                earlier = (after - before)[
                    row, num_padding:position
                ].abs()  # expert matmuls round differently with another number of rows
                assert (earlier <= tolerance(torch.float32, before)).all(), (length, position)
                assert (after - before)[row, position].abs().max() > 1e-2, (length, position)


@pytest.mark.parametrize("name", ["gqa and rope", "softcap and sink", "latent"])
def test_compiled_equals_eager(name: str) -> None:
    config = build_config(name)
    model = build_randomized_model(config).cuda()
    tokens = random_tokens(config, 2, 64, 0).cuda()
    eager = model(tokens)
    reference_grads = gradients(model, eager, torch.ones_like(tokens, dtype=torch.bool))
    out = torch.compile(model, fullgraph=True)(tokens)
    assert (out - eager).abs().max() <= tolerance(torch.float32, eager)
    for grad, reference_grad in zip(
        gradients(model, out, torch.ones_like(tokens, dtype=torch.bool)), reference_grads, strict=True
    ):
        assert (grad - reference_grad).norm() <= 1e-4 * max(1e-3, float(reference_grad.norm()))


@torch.no_grad()
def test_flex_compiles_without_graph_breaks() -> None:
    config = build_config("window")
    model = build_randomized_model(config).cuda()
    tokens = random_tokens(config, 2, 64, 0).cuda()
    eager = model(tokens)
    out = torch.compile(model.use_kernel("flex"), fullgraph=True)(tokens)
    assert (out - eager).abs().max() <= tolerance(torch.float32, eager)


@torch.no_grad()
def test_compiled_decode_step_in_a_cuda_graph() -> None:
    config = build_config("gqa and rope")
    model = build_randomized_model(config).cuda()
    tokens = random_tokens(config, 2, 20, 0).cuda()
    full = model(tokens)
    cache = model.new_cache(2, 32)
    cache.static_shapes = True
    model(tokens[:, :10], cache=cache)
    step = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for i in range(10, 20):
        torch.compiler.cudagraph_mark_step_begin()
        out = step(tokens[:, i : i + 1].clone(), cache=cache).clone()
        assert (out[:, 0] - full[:, i]).abs().max() <= tolerance(torch.float32, full)


@torch.no_grad()
def test_bf16_grouped_mm_is_close_to_fp32() -> None:
    config = build_config("gqa and rope")
    fp32_model = build_randomized_model(config).cuda()
    bf16_model = build_randomized_model(config).cuda().to(torch.bfloat16)
    tokens = random_tokens(config, 2, 64, 0).cuda()
    reference = fp32_model(tokens)
    error = (bf16_model(tokens).float() - reference).abs().mean() / reference.abs().mean()
    assert error < 0.05


@torch.no_grad()
def test_token_ids_are_checked_on_the_gpu() -> None:
    model = build_randomized_model(build_config("window")).cuda()
    with pytest.raises(ValueError, match="tokens holds 97; the vocabulary has 97 ids"):
        model(torch.full((1, 3), 97, device="cuda"))


def test_flex_rejects_small_heads() -> None:
    config = c.config("tiny-gpt")
    model = build_randomized_model(config).cuda().use_kernel("flex")
    with pytest.raises(KernelError, match="at least 16"):
        compute_logits(model, config, random_tokens(config, 1, 4, 0).cuda())


@pytest.mark.parametrize(
    ("name", "batch", "context", "dtype", "mode"),
    [
        ("gpt2", 8, 1024, "mixed", "none"),
        ("gpt2", 8, 1024, "mixed", "full"),
        ("llama-3.2-1b", 2, 2048, "bf16", "none"),
        ("llama-3.2-1b", 2, 2048, "bf16", "selective"),
    ],
)
def test_training_memory_matches_size_estimate(name: str, batch: int, context: int, dtype: str, mode: str) -> None:
    size = ct.size(
        name,
        mode="train",
        batch_size=batch,
        context=context,
        dtype=dtype,
        activation_checkpointing=mode,
        hardware="h200",
    )
    before = torch.cuda.memory_allocated()
    weight_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = ct.build(name, device="cuda", dtype=weight_dtype, seed=0).train().use_activation_checkpointing(mode)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, model.config.vocab_size, (batch, context + 1), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "mixed"):
            out = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del out, loss
    measured = torch.cuda.max_memory_allocated() - before
    assert 0.98 * measured <= size.memory.total_bytes <= 1.05 * measured
