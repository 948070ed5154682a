"""Traces and edits belong to the context that opened them: other threads run the unedited model."""

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from support.tracing import count_hooks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cutaway as ct
from cutaway.errors import InputError
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.engine import Engine
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.lens import Intervention, context_hooks, edit, trace
from cutaway.model import Transformer

NUM_CALLS = 30
TOKENS = torch.arange(10)[None]
SITES = ("embed", "blocks.1.attn.pattern", "blocks.1.attn.z", "logits")
EDITS: list[dict[str, Any] | None] = [
    None,
    {"blocks.0.attn.pattern": Intervention("zero", heads=[1]), "blocks.1.attn.scores": {"do": "scale", "value": 2}},
    {"blocks.1.resid_post": {"do": "scale", "value": 2.0}},
    {"blocks.0": "skip", "mask": "drop"},
    {"positions": "drop", "final_norm": "drop"},
]


@pytest.fixture(autouse=True)
def _switch_threads_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
    assert not context_hooks.has_active_hooks()


def run_in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """Start all functions at once, each in its own thread, and return their results."""
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(run, function) for function in functions]]


def as_logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


@torch.no_grad()
def run_edited(model: nn.Module, edits: dict[str, Any] | None, site_names: tuple[str, ...]) -> list[Tensor]:
    """Logits and recorded activations of one forward pass with the edits; None runs without a trace either."""
    if edits is None:
        return [as_logits(model(TOKENS))]
    with edit(model, edits), trace(model, *site_names) as t:
        logits = as_logits(model(TOKENS))
    assert all(len(t.calls(name)) == 1 for name in t)
    return [logits, *(t[name].as_subclass(Tensor) for name in t)]


def check_equal_to_serial(
    model: nn.Module, edits: list[dict[str, Any] | None], site_names: tuple[str, ...], num_calls: int = NUM_CALLS
) -> None:
    expected = [run_edited(model, each, site_names) for each in edits]

    def work(each: dict[str, Any] | None) -> list[list[Tensor]]:
        return [run_edited(model, each, site_names) for _ in range(num_calls)]

    results = run_in_threads([lambda each=each: work(each) for each in edits])  # type: ignore[misc]
    for runs, values in zip(results, expected, strict=True):
        assert all(torch.equal(*pair) for run in runs for pair in zip(run, values, strict=True))
    assert count_hooks(model) == 0


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-gpt"])
def test_threads_with_different_edits_equal_serial_runs(preset: str) -> None:
    check_equal_to_serial(ct.build(preset, seed=0).eval(), EDITS, SITES)


def test_threads_with_shared_blocks_equal_serial_runs() -> None:
    settings: Any = ct.config("tiny-gpt").model_dump(mode="json", exclude_none=True)
    settings["decoder"] |= {"layer_groups": 1, "block": settings["decoder"]["block"][:1]}
    edits = [None, {"blocks.1.attn.z": "zero"}, {"blocks.0.ffn.out": "zero"}, {"blocks.0.attn.pattern": "mean"}]
    check_equal_to_serial(ct.build(ct.config(settings), seed=0).eval(), edits, ("attn.z", "resid_post"))


def hf_llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def test_threads_of_a_transformers_model_equal_serial_runs() -> None:
    edits: list[dict[str, Any] | None] = [
        None,
        {"blocks.0.attn.z": Intervention("zero", heads=[1])},
        {"blocks.1.ffn.out": "zero"},
        {"blocks.0.resid_post": {"do": "scale", "value": 0.5}, "logits": {"do": "scale", "value": 2.0}},
    ]
    check_equal_to_serial(hf_llama(), edits, ("resid_post", "resid_mid", "attn.z", "logits"), num_calls=5)


@torch.no_grad()
def test_a_copied_context_inherits_traces_and_edits() -> None:
    model = ct.build("tiny-llama", seed=0).eval()
    plain = model(TOKENS)
    with trace(model, "embed") as t, edit(model, {"blocks.0": "skip"}):
        edited = model(TOKENS)
        inherited = asyncio.run(asyncio.to_thread(model, TOKENS))
        with ThreadPoolExecutor(1) as pool:
            copied = pool.submit(contextvars.copy_context().run, model, TOKENS).result()
            other = pool.submit(model, TOKENS).result()
        kept = contextvars.copy_context()
    assert torch.equal(inherited, edited)
    assert torch.equal(copied, edited)
    assert torch.equal(other, plain)
    assert len(t.calls("embed")) == 3
    assert torch.equal(kept.run(model, TOKENS), plain)  # after the end of the with-block
    assert len(t.calls("embed")) == 3


