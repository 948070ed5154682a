"""Chat templates: rendering as in transformers, and sandbox limits for hostile templates."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from cutaway.tokenizer.chat.template import render_chat_template

USER = {"role": "user", "content": "  What's 2+2? <b>&amp;</b> ünï  "}
TURNS = [USER, {"role": "assistant", "content": " Four.\n"}, {"role": "user", "content": "And in hex?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *TURNS]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": "?"}]}
]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": 'Adds "numbers" <fast> & well',
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
    },
}
CALLS = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None, True]}}}
        ],
    },
    {"role": "tool", "name": "add", "content": "4"},
]

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA2 = """{%- if messages[0]['role'] == 'system' -%}
  {%- set system = '<<SYS>>\n' ~ messages[0]['content'] ~ '\n<</SYS>>\n\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}
  {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('Roles must alternate') }}{%- endif -%}
  {%- if m.role == 'user' -%}
    {{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}
  {%- elif m.role == 'assistant' -%}{{ ' ' + m.content.strip() + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}"""
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}{%- endif %}
{{- "Today Date: " + date_string + "\n\n" }}{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- '' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages -%}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- elif message['content'] is iterable -%}
{%- for item in message['content'] -%}
{%- if item['type'] == 'image' -%}<image>{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
{%- endfor -%}
{%- endif -%}{{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("must alternate") }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}{{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}{{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function|tojson %}
        {{- out[:-1] }}{{- ', "id": "x"}' }}{%- endfor %}{{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}{{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}" }}
    {%- else %}{{- raise_exception("unknown role") }}{%- endif %}
{%- endfor %}"""
QWEN = """{%- macro show(content) -%}{{- content | string | replace('\n', ' ') -}}{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string
         and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role in ["user", "system"] and not loop.first %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ show(message.content) ~ '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
        {{- '<|im_start|>' + message.role + '\n' + content.lstrip('\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
GENERATION = """{% for m in messages %}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ m.role|title|upper|center(12) }}: {{ m['content'] }}{% endif %}
{% if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}{{ documents|default([], true)|map(attribute='title')|join(', ') }}{{ strftime_now('%Y') }}
{{ {'a': 'é<', 'b': [1, 2.5]}|tojson(indent=2) }}{{ [3, 1, 2]|sort|reverse|list }}{{ '%s=%03d'|format('x', 7) }}
{{ '{:>5}|{}'.format('a', 1) }}{{ dict(a=1)['a'] }}{{ 'a,b'.split(',')|last }}{{ range(3)|sum }}{{ 'abc'[1:] }}
{{ 7 // 2 }}{{ 2 ** 3 }}{{ 'ab' * 2 }}{{ [1] + [2] }}{{ none }}{{ true }}{{ 1.0 }}{{ nothing }}{{ [none, 'x'] }}"""
TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "zephyr": ZEPHYR,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "generation": GENERATION,
}
CHATS = {"turns": TURNS, "system": SYSTEM, "parts": PARTS, "calls": CALLS}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = byte_tokenizer().backend
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="module")
def peer(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_matches_transformers(name: str, chat: str, tokenizer: Tokenizer, peer: Any) -> None:
    for tools in (None, [TOOL], [TOOL, TOOL]):
        for prompt in (True, False):
            for extra in (
                {},
                {"enable_thinking": False, "date_string": "1 Jan", "documents": [{"title": "T", "text": "x"}]},
            ):
                options = {"tools": tools, "add_generation_prompt": prompt, **extra}
                template = TEMPLATES[name]
                try:
                    expected = peer.apply_chat_template(CHATS[chat], chat_template=template, tokenize=False, **options)
                except Exception:
                    with pytest.raises(InputError, match="chat template"):
                        tokenizer.render_chat(CHATS[chat], chat_template=template, **options)
                else:
                    assert tokenizer.render_chat(CHATS[chat], chat_template=template, **options) == expected


def test_encode_chat_adds_no_second_bos(tokenizer: Tokenizer, peer: Any) -> None:
    expected = peer.apply_chat_template(TURNS, chat_template=LLAMA2, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(TURNS, chat_template=LLAMA2) == expected


def test_named_templates(tokenizer: Tokenizer, tmp_path: Path) -> None:
    named = Tokenizer(
        tokenizer.backend, chat_template={"default": "D", "tool_use": "T", "rag": "R{{ documents|length }}"}
    )
    assert named.render_chat(TURNS) == "D"
    assert named.render_chat(TURNS, tools=[TOOL]) == "T"
    assert named.render_chat(TURNS, chat_template="rag", documents=[{"text": "x"}]) == "R1"
    assert named.render_chat(TURNS, chat_template="{{ messages|length }}") == "3"
    named.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.chat_template == named.chat_template
    # Template files take precedence over tokenizer_config.json.
    (tmp_path / "chat_template.jinja").write_text("F")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("G")
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.chat_template == {"default": "F", "rag": "G"}
    with pytest.raises(InputError, match="no default"):
        Tokenizer(tokenizer.backend, chat_template={"rag": "R"}).render_chat(TURNS)
    with pytest.raises(InputError, match="no chat template"):
        tokenizer.render_chat(TURNS)


INVALID_CONTENT = [3, ["x"], b"x"]
INVALID_MESSAGES = [None, "hi", [], {}, [1], ["hi"], [{}], [{"role": 1, "content": "x"}], [{"content": "x"}]]
INVALID_MESSAGES += [[{"role": "user", "content": content}] for content in INVALID_CONTENT]
INVALID_MESSAGES += [[{"role": "user", "content": "x", "more": len}]]


@pytest.mark.parametrize("messages", INVALID_MESSAGES, ids=str)
def test_invalid_messages_are_an_error(messages: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="message"):
        tokenizer.render_chat(messages, chat_template=CHATML)


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a doubling macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a filtered loop": "{% set l = range(99999)|list %}{% for i in l if i in l|reverse|list and false %}{% endfor %}",
}


def doubling(step: str) -> str:
    return "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = " + step + " %}{% endfor %}{{ n.s }}"


HOSTILE = {
    "a long string": "{{ 'x'*10**9 }}",
    "a long list": "{{ ['x'*1000]*100000 }}",
    "a large power": "{{ 9**(9**9) }}",
    "doubling by +": doubling("n.s + n.s"),
    "doubling by ~": doubling("n.s ~ n.s"),
    "large products": doubling("n.s|length * n.s|length * 99 if n.s is string else n.s * n.s"),
    "doubling lists": doubling("[n.s, n.s]"),
    "doubling objects": doubling("{1: n.s, 2: n.s}"),
    "doubling tuples": doubling("(n.s, n.s)"),
    "doubling by dict()": doubling("dict(a=n.s, b=n.s)"),
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "center": "{{ 'x'|center(10**10) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "percent filter": "{{ '%01000000000d'|format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 10**9) }}",
    "replace": "{{ ('a'*1000)|replace('a', 'b'*100000) }}",
    "replace method": "{{ ('a'*9999).replace('', 'b'*9999) }}",
    "join": "{{ range(9999)|join('x'*9999) }}",
    "join method": "{{ ('x'*9999).join(['a']*9999) }}",
    "indent": "{{ 'a'|indent(10**9, true) }}",
    "json indent": "{{ [1]|tojson(indent=10**9) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "round": "{{ 1.5|round(10**9, 'ceil') }}",
    "sum of lists": "{{ ([[1]*999]*200)|sum(start=[]) }}",
    "map": "{{ ([none]*99999)|map('default', 'x'*99999, true)|list }}",
    "attribute of a view": "{{ {'a': 1}.items().mapping.copy() }}",
    "views": "{% set d = {'a': 'x'*999999} %}{{ [d.items()]*9999 }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "long output": "{% for i in range(99999) %}{{ 'x'*9999 }}{% endfor %}",
    "a captured block": "{% set x %}{% for i in range(99999) %}{{ 'x'*99999 }}{% endfor %}{% endset %}",
    "a huge template": "x" * 200_000,
    "many nodes": "{{a}}" * 15_000,
    "deep nesting": "{% if a %}" * 5000,
    "a long sum": "{{ " + "1+" * 9000 + "1 }}",
    "bytes": "{{ 'x'.encode() }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by attr": "{{ ''|attr('__class__') }}",
    "class by format": "{{ '{0.__class__}'.format(1) }}",
    "class by map": "{{ messages|map(attribute='__class__')|list }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "attribute of a macro": "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "class of a namespace": "{% set n = namespace(__class__=1) %}",
    "self": "{{ self.__init__.__globals__ }}",
    "changing messages": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "not a template": "{% if",
    "no such filter": "{{ 1|striptags }}",
    "no such function": "{{ open('/etc/passwd') }}",
    "raise_exception": "{{ raise_exception('no\\nway') }}",
}  # fmt: skip


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_stopped(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="chat template"):
        render_chat_template(HOSTILE[name], TURNS, {})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_template_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutaway.tokenizer.chat.resource_limits.MAX_SECONDS", 0.2)
    with pytest.raises(InputError, match="CPU time"):
        render_chat_template(ENDLESS[name], TURNS, {})


def test_long_chat_is_within_the_limits(peer: Any, tokenizer: Tokenizer) -> None:
    chat = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " + "words " * 1000} for i in range(301)]
    for template in (MISTRAL, QWEN, LLAMA3):
        expected = peer.apply_chat_template(chat, chat_template=template, tokenize=False, tools=[TOOL])
        assert (
            tokenizer.render_chat(chat, chat_template=template, tools=[TOOL], add_generation_prompt=False) == expected
        )


def test_variables_must_be_json_types(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="contains a"):
        tokenizer.render_chat(TURNS, chat_template="{{ thing }}", thing=json)
    nested: list[Any] = []
    for _ in range(200):
        nested = [nested]
    with pytest.raises(InputError, match="nested"):
        tokenizer.render_chat(TURNS, chat_template="{{ thing }}", thing=nested)
