"""The walk on sizes is the pass of the real model: the same FLOPs, and the same bytes kept for the way back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measured import counted, kept_bytes, loss_of, model_for
from strategies import configs, tokens_for

from cutaway.config import Config, config, presets
from cutaway.size.walk import Setting, read, train

BATCH, LENGTH, SOURCE = 2, 11, 7
TINY = [name for name in presets() if name.startswith("tiny-")]
MODES = ("none", "selective", "full")
KERNELS = st.sampled_from(["auto", "explicit"])


def on_cpu(kernel: str, recompute: str = "none", *, weights: int = 4, autocast: bool = False) -> Setting:
    return Setting(
        weights=weights,
        compute=2 if autocast else weights,
        autocast=autocast,
        kernel=kernel,
        recompute=recompute,
        device="cpu",
    )


@given(model=configs(), kernel=KERNELS, mode=st.sampled_from(MODES))
def test_a_training_step_multiplies_what_is_counted(model: Config, kernel: str, mode: str) -> None:
    real = model_for(model, kernel=kernel, recompute=mode)
    loss, there = counted(lambda: loss_of(real, BATCH, LENGTH, SOURCE))
    _, back = counted(lambda: loss.sum().backward())
    full = train(model, BATCH, LENGTH, on_cpu(kernel, mode), source=SOURCE).tally.full
    assert sum(flops for (phase, _), flops in full.items() if phase == "forward") == there
    assert sum(flops for (phase, _), flops in full.items() if phase != "forward") == back


@given(model=configs(forms=("decoder", "encoder-decoder")), kernel=KERNELS)
def test_a_step_of_decoding_multiplies_what_is_counted(model: Config, kernel: str) -> None:
    real = model_for(model, kernel=kernel).eval()
    cache = real.new_cache(BATCH, LENGTH)
    tokens = tokens_for(model, BATCH, LENGTH, 1)
    if model.form == "decoder":
        real(tokens[:, :-1], cache=cache)
        _, flops = counted(lambda: real(tokens[:, -1:], cache=cache))
    else:
        real(tokens_for(model, BATCH, SOURCE, 2, "source"), tokens[:, :-1], cache=cache)
        _, flops = counted(lambda: real(None, tokens[:, -1:], cache=cache))
    assert sum(read(model, BATCH, 1, on_cpu(kernel), source=SOURCE, past=LENGTH - 1).tally.full.values()) == flops


@given(model=configs(), kernel=KERNELS)
def test_reading_multiplies_what_training_does_forward(model: Config, kernel: str) -> None:
    reading = read(model, BATCH, LENGTH, on_cpu(kernel), source=SOURCE).tally.full
    learnt = train(model, BATCH, LENGTH, on_cpu(kernel), source=SOURCE).tally.full
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
    real = model_for(model, kernel=kernel, recompute=mode, dtype=dtype)
    kept = kept_bytes(real, BATCH, LENGTH, SOURCE, autocast=autocast)
    setting = on_cpu(kernel, mode, weights=dtype.itemsize, autocast=autocast)
    assert train(model, BATCH, LENGTH, setting, source=SOURCE).kept_bytes == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TINY)
def test_it_is_exact_for_ordinary_models(name: str, mode: str) -> None:
    model = config(name)
    real = model_for(model, kernel="auto", recompute=mode)
    assert train(model, 2, 16, on_cpu("auto", mode)).kept_bytes == kept_bytes(real, 2, 16, 16)


def test_nothing_is_left_over() -> None:
    """What a pass allocates is freed: only the gradients of the weights stay."""
    from cutaway.size.walk.loss import cross_entropy
    from cutaway.size.walk.model import logits, stream
    from cutaway.size.walk.tape import Tape

    for mode in MODES:
        tape = Tape(on_cpu("auto", mode))
        model = config("tiny-llama")
        tape.backward(cross_entropy(tape, logits(tape, stream(tape, model, 2, 16, 16), model)))
        assert tape.meter.live == sum(storage.bytes for storage in tape.gradients.values())


@given(model=configs(), kernel=KERNELS, mode=st.sampled_from(MODES))
def test_what_a_mode_would_do_again_is_known_without_it(model: Config, kernel: str, mode: str) -> None:
    plain = train(model, BATCH, LENGTH, on_cpu(kernel), source=SOURCE).tally
    done = train(model, BATCH, LENGTH, on_cpu(kernel, mode), source=SOURCE).tally
    assert sum(full for _, full, _ in plain.again[mode]) == sum(
        flops for (phase, _), flops in done.full.items() if phase == "recompute"
    )
