"""Masks of the assistant's tokens: published template styles against an independent computation, and transformers."""

from collections.abc import Sequence
from typing import Any

import pytest
from support.chat_templates import STYLES, TemplateStyle
from transformers import PreTrainedTokenizerFast

from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from cutaway.tokenizer.chat.assistant_mask import AssistantMaskEncoder
from cutaway.tokenizer.chat.shipped_templates import SHIPPED_TEMPLATES, default_chat_template, load_chat_template

USER, AGAIN = {"role": "user", "content": " Was ist 2+2? ünï 🙂 "}, {"role": "user", "content": "And in hex?"}
FOUR, HEX = {"role": "assistant", "content": " It is four.\n"}, {"role": "assistant", "content": "0x4 🙂"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "description": 'Adds "é" & <b>', "parameters": {}}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None, "é"]}}}],
}
RESULT = {"role": "tool", "name": "add", "content": "4"}
THINK = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nFour."}
CHATS: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ("turns", [USER, FOUR], None),
    "turns": ("turns", [USER, FOUR, AGAIN, HEX], None),
    "unanswered": ("turns", [USER, FOUR, AGAIN], None),
    "equal turns": ("turns", [USER, FOUR, AGAIN, FOUR, USER, FOUR], None),
    "system": ("system", [SYSTEM, USER, FOUR, AGAIN, HEX], None),
    "tools": ("tools", [SYSTEM, USER, CALL, RESULT, HEX, AGAIN, FOUR], [TOOL]),
    "last is a call": ("tools", [USER, FOUR, AGAIN, CALL], [TOOL, TOOL]),
    "thinking": ("thinking", [USER, THINK, AGAIN, THINK], None),
    "thinking then not": ("thinking", [SYSTEM, USER, THINK, AGAIN, FOUR, USER, HEX], None),
}


def build_tokenizer(style: TemplateStyle, *, merges: bool) -> Tokenizer:
    """Byte tokenizer or byte-level BPE whose tokens may straddle the borders of turns."""
    text = "\n\n \n It is four.\n assistant\n model\n ASSISTANT: Was ist 2+2? tool_call hex " * 30
    backend = train_bpe([text], 420).backend if merges else byte_tokenizer().backend
    names = dict.fromkeys([style.bos_token, style.eos_token, *style.special_tokens.split()])
    backend.add_special_tokens(list(names))
    special = {"bos_token": style.bos_token, "eos_token": style.eos_token}
    return Tokenizer(backend, special_tokens_map=special, chat_template=style.template)


def encode(tokenizer: Tokenizer, style: TemplateStyle, chat: Sequence[Any], tools: Any) -> tuple[list[int], list[bool]]:
    stop_ids = [tokenizer.token_to_id(token) for token in style.stop_tokens]
    encoder = AssistantMaskEncoder(tokenizer, stop_token_ids=[i for i in stop_ids if i is not None])
    return encoder.encode_chat(chat, tools=tools)


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("name", STYLES)
def test_masks_of_published_styles(name: str, merges: bool) -> None:
    style = STYLES[name]
    tokenizer = build_tokenizer(style, merges=merges)
    num_checked = 0
    for kind, chat, tools in CHATS.values():
        if kind not in style.supports:
            continue
        pieces = list(style.expected(chat, tools))
        text = "".join(piece for piece, _ in pieces)
        byte_is_target = [target for piece, target in pieces for _ in piece.encode()]
        ids, is_target = encode(tokenizer, style, chat, tools)
        assert ids == tokenizer.encode(text, add_special_tokens=False)
        # Independent of offsets: the position of each token is the number of bytes before it.
        position = 0
        for token_id, target in zip(ids, is_target, strict=True):
            assert target == byte_is_target[position], (
                text.encode()[:position][-30:],
                tokenizer.format_token(token_id),
            )
            position += token_length(tokenizer, token_id)
        assert position == len(byte_is_target)
        assert any(is_target)
        num_checked += 1
    assert num_checked >= 5


