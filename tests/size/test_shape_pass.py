"""The pass on shapes is the pass of the real model: the same FLOPs, and the same bytes kept for the way back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import configs, random_tokens
from support.flop_and_memory_counters import build_model, compute_loss, count_flops, count_saved_bytes

from cutaway.config import Config, config, presets
from cutaway.size.shape_pass import ExecutionConfig, inference_pass, training_pass

BATCH, LENGTH, SOURCE = 2, 11, 7
TINY = [name for name in presets() if name.startswith("tiny-")]
MODES = ("none", "selective", "full")
KERNELS = st.sampled_from(["auto", "explicit"])


def on_cpu(kernel: str, recompute: str = "none", *, weights: int = 4, autocast: bool = False) -> ExecutionConfig:
    return ExecutionConfig(
        weight_itemsize=weights,
        compute_itemsize=2 if autocast else weights,
        autocast=autocast,
        kernel=kernel,
        activation_checkpointing=recompute,
        device="cpu",
    )


@given(model=configs(), kernel=KERNELS, mode=st.sampled_from(MODES))
def test_a_training_step_multiplies_what_is_counted(model: Config, kernel: str, mode: str) -> None:
    real = build_model(model, kernel=kernel, activation_checkpointing=mode)
    loss, there = count_flops(lambda: compute_loss(real, BATCH, LENGTH, SOURCE))
    _, back = count_flops(lambda: loss.sum().backward())
    full = training_pass(model, BATCH, LENGTH, on_cpu(kernel, mode), source_len=SOURCE).counter.full_flops
    assert sum(flops for (phase, _), flops in full.items() if phase == "forward") == there
    assert sum(flops for (phase, _), flops in full.items() if phase != "forward") == back


@given(model=configs(forms=("decoder", "encoder-decoder")), kernel=KERNELS)
def test_a_step_of_decoding_multiplies_what_is_counted(model: Config, kernel: str) -> None:
    real = build_model(model, kernel=kernel).eval()
    cache = real.new_cache(BATCH, LENGTH)
    tokens = random_tokens(model, BATCH, LENGTH, 1)
    if model.form == "decoder":
        real(tokens[:, :-1], cache=cache)
        _, flops = count_flops(lambda: real(tokens[:, -1:], cache=cache))
    else:
        real(random_tokens(model, BATCH, SOURCE, 2, "source"), tokens[:, :-1], cache=cache)
        _, flops = count_flops(lambda: real(None, tokens[:, -1:], cache=cache))
    assert (
        sum(
            inference_pass(
                model, BATCH, 1, on_cpu(kernel), source_len=SOURCE, num_cached_tokens=LENGTH - 1
            ).counter.full_flops.values()
        )
        == flops
    )


@given(model=configs(), kernel=KERNELS)
def test_reading_multiplies_what_training_does_forward(model: Config, kernel: str) -> None:
    reading = inference_pass(model, BATCH, LENGTH, on_cpu(kernel), source_len=SOURCE).counter.full_flops
    learnt = training_pass(model, BATCH, LENGTH, on_cpu(kernel), source_len=SOURCE).counter.full_flops
    assert reading == {key: flops for key, flops in learnt.items() if key[0] == "forward"}


@given(
    model=configs(),
    kernel=KERNELS,
    mode=st.sampled_from(MODES),
    numbers=st.sampled_from([(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]),
)
def test_what_waits_for_the_way_back_is_what_autograd_keeps(
    model: Config, kernel: str, mode: str, numbers: tuple[torch.dtype, bool]
) -> None:
    dtype, autocast = numbers
    real = build_model(model, kernel=kernel, activation_checkpointing=mode, dtype=dtype)
    kept = count_saved_bytes(real, BATCH, LENGTH, SOURCE, autocast=autocast)
    setting = on_cpu(kernel, mode, weights=dtype.itemsize, autocast=autocast)
    assert training_pass(model, BATCH, LENGTH, setting, source_len=SOURCE).saved_bytes == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TINY)
def test_it_is_exact_for_ordinary_models(name: str, mode: str) -> None:
    model = config(name)
    real = build_model(model, kernel="auto", activation_checkpointing=mode)
    assert training_pass(model, 2, 16, on_cpu("auto", mode)).saved_bytes == count_saved_bytes(real, 2, 16, 16)


def test_nothing_is_left_over() -> None:
    """What a pass allocates is freed: only the gradients of the weights stay."""
    from cutaway.size.shape_pass.loss import cross_entropy
    from cutaway.size.shape_pass.model import compute_hidden, compute_logits
    from cutaway.size.shape_pass.tape import Tape

    for mode in MODES:
        tape = Tape(on_cpu("auto", mode))
        model = config("tiny-llama")
        tape.backward(cross_entropy(tape, compute_logits(tape, compute_hidden(tape, model, 2, 16, 16), model)))
        assert tape.memory_tracker.current_bytes == sum(storage.nbytes for storage in tape.weight_grads.values())


@given(model=configs(), kernel=KERNELS, mode=st.sampled_from(MODES))
def test_what_a_mode_would_do_again_is_known_without_it(model: Config, kernel: str, mode: str) -> None:
    plain = training_pass(model, BATCH, LENGTH, on_cpu(kernel), source_len=SOURCE).counter
    done = training_pass(model, BATCH, LENGTH, on_cpu(kernel, mode), source_len=SOURCE).counter
    assert sum(full for _, full, _ in plain.recomputed_matmuls[mode]) == sum(
        flops for (phase, _), flops in done.full_flops.items() if phase == "recompute"
    )
