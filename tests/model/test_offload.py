"""CPU offload: blocks whose weights are copied before each use equal blocks that stay on the device.

Most tests have the CPU in the place of the GPU: weights are copied to buffers, as on a GPU, but without streams.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import save_small_checkpoint, small_checkpoint

import cutaway as ct
from cutaway.errors import InputError
from cutaway.model.parallel.offload import (
    Placement,
    WeightStreamer,
    offload_blocks,
    plan_placement,
    select_offloaded_blocks,
)

TOKENS = torch.arange(24).view(2, 12)


def offloaded_model(preset: str, count: int) -> tuple[Any, WeightStreamer]:
    model = small_checkpoint(preset).model
    names = [f"{name}.blocks.{i}" for name, stack in model.stacks.items() for i in range(len(stack.blocks))]
    streamer = offload_blocks(model, Placement(torch.device("cpu"), tuple(names[-count:])))
    assert streamer is not None
    return model, streamer


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-mla"])
def test_offloaded_equals_resident(preset: str, count: int) -> None:
    """Bit for bit, with and without a KV cache."""
    expected = small_checkpoint(preset).model
    model, streamer = offloaded_model(preset, count)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), expected(TOKENS))
    completions = [ct.generate(each, [[1, 2, 3], [4]], max_new_tokens=6) for each in (model, expected)]
    assert [each.tokens for each in completions[0]] == [each.tokens for each in completions[1]]
    assert streamer.bytes_per_pass >= sum(parameter.nbytes for parameter in model.decoder.blocks[-1].parameters())


def test_encoder_decoder() -> None:
    """The encoder's blocks are used once, the decoder's in each step."""
    expected = small_checkpoint("tiny-t5").model
    model, _ = offloaded_model("tiny-t5", 3)
    for each in (model, expected):
        each.eval()
    with torch.no_grad():
        assert torch.equal(model(TOKENS, TOKENS), expected(TOKENS, TOKENS))


def test_a_block_is_copied_once_per_pass() -> None:
    """The next block is copied ahead. With two offloaded blocks, both buffers keep their block."""
    config = ct.config("tiny-llama").replace({"decoder.layers": 4})
    for count, copies in ((2, 2), (4, 4 * 3 + 1)):  # the last pass has copied the first block of the next
        model = ct.build(config, seed=0).eval()
        names = tuple(f"decoder.blocks.{i}" for i in range(4 - count, 4))
        streamer = offload_blocks(model, Placement(torch.device("cpu"), names))
        assert streamer is not None
        with torch.no_grad():
            for _ in range(3):
                model(TOKENS)
        assert streamer.num_copies == copies


def test_threads_share_the_buffers() -> None:
    model, _ = offloaded_model("tiny-llama", 2)
    model.eval()
    with torch.no_grad():
        expected = model(TOKENS)
    results: list[bool] = []

    def run() -> None:
        with torch.no_grad():
            results.extend(torch.equal(model(TOKENS), expected) for _ in range(10))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 30


def test_failed_pass_releases_the_block() -> None:
    model, _ = offloaded_model("tiny-llama", 1)
    model.eval()
    handle = model.decoder.blocks[-1].attn.register_forward_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model(TOKENS)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(model(TOKENS), small_checkpoint("tiny-llama").model.eval()(TOKENS))


def test_converted_weights_are_refused() -> None:
    """Otherwise the converted weights would have no effect."""
    model, _ = offloaded_model("tiny-llama", 1)
    model.double()
    with torch.no_grad(), pytest.raises(InputError, match="moved or converted; load the model again"):
        model(TOKENS)


def test_the_last_blocks_are_offloaded() -> None:
    """As few as possible; the limit includes two buffers for the largest offloaded block."""
    config = ct.config("tiny-llama").replace({"decoder.layers": 6})
    model = ct.build(config, device="meta")
    block = sum(parameter.nbytes for parameter in model.decoder.blocks[0].parameters())  # type: ignore[union-attr]
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert select_offloaded_blocks(model, total) == ()
    assert select_offloaded_blocks(model, total - 1) == tuple(f"decoder.blocks.{i}" for i in (3, 4, 5))
    assert len(select_offloaded_blocks(model, total - 4 * block)) == 6
    with pytest.raises(InputError, match=r"two buffers for blocks take .* raise the limit"):
        select_offloaded_blocks(model, total - 4 * block - 1)


def test_albert_shares_blocks() -> None:
    """A block that several layers share is not offloaded, because it is used several times in each pass."""
    model = ct.build("tiny-albert", device="meta")
    with pytest.raises(InputError, match="raise the limit"):
        select_offloaded_blocks(model, sum(parameter.nbytes for parameter in model.parameters()) - 1)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("max_memory", "message"),
    [
        ({1: "1GiB"}, "has the key 1; use 0 for the first GPU"),
        ({"cpu": "much"}, "has the value 'much'; pass a number of bytes"),
        ({"cpu": -1}, "has the value -1"),
        ({"cpu": "1KiB"}, "do not fit into the .* GiB of CPU memory"),
        ([1], "max_memory is \\[1\\]; pass a dict"),
    ],
)
def test_invalid_max_memory(max_memory: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_placement(ct.build("tiny-llama", device="meta"), max_memory)


def test_load_options(tmp_path: Path) -> None:
    """Without a GPU, device_map='auto' is the CPU."""
    directory = save_small_checkpoint(tmp_path / "model")
    for options, message in (
        ({"device_map": "balanced"}, "device_map is 'balanced'; pass 'auto'"),
        ({"device_map": "auto", "device": "cpu"}, "device_map and device are both set"),
        ({"device_map": "auto", "tensor_parallel_size": 2}, "device_map and tensor_parallel_size are both set"),
        ({"max_memory": {"cpu": 1}}, "which is not set"),
    ):
        with pytest.raises(InputError, match=message):
            ct.load(directory, **options)  # type: ignore[arg-type]
    checkpoint = ct.load(directory, device_map="auto", max_memory={"cpu": "1GiB"})
    with torch.no_grad():
        assert torch.equal(checkpoint.model(TOKENS), ct.load(directory).model(TOKENS))


def test_adapters_are_refused() -> None:
    model, _ = offloaded_model("tiny-llama", 1)
    with pytest.raises(InputError, match="cannot be added to offloaded weights"):
        model.add_adapter({"rank": 2})


@pytest.mark.gpu
def test_offloaded_from_a_gpu(tmp_path: Path) -> None:
    """Streams and pinned memory: the same logits and tokens as with all weights on the GPU."""
    config = ct.config("tiny-llama").replace({"decoder.layers": 6})
    ct.save(ct.build(config, seed=0), tmp_path / "model")
    resident = ct.load(tmp_path / "model", device="cuda")
    total = sum(parameter.nbytes for parameter in resident.model.parameters())
    checkpoint = ct.load(tmp_path / "model", device_map="auto", max_memory={0: total - 1})
    assert checkpoint.load_report is not None
    assert checkpoint.load_report.offloaded_modules
    assert "tokens/s per sequence" in str(checkpoint.load_report)
    with torch.no_grad():
        for _ in range(3):
            tokens = torch.randint(0, 100, (2, 12), device="cuda")
            assert torch.equal(checkpoint.model(tokens), resident.model(tokens))
    completions = [ct.generate(each, [[1, 2, 3]], max_new_tokens=20, compile=False) for each in (checkpoint, resident)]
    assert completions[0][0].tokens == completions[1][0].tokens