def token_length(tokenizer: Tokenizer, token_id: int) -> int:
    """Number of bytes of a token."""
    token = tokenizer.id_to_token(token_id)
    assert token is not None
    is_added = token_id in tokenizer.backend.get_added_tokens_decoder()
    return len(token.encode()) if is_added else len(token)  # one character per byte in byte-level vocabularies


@pytest.mark.parametrize("name", STYLES)
def test_the_end_of_each_turn_is_a_target(name: str) -> None:
    style = STYLES[name]
    tokenizer = build_tokenizer(style, merges=True)
    ids, is_target = encode(tokenizer, style, [USER, FOUR, AGAIN, HEX], None)
    ends = {tokenizer.token_to_id(token) for token in (style.eos_token, *style.stop_tokens, "<end_of_turn>", "<|end|>")}
    last = [i for i, target in enumerate(is_target) if target and not (i + 1 < len(ids) and is_target[i + 1])]
    assert len(last) == 2
    assert all(ids[i] in ends for i in last)


def test_equals_transformers_for_generation_blocks() -> None:
    style = STYLES["generation-blocks"]
    for merges in (False, True):
        tokenizer = build_tokenizer(style, merges=merges)
        peer: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, eos_token="<|im_end|>")
        for kind, chat, _ in CHATS.values():
            if kind not in style.supports:
                continue
            theirs = peer.apply_chat_template(
                chat, chat_template=style.template, return_assistant_tokens_mask=True, return_dict=True
            )
            ids, is_target = encode(tokenizer, style, chat, None)
            assert (ids, [int(flag) for flag in is_target]) == (theirs["input_ids"], theirs["assistant_masks"])


def test_generation_block_without_the_end_of_the_turn_is_extended() -> None:
    style = STYLES["generation-blocks"]
    template = style.template.replace(
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}"
    )
    tokenizer = build_tokenizer(style, merges=False)
    expected = encode(tokenizer, style, [USER, FOUR, AGAIN, HEX], None)
    tokenizer.chat_template = template
    assert encode(tokenizer, style, [USER, FOUR, AGAIN, HEX], None) == expected


def test_messages_that_are_not_trained_on() -> None:
    chat = [SYSTEM, USER, FOUR, AGAIN, HEX]
    for name in ("chatml", "generation-blocks", "mistral", "qwen3"):
        style = STYLES[name]
        tokenizer = build_tokenizer(style, merges=False)
        encoder = AssistantMaskEncoder(tokenizer)
        every, last = (
            encoder.encode_chat(chat, train_on=flags).is_target for flags in ([True] * 5, [False] * 4 + [True])
        )
        first_end = every.index(False, every.index(True))
        assert last == [False] * first_end + every[first_end:]


