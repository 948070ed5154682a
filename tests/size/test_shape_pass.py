"""The shape pass against PyTorch: equal FLOPs and equal bytes saved for backward."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import HEADS, configs, random_tokens
from support.flop_and_memory_counters import build_model, compute_loss, count_flops, count_saved_bytes

from cutaway.config import Config, config, presets
from cutaway.size.shape_pass import ExecutionConfig, inference_pass, training_pass

BATCH_SIZE, SEQ_LEN, SOURCE_LEN = 2, 11, 7
TINY = [name for name in presets() if name.startswith("tiny-")]
MODES = ("none", "selective", "full")
KERNELS = st.sampled_from(["auto", "explicit"])


def cpu_execution(
    kernel: str, activation_checkpointing: str = "none", *, itemsize: int = 4, autocast: bool = False
) -> ExecutionConfig:
    return ExecutionConfig(
        weight_itemsize=itemsize,
        compute_itemsize=2 if autocast else itemsize,
        autocast=autocast,
        kernel=kernel,
        activation_checkpointing=activation_checkpointing,
        device="cpu",
    )


@pytest.mark.nightly
@given(model=configs(heads=HEADS), kernel=KERNELS, mode=st.sampled_from(MODES))
def test_training_flops_match_flop_counter(model: Config, kernel: str, mode: str) -> None:
    module = build_model(model, kernel=kernel, activation_checkpointing=mode)
    loss, forward_flops = count_flops(lambda: compute_loss(module, BATCH_SIZE, SEQ_LEN, SOURCE_LEN))
    _, backward_flops = count_flops(lambda: loss.sum().backward())
    full = training_pass(
        model, BATCH_SIZE, SEQ_LEN, cpu_execution(kernel, mode), source_len=SOURCE_LEN
    ).counter.full_flops
    assert sum(flops for (phase, _), flops in full.items() if phase == "forward") == forward_flops
    assert sum(flops for (phase, _), flops in full.items() if phase != "forward") == backward_flops


@given(model=configs(forms=("decoder", "encoder-decoder")), kernel=KERNELS)
def test_decode_flops_match_flop_counter(model: Config, kernel: str) -> None:
    module = build_model(model, kernel=kernel).eval()
    cache = module.new_cache(BATCH_SIZE, SEQ_LEN)
    tokens = random_tokens(model, BATCH_SIZE, SEQ_LEN, 1)
    if model.form == "decoder":
        module(tokens[:, :-1], cache=cache)
        _, flops = count_flops(lambda: module(tokens[:, -1:], cache=cache))
    else:
        module(random_tokens(model, BATCH_SIZE, SOURCE_LEN, 2, "source"), tokens[:, :-1], cache=cache)
        _, flops = count_flops(lambda: module(None, tokens[:, -1:], cache=cache))
    assert (
        sum(
            inference_pass(
                model, BATCH_SIZE, 1, cpu_execution(kernel), source_len=SOURCE_LEN, num_cached_tokens=SEQ_LEN - 1
            ).counter.full_flops.values()
        )
        == flops
    )


@given(model=configs(heads=HEADS), kernel=KERNELS)
def test_inference_flops_equal_training_forward_flops(model: Config, kernel: str) -> None:
    inference = inference_pass(
        model, BATCH_SIZE, SEQ_LEN, cpu_execution(kernel), source_len=SOURCE_LEN
    ).counter.full_flops
    training = training_pass(
        model, BATCH_SIZE, SEQ_LEN, cpu_execution(kernel), source_len=SOURCE_LEN
    ).counter.full_flops
    assert inference == {key: flops for key, flops in training.items() if key[0] == "forward"}


@given(
    model=configs(heads=HEADS),
    kernel=KERNELS,
    mode=st.sampled_from(MODES),
    precision=st.sampled_from([(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]),
)
def test_saved_bytes_match_autograd(model: Config, kernel: str, mode: str, precision: tuple[torch.dtype, bool]) -> None:
    dtype, autocast = precision
    module = build_model(model, kernel=kernel, activation_checkpointing=mode, dtype=dtype)
    saved_bytes = count_saved_bytes(module, BATCH_SIZE, SEQ_LEN, SOURCE_LEN, autocast=autocast)
    execution = cpu_execution(kernel, mode, itemsize=dtype.itemsize, autocast=autocast)
    assert training_pass(model, BATCH_SIZE, SEQ_LEN, execution, source_len=SOURCE_LEN).saved_bytes == pytest.approx(
        saved_bytes, rel=0.02
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TINY)
def test_saved_bytes_are_exact_for_tiny_presets(name: str, mode: str) -> None:
    model = config(name)
    module = build_model(model, kernel="auto", activation_checkpointing=mode)
    assert training_pass(model, 2, 16, cpu_execution("auto", mode)).saved_bytes == count_saved_bytes(module, 2, 16, 16)


def test_backward_frees_everything_but_gradients() -> None:
    """After backward only the weight gradients remain allocated."""
    from cutaway.size.shape_pass.loss import cross_entropy
    from cutaway.size.shape_pass.model import PassShape, compute_hidden, compute_logits
    from cutaway.size.shape_pass.tape import Tape

    for mode in MODES:
        tape = Tape(cpu_execution("auto", mode))
        model = config("tiny-llama")
        tape.backward(
            cross_entropy(tape, compute_logits(tape, compute_hidden(tape, model, PassShape(2, 16, 16)), model))
        )
        assert tape.memory_tracker.current_bytes == sum(storage.nbytes for storage in tape.weight_grads.values())


@given(model=configs(heads=HEADS), kernel=KERNELS, mode=st.sampled_from(MODES))
def test_recomputed_flops_are_counted_in_every_mode(model: Config, kernel: str, mode: str) -> None:
    without = training_pass(model, BATCH_SIZE, SEQ_LEN, cpu_execution(kernel), source_len=SOURCE_LEN).counter
    with_mode = training_pass(model, BATCH_SIZE, SEQ_LEN, cpu_execution(kernel, mode), source_len=SOURCE_LEN).counter
    assert sum(full for _, full, _ in without.recomputed_matmuls[mode]) == sum(
        flops for (phase, _), flops in with_mode.full_flops.items() if phase == "recompute"
    )
