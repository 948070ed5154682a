"""The evaluation harness's model: likelihoods token by token, answers one by one, whatever the batch.

The harness itself is large, so a stand-in has its place here: a class to derive from, and a register.
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
    """What the harness's own class does for those who derive from it."""

    def __init__(self) -> None:
        self._device: Any = None


@dataclass
class Request:
    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def harness() -> Iterator[dict[str, Any]]:
    """Our module over the stand-in, and what it has registered."""
    registered: dict[str, Any] = {}
    places = ("lm_eval", "lm_eval.models", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    made: dict[str, Any] = {name: ModuleType(name) for name in places}
    made["lm_eval.api.model"].LM = LM
    made["lm_eval.api.registry"].register_model = lambda name: lambda cls: registered.setdefault(name, cls)
    before = {name: sys.modules.get(name) for name in (*made, "cutaway.evaluate.lm_eval")}
    sys.modules.update(made)
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


def alone(model: Any, context: list[int], told: list[int], limit: int) -> tuple[float, bool]:
    """One text in one pass, one token after another."""
    ids = [*context, *told][-limit - 1 :]
    with torch.no_grad():
        logs = model.eval()(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)[-len(told) :]
    return sum(float(row[token]) for row, token in zip(logs, told, strict=True)), logs.argmax(-1).tolist() == told


def pairs() -> list[tuple[str, str]]:
    """Of many lengths; contexts in common, none at all, ending in a space, longer than is read."""
    found = [(TEXT[:cut], TEXT[cut : cut + size]) for cut in (3, 9, 10, 40) for size in (1, 4, 9)]
    found += [(TEXT[:20], letter) for letter in "abcdef"] + [("", "Once"), ("", "<|bos|>Once"), (TEXT * 4, "The")]
    return found


@pytest.mark.parametrize("batch", ["auto", 1, "3"])
def test_likelihoods_are_those_of_each_text_alone(harness: Any, checkpoint: Checkpoint, batch: Any) -> None:
    limit, first = 64, 256
    lm = harness["cutaway"](checkpoint, batch_size=batch, max_length=limit)
    found = lm.loglikelihood([Request(pair) for pair in pairs()], disable_tqdm=True)
    for (context, continuation), (log_p, greedy) in zip(pairs(), found, strict=True):
        bare = context.rstrip()
        before = list(bare.encode()) or [first]
        told = list((context[len(bare) :] + continuation.removeprefix("<|bos|>")).encode())
        expected, best = alone(checkpoint.model, before, told, limit)
        assert log_p == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert greedy == best


def test_what_greedy_decoding_says_is_greedy(harness: Any, checkpoint: Checkpoint) -> None:
    lm = harness["cutaway"](checkpoint)
    with torch.no_grad():
        best = int(checkpoint.model(torch.tensor([list(b"The")]))[0, -1].argmax())
    model: Any = checkpoint.model
    found = compute_loglikelihoods(
        model, [LoglikelihoodRequest(list(b"The"), [token]) for token in (best, (best + 1) % 256)], max_length=64
    )
    assert [each.is_greedy for each in found] == [True, False]
    assert lm.batch_size is None


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 30])
def test_windows_tell_each_token_once(length: int) -> None:
    ids = list(range(length))
    parts = list(rolling_windows(ids, 8))
    assert [token for part in parts for token in part.continuation] == ids[1:]
    for part in parts:
        whole = [*part.context, *part.continuation]
        assert whole == list(range(whole[0], whole[-1] + 1))
        assert len(whole) <= 9
        assert len(whole) == 9 or whole[0] == 0  # all the context that there is room for


def test_whole_texts(harness: Any, checkpoint: Checkpoint) -> None:
    lm = harness["cutaway"](checkpoint, max_length=16)
    texts = [TEXT, "a", "", TEXT[:16], TEXT[:17]]
    for text, found in zip(
        texts, lm.loglikelihood_rolling([Request((text,)) for text in texts], disable_tqdm=True), strict=True
    ):
        parts = rolling_windows([256, *text.encode()], 16)
        expected = sum(alone(checkpoint.model, part.context, part.continuation, 16)[0] for part in parts)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_answers_are_those_of_each_prompt_alone(harness: Any, checkpoint: Checkpoint) -> None:
    lm = harness["cutaway"](checkpoint, max_length=48, batch_size=2)
    [spoken] = ct.generate(checkpoint, TEXT[:9], max_new_tokens=12)
    stop = (spoken.text or "")[4:6]
    ways: list[dict[str, Any]] = [{"until": [stop], "max_gen_toks": 12}, {"until": "", "max_new_tokens": 5}]
    asked = [(TEXT[:cut] * times, way) for cut, times in ((9, 1), (4, 1), (20, 3), (11, 1)) for way in ways]
    found = lm.generate_until([Request(each) for each in asked], disable_tqdm=True)
    for (context, way), answer in zip(asked, found, strict=True):
        most = way.get("max_gen_toks", way.get("max_new_tokens"))
        prompt = list(context.encode())[-(48 - most) :]
        how = {"stop": [stop]} if way["until"] else {}
        [expected] = ct.generate(checkpoint, [prompt], max_new_tokens=most, **how)
        assert answer == expected.text
    assert found[0] == (spoken.text or "").split(stop)[0]


def test_settings_are_the_tasks(harness: Any, checkpoint: Checkpoint) -> None:
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
    with pytest.raises(CutawayError, match="there is no setting 'num_beams'; did you mean beams"):
        lm.generate_until([Request(("a", {"num_beams": 2, "max_gen_toks": 2}))], disable_tqdm=True)


def test_a_directory_is_opened_and_chats_are_written(harness: Any, checkpoint: Checkpoint, tmp_path: Any) -> None:
    ct.save(checkpoint, tmp_path / "model")
    lm = harness["cutaway"](str(tmp_path / "model"), dtype="float32", device="cpu", batch_size="auto")
    request = [Request((TEXT[:9], " dog"))]
    assert lm.loglikelihood(request, disable_tqdm=True) == harness["cutaway"](checkpoint).loglikelihood(request, True)
    template = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    talking = Tokenizer(
        byte_tokenizer().backend, special_tokens_map=byte_tokenizer().special_tokens_map, chat_template=template
    )
    chatty = harness["cutaway"](Checkpoint(checkpoint.model, checkpoint.config, tokenizer_loader=lambda: talking))
    prompt = chatty.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt == "<|bos|>[Hi]"
    assert chatty.tok_encode(prompt) == [256, *b"[Hi]"]
    assert chatty.chat_template(True) == template


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"dtype": "float3"}, "dtype is 'float3'"),
        ({"max_length": 0}, "max_length|context is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"pretrained": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_what_is_wrong_is_said(harness: Any, checkpoint: Checkpoint, how: Any, said: str, tmp_path: Any) -> None:
    ct.save(checkpoint, tmp_path / "model")
    with pytest.raises(CutawayError, match=said):
        harness["cutaway"](**({"pretrained": str(tmp_path / "model")} | how))


def test_only_decoders_continue_texts(harness: Any) -> None:
    config = ct.config("tiny-bert")
    encoder = Checkpoint(ct.build(config), config, tokenizer_loader=byte_tokenizer)
    with pytest.raises(CutawayError, match="is no decoder"):
        harness["cutaway"](encoder)