@pytest.mark.parametrize("name", SHIPPED_TEMPLATES)
def test_shipped_templates(name: str) -> None:
    tokens = [*SHIPPED_TEMPLATES[name], "<s>", "</s>"]
    backend = byte_tokenizer().backend
    backend.add_special_tokens(tokens)
    tokenizer = Tokenizer(backend, special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = load_chat_template(name, tokenizer)
    encoder = AssistantMaskEncoder(tokenizer)
    end = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>"}.get(name, "</s>")
    for chat in ([USER, HEX], [SYSTEM, USER, HEX, AGAIN, HEX]):
        ids, is_target = encoder.encode_chat(chat)
        targets = tokenizer.decode(
            [i for i, flag in zip(ids, is_target, strict=True) if flag], skip_special_tokens=False
        )
        assert targets == f"0x4 🙂{end}" * sum(message is HEX for message in chat)
        assert tokenizer.render_chat(chat[:-1]) in tokenizer.render_chat(chat, add_generation_prompt=False)
    tool_chat = [SYSTEM, USER, CALL, RESULT, HEX]
    if name not in ("chatml", "llama-3"):
        with pytest.raises(InputError, match="has no tools"):
            encoder.encode_chat(tool_chat, tools=[TOOL])
        return
    ids, is_target = encoder.encode_chat(tool_chat, tools=[TOOL])
    targets = tokenizer.decode([i for i, flag in zip(ids, is_target, strict=True) if flag], skip_special_tokens=False)
    key = "arguments" if name == "chatml" else "parameters"
    call = f'{{"name": "add", "{key}": {{"a": 1, "b": [2.5, null, "é"]}}}}'
    assert targets == (f"<tool_call>\n{call}\n</tool_call>" if name == "chatml" else call) + f"{end}0x4 🙂{end}"
    text = tokenizer.render_chat(tool_chat, tools=[TOOL])
    assert 'Adds \\"é\\" & <b>' in text
    assert "Be brief." in text


REFUSED = {
    "no end of turn": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
        "no token that ends the turn",
    ),
    "end that is not a token": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "is not a token of the tokenizer",
    ),
    "no generation prompt": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}",
        "add_generation_prompt",
    ),
    "drops tool calls": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "leaves out the tool calls",
    ),
    "reversed": (
        "{% for m in messages|reverse %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "cannot locate|before earlier",
    ),
    "upper case": (
        "{% for m in messages %}{{ '<|im_start|>assistant\n' + (m.content|upper if not loop.last else "
        "m.content|title|replace('a', messages|length|string)) + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "cannot locate",
    ),
    "changed generation block": (
        "{% for m in messages %}{% set x %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endset %}"
        "{{ x|length }}{% endfor %}",
        "no exact position",
    ),
    "generation blocks without end": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}",
        "no token that ends the turn",
    ),
    "unused generation block": (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if nothing %}{% generation %}{% endgeneration %}{% endif %}",
        "none for these messages",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_templates_without_exact_masks_are_refused(name: str) -> None:
    template, message = REFUSED[name]
    tokenizer = build_tokenizer(STYLES["chatml"], merges=False)
    tokenizer.chat_template = template
    chat = [USER, FOUR, AGAIN, CALL if name == "drops tool calls" else HEX, USER, FOUR]
    with pytest.raises(InputError, match=message):
        AssistantMaskEncoder(tokenizer).encode_chat(chat)


def test_messages_with_reserved_characters_are_refused() -> None:
    for name in ("chatml", "generation-blocks"):
        tokenizer = build_tokenizer(STYLES[name], merges=False)
        for character in ("\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"):
            if name == "chatml" and character < "\ufdd2":
                continue
            chat = [USER, {"role": "assistant", "content": f"a{character}b"}]
            if name == "generation-blocks" and character > "\ufdd1":
                AssistantMaskEncoder(tokenizer).encode_chat(chat)
                continue
            with pytest.raises(InputError, match="U\\+FDD"):
                AssistantMaskEncoder(tokenizer).encode_chat(chat)


def test_first_message_of_the_assistant() -> None:
    for name in ("chatml", "phi-4", "cohere"):
        tokenizer = build_tokenizer(STYLES[name], merges=False)
        ids, is_target = encode(tokenizer, STYLES[name], [HEX, USER, HEX], None)
        targets = tokenizer.decode(
            [i for i, flag in zip(ids, is_target, strict=True) if flag], skip_special_tokens=False
        )
        assert targets == f"0x4 🙂{STYLES[name].eos_token}" * 2


def test_texts_and_the_default_template() -> None:
    tokenizer = byte_tokenizer()
    masked = AssistantMaskEncoder(tokenizer).encode_text("ab cd", [(2, 5)], add_special_tokens=True)
    assert masked.ids == tokenizer.encode("ab cd")
    assert [tokenizer.decode([i]) for i, flag in zip(*masked, strict=True) if flag] == [" ", "c", "d"]
    assert default_chat_template(tokenizer) == "plain"
    assert default_chat_template(build_tokenizer(STYLES["chatml"], merges=False)) == "chatml"
    assert default_chat_template(build_tokenizer(STYLES["llama-3.1"], merges=False)) == "llama-3"
    with pytest.raises(InputError, match="no token that could end a turn"):
        default_chat_template(Tokenizer(byte_tokenizer().backend))
    with pytest.raises(InputError, match=r"needs <\|im_start\|>.*use plain or alpaca or zephyr"):
        load_chat_template("chatml", tokenizer)
    with pytest.raises(InputError, match="not a chat template"):
        load_chat_template("missing.jinja", tokenizer)