@torch.no_grad()
def test_tasks_have_their_own_edits() -> None:
    model = ct.build("tiny-llama", seed=0).eval()
    edits: list[Any] = [{"blocks.0": "skip"}, {"blocks.1.attn.z": "zero"}]
    expected = [run_edited(model, each, ("logits",))[0] for each in edits]

    async def task(each: Any) -> Tensor:
        with edit(model, each):
            await asyncio.sleep(0)
            return model(TOKENS)

    async def both() -> list[Tensor]:
        return await asyncio.gather(*map(task, edits))

    assert all(torch.equal(*pair) for pair in zip(asyncio.run(both()), expected, strict=True))


def test_registering_hooks_does_not_break_a_forward_pass_of_another_thread() -> None:
    model, stop = hf_llama(), threading.Event()  # its hooks take keyword arguments, which PyTorch marks separately

    @torch.no_grad()
    def register() -> None:
        while not stop.is_set():
            with trace(model, "*"):
                model(TOKENS)

    worker = threading.Thread(target=register)
    worker.start()
    try:
        with torch.no_grad():
            expected = model(TOKENS).logits
            assert all(torch.equal(model(TOKENS).logits, expected) for _ in range(NUM_CALLS))
    finally:
        stop.set()
        worker.join()


def gradients(model: nn.Module, edits: dict[str, Any], backward: Callable[[Tensor], None]) -> Tensor:
    model.zero_grad()
    with edit(model, edits):
        backward(as_logits(model(TOKENS)).square().mean())
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def backward_in_thread(loss: Tensor) -> None:
    """Backward pass in a thread without the context, as on CUDA."""
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_blocks_are_edited_in_any_thread(mode: Any) -> None:
    model: Transformer = ct.build("tiny-llama", seed=0).train()
    edits = {"blocks.0.attn.pattern": {"do": "scale", "value": 0.5}, "blocks.1.ffn.out": lambda value: value * value}
    expected = gradients(model, edits, Tensor.backward)
    model.use_activation_checkpointing(mode)
    torch.testing.assert_close(gradients(model, edits, Tensor.backward), expected)
    torch.testing.assert_close(gradients(model, edits, backward_in_thread), expected)


def test_recomputation_of_an_unedited_pass_is_not_edited() -> None:
    model: Transformer = ct.build("tiny-llama", seed=0).train().use_activation_checkpointing("full")
    model(TOKENS).square().mean().backward()
    expected = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    model.zero_grad()
    loss = model(TOKENS).square().mean()
    with edit(model, {"blocks.0.ffn.out": lambda value: value * value}):
        loss.backward()
        model(TOKENS)
    actual = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    torch.testing.assert_close(actual, expected)


class CheckpointedModel(nn.Module):
    """A module with another library's checkpointing, which does not keep the context."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=False)


def test_other_checkpointing_in_an_autograd_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The edits of one thread apply; with edits of two threads it is not known whose forward pass is recomputed."""
    model, x = CheckpointedModel(), torch.randn(2, 4, requires_grad=True)

    def gradient(in_autograd_thread: bool) -> Tensor:
        (result,) = torch.autograd.grad(forward(), x, materialize_grads=True) if not in_autograd_thread else emulate()
        return result

    def forward() -> Tensor:
        return model(x).sum()

    def emulate() -> tuple[Tensor, ...]:
        loss, results = forward(), []
        dummy = type(threading._DummyThread.__name__, (threading._DummyThread,), {})  # type: ignore[attr-defined]

        def work() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(threading, "current_thread", lambda: dummy.__new__(dummy))
                try:
                    results.append(torch.autograd.grad(loss, x))
                except Exception as error:
                    results.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    edits = {"layer.out": lambda value: value * value}
    with edit(model, edits):
        expected = gradient(False)
        torch.testing.assert_close(gradient(True), expected)
        ready, stop = threading.Event(), threading.Event()

        def edit_elsewhere() -> None:
            with edit(model, edits), torch.no_grad():
                model(x)
                ready.set()
                stop.wait()

        other = threading.Thread(target=edit_elsewhere)
        other.start()
        ready.wait()
        try:
            with pytest.raises(InputError, match="several threads have an active trace or edit"):
                gradient(True)
        finally:
            stop.set()
            other.join()


def test_generation_is_edited_in_the_thread_of_the_engine() -> None:
    model, params = ct.build("tiny-llama", seed=0).eval(), SamplingParams(max_new_tokens=8, temperature=0.0)

    def generate(*, in_thread: bool) -> list[int]:
        with Engine(EngineConfig(model, max_model_len=32)) as engine:
            request = engine.submit([1, 2, 3], params, seed=0)
            if in_thread:
                engine.start()
            else:
                engine.run()
            return request.result().tokens

    plain = generate(in_thread=False)
    with edit(model, {"blocks.0": "skip", "blocks.1.ffn.out": "zero"}):
        edited = generate(in_thread=False)
        assert generate(in_thread=True) == edited
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(generate, in_thread=True).result() == plain
    assert edited != plain
