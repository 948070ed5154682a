"""`suffix` of /v1/completions equals a completion of the fill-in-the-middle prompt that is built by hand."""

import json
from typing import Any

import pytest
import tokenizers
from support.server import RunningServer, byte_checkpoint, load_tiny_python, start_server
from tokenizers import decoders, models, pre_tokenizers, processors

import cutaway as ct
from cutaway.serve.openai.fill_in_the_middle import FIM_TOKENS, encode_fim, require_fim_tokens
from cutaway.tokenizer import Tokenizer

pytestmark = pytest.mark.unchecked
PREFIX, SUFFIX = "def f(x):\n    return ", "\n\nprint(f(1))"
HAND_BUILT = {
    "<fim_prefix>": "<fim_prefix>def f(x):\n    return <fim_suffix>\n\nprint(f(1))<fim_middle>",
    "<fim-prefix>": "<fim-prefix>def f(x):\n    return <fim-suffix>\n\nprint(f(1))<fim-middle>",
    "<|fim_prefix|>": "<|fim_prefix|>def f(x):\n    return <|fim_suffix|>\n\nprint(f(1))<|fim_middle|>",
    "<｜fim▁begin｜>": "<｜fim▁begin｜>def f(x):\n    return <｜fim▁hole｜>\n\nprint(f(1))<｜fim▁end｜>",
}


def post(running: RunningServer, body: dict[str, Any]) -> tuple[int, Any]:
    body = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8, "temperature": 0, **body}
    headers = {"Content-Type": "application/json"}
    status, _, content = running.request("POST", "/v1/completions", json.dumps(body), headers)
    return status, json.loads(content)


@pytest.mark.parametrize("tokens", FIM_TOKENS[:-1], ids=lambda tokens: tokens.prefix)
def test_suffix_equals_the_prompt_built_by_hand(tokens: Any) -> None:
    checkpoint = byte_checkpoint("tiny-llama", special_tokens=(*tokens, "<|endoftext|>", "<|file_sep|>"))
    config = checkpoint.model.config.replace(vocab_size=checkpoint.tokenizer.vocab_size)  # type: ignore[union-attr]
    checkpoint.model, checkpoint.config = ct.build(config, seed=0), config
    [expected] = ct.generate(checkpoint, HAND_BUILT[tokens.prefix], max_new_tokens=8)
    with start_server(checkpoint) as running:
        status, response = post(running, {})
        assert status == 200
        assert response["choices"][0]["text"] == expected.text
        assert response["usage"]["prompt_tokens"] == len(PREFIX) + len(SUFFIX) + 3
        for body, message in (
            ({"echo": True}, "echo and suffix"),
            ({"prompt": [1, 2]}, "not token ids"),
            ({"suffix": "x" * 99_999}, "maximum"),
        ):
            status, response = post(running, body)
            assert status == 400
            assert message in response["error"]["message"]


def test_models_without_the_tokens_refuse_a_suffix() -> None:
    with start_server(load_tiny_python()) as running:
        status, response = post(running, {})
        assert status == 400
        assert "fill-in-the-middle tokens" in response["error"]["message"]
        assert response["error"]["code"] == "unsupported_parameter"
        assert post(running, {"suffix": ""})[0] == 200


def code_llama_tokenizer() -> Tokenizer:
    """A tokenizer with the structure of Code Llama's: SentencePiece BPE with a space before a text."""
    names = ["<unk>", "<s>", "</s>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", "▁", "☺", *"abcxyz\n", "▁a", "▁x"]
    vocab = {name: index for index, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "x")], unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(names[:7])
    return Tokenizer(backend, special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"})


def test_code_llama_has_a_space_before_the_prefix_only() -> None:
    """The order and the spaces of `infilling_prompt_tokens` in the code of the publication."""
    tokenizer = code_llama_tokenizer()
    ids = encode_fim(tokenizer, require_fim_tokens(tokenizer), "ab", "x\ny")
    names = [tokenizer.id_to_token(token) for token in ids]
    assert names == ["<s>", "▁<PRE>", "▁a", "b", "▁<SUF>", "x", "\n", "y", "▁<MID>"]


def test_the_end_of_the_middle_stops_the_completion() -> None:
    tokenizer = code_llama_tokenizer()
    checkpoint = byte_checkpoint("tiny-llama")
    checkpoint.tokenizer_loader = lambda: tokenizer
    eot = tokenizer.token_to_id("▁<EOT>")
    with start_server(checkpoint) as running:
        _, response = post(running, {"prompt": "ab", "suffix": "x", "logit_bias": {str(eot): 100}})
        assert response["choices"][0]["finish_reason"] == "stop"
        assert response["choices"][0]["text"] == ""
        assert response["usage"]["completion_tokens"] == 1
