"""CutawayLM: log-likelihoods and generated texts equal those of single requests, for any batch size.

The harness itself is a large dependency, so a stub of its base class and registry replaces it here.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from support.config_strategies import build_randomized_model

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.evaluate.loglikelihood import LoglikelihoodRequest, compute_loglikelihoods, rolling_windows
from cutaway.families.checkpoint import Checkpoint
from cutaway.tokenizer import Tokenizer, byte_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. "


class LM:
    """Stub of lm_eval.api.model.LM."""

    def __init__(self) -> None:
        self._device: Any = None


@dataclass
class Request:
    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def harness() -> Iterator[dict[str, Any]]:
    """Import cutaway.evaluate.lm_eval with the stub; yield the registered models."""
    registered: dict[str, Any] = {}
    names = ("lm_eval", "lm_eval.models", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    stubs: dict[str, Any] = {name: ModuleType(name) for name in names}
    stubs["lm_eval.api.model"].LM = LM
    stubs["lm_eval.api.registry"].register_model = lambda name: lambda cls: registered.setdefault(name, cls)
    before = {name: sys.modules.get(name) for name in (*stubs, "cutaway.evaluate.lm_eval")}
    sys.modules.update(stubs)
    sys.modules.pop("cutaway.evaluate.lm_eval", None)
    import_module("cutaway.evaluate.lm_eval")
    yield registered
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    tokenizer = byte_tokenizer()
    config = ct.config("tiny-llama").replace(vocab_size=tokenizer.vocab_size)
    return Checkpoint(build_randomized_model(config), config, tokenizer_loader=lambda: tokenizer)


def reference_loglikelihood(
    model: Any, context: list[int], continuation: list[int], max_length: int
) -> tuple[float, bool]:
    """Log-likelihood and greedy flag of a single request."""
    ids = [*context, *continuation][-max_length - 1 :]
    with torch.no_grad():
        log_probs = model.eval()(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)[-len(continuation) :]
    loglikelihood = sum(float(row[token]) for row, token in zip(log_probs, continuation, strict=True))
    return loglikelihood, log_probs.argmax(-1).tolist() == continuation


def request_pairs() -> list[tuple[str, str]]:
    """Several lengths; contexts that are shared, empty, end in a space, or exceed max_length."""
    pairs = [(TEXT[:cut], TEXT[cut : cut + size]) for cut in (3, 9, 10, 40) for size in (1, 4, 9)]
    pairs += [(TEXT[:20], letter) for letter in "abcdef"] + [("", "Once"), ("", "<|bos|>Once"), (TEXT * 4, "The")]
    return pairs


@pytest.mark.parametrize("batch_size", ["auto", 1, "3"])
def test_loglikelihoods_equal_single_requests(harness: Any, checkpoint: Checkpoint, batch_size: Any) -> None:
    max_length, bos_token_id = 64, 256
    lm = harness["cutaway"](checkpoint, batch_size=batch_size, max_length=max_length)
    results = lm.loglikelihood([Request(pair) for pair in request_pairs()], disable_tqdm=True)
    for (context, continuation), (log_p, greedy) in zip(request_pairs(), results, strict=True):
        stripped = context.rstrip()
        context_ids = list(stripped.encode()) or [bos_token_id]
        continuation_ids = list((context[len(stripped) :] + continuation.removeprefix("<|bos|>")).encode())
        expected, expected_greedy = reference_loglikelihood(checkpoint.model, context_ids, continuation_ids, max_length)
        assert log_p == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert greedy == expected_greedy


def test_is_greedy_for_the_most_likely_token(harness: Any, checkpoint: Checkpoint) -> None:
    lm = harness["cutaway"](checkpoint)
    with torch.no_grad():
        top_id = int(checkpoint.model(torch.tensor([list(b"The")]))[0, -1].argmax())
    model: Any = checkpoint.model
    results = compute_loglikelihoods(
        model, [LoglikelihoodRequest(list(b"The"), [token]) for token in (top_id, (top_id + 1) % 256)], max_length=64
    )
    assert [result.is_greedy for result in results] == [True, False]
    assert lm.batch_size is None


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 30])
def test_rolling_windows_score_each_token_once(length: int) -> None:
    ids = list(range(length))
    windows = list(rolling_windows(ids, 8))
    assert [token for window in windows for token in window.continuation] == ids[1:]
    for window in windows:
        tokens = [*window.context, *window.continuation]
        assert tokens == list(range(tokens[0], tokens[-1] + 1))
        assert len(tokens) <= 9
        assert len(tokens) == 9 or tokens[0] == 0  # the context is as long as possible


def test_loglikelihood_rolling(harness: Any, checkpoint: Checkpoint) -> None:
    lm = harness["cutaway"](checkpoint, max_length=16)
    texts = [TEXT, "a", "", TEXT[:16], TEXT[:17]]
    for text, loglikelihood in zip(
        texts, lm.loglikelihood_rolling([Request((text,)) for text in texts], disable_tqdm=True), strict=True
    ):
        windows = rolling_windows([256, *text.encode()], 16)
        expected = sum(
            reference_loglikelihood(checkpoint.model, window.context, window.continuation, 16)[0] for window in windows
        )
        assert loglikelihood == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_generate_until_equals_single_prompts(harness: Any, checkpoint: Checkpoint) -> None:
    lm = harness["cutaway"](checkpoint, max_length=48, batch_size=2)
    [output] = ct.generate(checkpoint, TEXT[:9], max_new_tokens=12)
    stop = (output.text or "")[4:6]
    settings: list[dict[str, Any]] = [{"until": [stop], "max_gen_toks": 12}, {"until": "", "max_new_tokens": 5}]
    args = [(TEXT[:cut] * times, kwargs) for cut, times in ((9, 1), (4, 1), (20, 3), (11, 1)) for kwargs in settings]
    texts = lm.generate_until([Request(pair) for pair in args], disable_tqdm=True)
    for (context, kwargs), text in zip(args, texts, strict=True):
        max_new_tokens = kwargs.get("max_gen_toks", kwargs.get("max_new_tokens"))
        prompt = list(context.encode())[-(48 - max_new_tokens) :]
        stop_kwargs = {"stop": [stop]} if kwargs["until"] else {}
        [expected] = ct.generate(checkpoint, [prompt], max_new_tokens=max_new_tokens, **stop_kwargs)
        assert text == expected.text
    assert texts[0] == (output.text or "").split(stop)[0]


def test_generation_kwargs_are_converted(harness: Any, checkpoint: Checkpoint) -> None:
    module = sys.modules["cutaway.evaluate.lm_eval"]
    greedy = {"stop": (), "max_new_tokens": 256, "temperature": 0.0}
    assert module.parse_generation_kwargs({}) == greedy
    assert module.parse_generation_kwargs({"do_sample": False, "temperature": 0.7, "top_p": 0.9}) == greedy
    assert module.parse_generation_kwargs({"temperature": 0.7, "until": ["\n", ""], "max_tokens": 9, "top_p": 0.9}) == {
        "stop": ("\n",),
        "max_new_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    lm = harness["cutaway"](checkpoint)
    with pytest.raises(CutawayError, match="'num_beams' is not a sampling parameter; did you mean beams"):
        lm.generate_until([Request(("a", {"num_beams": 2, "max_gen_toks": 2}))], disable_tqdm=True)


def test_checkpoint_directory_and_chat_template(harness: Any, checkpoint: Checkpoint, tmp_path: Any) -> None:
    ct.save(checkpoint, tmp_path / "model")
    lm = harness["cutaway"](str(tmp_path / "model"), dtype="float32", device="cpu", batch_size="auto")
    request = [Request((TEXT[:9], " dog"))]
    assert lm.loglikelihood(request, disable_tqdm=True) == harness["cutaway"](checkpoint).loglikelihood(request, True)
    template = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    chat_tokenizer = Tokenizer(
        byte_tokenizer().backend, special_tokens_map=byte_tokenizer().special_tokens_map, chat_template=template
    )
    chat_checkpoint = Checkpoint(checkpoint.model, checkpoint.config, tokenizer_loader=lambda: chat_tokenizer)
    chat_lm = harness["cutaway"](chat_checkpoint)
    prompt = chat_lm.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt == "<|bos|>[Hi]"
    assert chat_lm.tok_encode(prompt) == [256, *b"[Hi]"]
    assert chat_lm.chat_template(True) == template


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dtype": "float3"}, "dtype is 'float3'"),
        ({"max_length": 0}, "max_length|context is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"pretrained": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_invalid_arguments_are_errors(
    harness: Any, checkpoint: Checkpoint, kwargs: Any, message: str, tmp_path: Any
) -> None:
    ct.save(checkpoint, tmp_path / "model")
    with pytest.raises(CutawayError, match=message):
        harness["cutaway"](**({"pretrained": str(tmp_path / "model")} | kwargs))


def test_encoder_is_an_error(harness: Any) -> None:
    config = ct.config("tiny-bert")
    encoder = Checkpoint(ct.build(config), config, tokenizer_loader=byte_tokenizer)
    with pytest.raises(CutawayError, match="is not a decoder"):
        harness["cutaway"](encoder)
