"""Chat templates with the structure of published ones, each with an independent computation of its text and targets.

`expected` builds the text of a conversation in Python, as pieces that the assistant generates (True) or not (False).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Piece = tuple[str, bool]
Messages = Sequence[dict[str, Any]]
Tools = list[dict[str, Any]] | None


@dataclass(frozen=True)
class TemplateStyle:
    template: str
    expected: Callable[[Messages, Tools], Iterator[Piece]]
    special_tokens: str
    eos_token: str = "</s>"
    bos_token: str = "<s>"
    supports: frozenset[str] = frozenset({"turns", "system"})
    stop_tokens: tuple[str, ...] = ()


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


STYLES: dict[str, TemplateStyle] = {}
ALL = frozenset({"turns", "system", "tools", "thinking"})


def style(name: str, template: str, special_tokens: str, **options: Any) -> Callable[[Any], Any]:
    def register(expected: Callable[[Messages, Tools], Iterator[Piece]]) -> Any:
        STYLES[name] = TemplateStyle(template, expected, special_tokens, **options)
        return expected

    return register


@style(
    "chatml",
    """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "<|im_start|> <|im_end|>",
    eos_token="<|im_end|>",
)
def chatml(messages: Messages, tools: Tools) -> Iterator[Piece]:
    for m in messages:
        yield f"<|im_start|>{m['role']}\n", False
        yield f"{m['content']}<|im_end|>", m["role"] == "assistant"
        yield "\n", False


@style(
    "smollm2",
    """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\nA small model.<|im_end|>\n' }}{% endif %}
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "<|im_start|> <|im_end|>",
    eos_token="<|im_end|>",
)
def smollm2(messages: Messages, tools: Tools) -> Iterator[Piece]:
    if messages[0]["role"] != "system":
        yield "<|im_start|>system\nA small model.<|im_end|>\n", False
    yield from chatml(messages, tools)


QWEN_TOOLS = """{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- else %}{{- DEFAULT }}{%- endif %}
{{- "# Tools\n<tools>" }}{%- for tool in tools %}{{- "\n" + tool | tojson }}{%- endfor %}{{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- elif DEFAULT %}{{- '<|im_start|>system\n' + DEFAULT + '<|im_end|>\n' }}{%- endif %}"""
QWEN_TOOL_ROLE = """{%- elif message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}"""


def qwen_head(messages: Messages, tools: Tools, default: str) -> Iterator[Piece]:
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        listed = "".join("\n" + to_json(tool) for tool in tools)
        yield "<|im_start|>system\n" + (default if system is None else system + "\n\n"), False
        yield f"# Tools\n<tools>{listed}\n</tools><|im_end|>\n", False
    elif system is not None or default:
        yield f"<|im_start|>system\n{default if system is None else system}<|im_end|>\n", False


def qwen_tool_result(messages: Messages, i: int) -> Iterator[Piece]:
    if i == 0 or messages[i - 1]["role"] != "tool":
        yield "<|im_start|>user", False
    yield f"\n<tool_response>\n{messages[i]['content']}\n</tool_response>", False
    if i == len(messages) - 1 or messages[i + 1]["role"] != "tool":
        yield "<|im_end|>\n", False


def qwen_calls(message: dict[str, Any]) -> str:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    texts = [f'{{"name": "{f["name"]}", "arguments": {to_json(f["arguments"])}}}' for f in functions]
    return "".join(f"\n<tool_call>\n{text}\n</tool_call>" for text in texts)


@style(
    "qwen2.5",
    "{%- set DEFAULT = 'You are Q.' %}"
    + QWEN_TOOLS
    + """{%- for message in messages %}
{%- if message.role == "user" or (message.role == "system" and not loop.first)
   or (message.role == "assistant" and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- elif message.role == "assistant" %}
{{- '<|im_start|>' + message.role }}{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}{%- set call = call.function %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}"""
    + QWEN_TOOL_ROLE
    + """{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "<|im_start|> <|im_end|> <tool_call> </tool_call>",
    eos_token="<|im_end|>",
    supports=frozenset({"turns", "system", "tools"}),
)
def qwen25(messages: Messages, tools: Tools) -> Iterator[Piece]:
    yield from qwen_head(messages, tools, "You are Q.")
    for i, m in enumerate(messages):
        if m["role"] == "tool":
            yield from qwen_tool_result(messages, i)
        elif m["role"] == "assistant" and m.get("tool_calls"):
            # The line break after the role is a part of the generation prompt.
            text = ("\n" + m["content"] if m["content"] else "") + qwen_calls(m) + "<|im_end|>"
            yield from [("<|im_start|>assistant\n", False), (text.removeprefix("\n"), True), ("\n", False)]
        elif m["role"] != "system" or i > 0:
            yield from chatml([m], None)


@style(
    "qwen3",
    "{%- set DEFAULT = '' %}"
    + QWEN_TOOLS
    + """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == "user" or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- elif message.role == "assistant" %}
{%- set content = message.content or '' %}{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{%- set call = call.function %}
{%- if content or not loop.first %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}"""
    + QWEN_TOOL_ROLE
    + """{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "<|im_start|> <|im_end|> <tool_call> </tool_call> <think> </think>",
    eos_token="<|im_end|>",
    supports=ALL,
)
def qwen3(messages: Messages, tools: Tools) -> Iterator[Piece]:
    yield from qwen_head(messages, tools, "")
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
    for i, m in enumerate(messages):
        if m["role"] == "tool":
            yield from qwen_tool_result(messages, i)
        elif m["role"] == "assistant":
            content, reasoning = split_thinking(m)
            yield "<|im_start|>assistant\n", False
            think = i > last and (i == len(messages) - 1 or reasoning)
            text = f"<think>\n{reasoning}\n</think>\n\n{content}" if think else content
            calls = qwen_calls(m)
            yield text + (calls if content else calls.removeprefix("\n")) + "<|im_end|>", True
            yield "\n", False
        elif m["role"] != "system" or i > 0:
            yield from chatml([m], None)


@style(
    "qwen3-thinking",
    STYLES["qwen3"]
    .template.replace("'<|im_start|>assistant\n' }}{%- endif %}", "PROMPT }}{%- endif %}")
    .replace("PROMPT", "'<|im_start|>assistant\n<think>\n'"),
    STYLES["qwen3"].special_tokens,
    eos_token="<|im_end|>",
    supports=ALL,
)
def qwen3_thinking(messages: Messages, tools: Tools) -> Iterator[Piece]:
    """The generation prompt ends with <think>, so that it is not generated."""
    for text, is_target in qwen3(messages, tools):
        if is_target and text.startswith("<think>\n"):
            yield "<think>\n", False
            yield text.removeprefix("<think>\n"), True
        else:
            yield text, is_target


def split_thinking(message: dict[str, Any]) -> tuple[str, str]:
    content = message["content"] or ""
    if "reasoning_content" in message:
        return content, message["reasoning_content"].strip("\n")
    if "</think>" not in content:
        return content, ""
    reasoning, content = content.split("</think>")
    return content.lstrip("\n"), reasoning.removeprefix("<think>").strip("\n")


@style(
    "llama-2",
    """{%- if messages[0]['role'] == 'system' -%}{%- set rest = messages[1:] -%}
{%- set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- if m.role == 'user' -%}
{{ bos_token + '[INST] ' + ((system if loop.first else '') + m.content).strip() + ' [/INST]' }}
{%- else -%}{{ ' ' + m.content.strip() + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}""",
    "",
)
def llama2(messages: Messages, tools: Tools) -> Iterator[Piece]:
    system = ""
    for m in messages:
        if m["role"] == "system":
            system = f"<<SYS>>\n{m['content']}\n<</SYS>>\n\n"
        elif m["role"] == "user":
            yield f"<s>[INST] {(system + m['content']).strip()} [/INST]", False
            system = ""
        else:
            yield f" {m['content'].strip()} </s>", True


LLAMA3_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"


@style(
    "llama-3.1",
    """{{- bos_token }}{%- set date = strftime_now("%d %b %Y") %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}{%- if tools %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Today Date: " + date + "\n\n" + system + "<|eot_id|>" }}
{%- if tools %}{%- set first = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n' }}
{%- for t in tools %}{{- t | tojson + "\n\n" }}{%- endfor %}{{- first + "<|eot_id|>" }}{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls|length != 1 %}{{- raise_exception("one tool call at a time") }}{%- endif %}
{%- set call = message.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}" }}
{%- if tools %}{{- "<|eom_id|>" }}{%- else %}{{- "<|eot_id|>" }}{%- endif %}
{%- else %}{{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + message.content + "<|eot_id|>" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
    "<|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|>",
    eos_token="<|eot_id|>",
    bos_token="<|begin|>",
    supports=frozenset({"turns", "system", "tools"}),
)
def llama31(messages: Messages, tools: Tools) -> Iterator[Piece]:
    rest = list(messages)
    system = rest.pop(0)["content"].strip() if rest[0]["role"] == "system" else ""
    environment = "Environment: ipython\n" if tools else ""
    yield f"<|begin|>{LLAMA3_HEADER.format('system')}{environment}Today Date: 01 Jan 2025\n\n{system}<|eot_id|>", False
    if tools:
        listed = "".join(f"{to_json(tool)}\n\n" for tool in tools)
        yield f"{LLAMA3_HEADER.format('user')}Functions:\n{listed}{rest.pop(0)['content'].strip()}<|eot_id|>", False
    for m in rest:
        role = {"tool": "ipython"}.get(m["role"], m["role"])
        yield LLAMA3_HEADER.format(role), False
        if "tool_calls" in m:
            call = m["tool_calls"][0]["function"]
            end = "<|eom_id|>" if tools else "<|eot_id|>"
            yield f'{{"name": "{call["name"]}", "parameters": {to_json(call["arguments"])}}}{end}', True
        else:
            yield m["content"].strip() + "<|eot_id|>", role == "assistant"


@style(
    "mistral",
    """{%- if messages[0].role == "system" %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}{%- set ns = namespace(index=0) %}
{%- for m in rest %}{%- if not (m.role == "tool" or m.tool_calls) %}
{%- if (m.role == "user") != (ns.index % 2 == 0) %}{{- raise_exception("roles must alternate") }}{%- endif %}
{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}
{{- bos_token }}{%- for m in rest %}{%- if m.role == "user" %}
{%- if tools and m == users[-1] %}{{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- if loop.last and system is defined %}{{- "[INST] " + system + "\n\n" + m.content + "[/INST]" }}
{%- else %}{{- "[INST] " + m.content + "[/INST]" }}{%- endif %}
{%- elif m.tool_calls %}{{- "[TOOL_CALLS] [" }}
{%- for call in m.tool_calls %}{{- call.function | tojson }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
{{- "]" + eos_token }}
{%- elif m.role == "assistant" %}{{- " " + m.content | trim + eos_token }}
{%- else %}{{- '[TOOL_RESULTS] {"content": ' + m.content + "}[/TOOL_RESULTS]" }}{%- endif %}{%- endfor %}""",
    "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
    supports=frozenset({"turns", "system", "tools"}),
)
def mistral(messages: Messages, tools: Tools) -> Iterator[Piece]:
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    rest = messages[1:] if system is not None else messages
    last_user = max(i for i, m in enumerate(rest) if m["role"] == "user")
    yield "<s>", False
    for i, m in enumerate(rest):
        if m["role"] == "user":
            if tools and m["content"] == rest[last_user]["content"]:
                yield f"[AVAILABLE_TOOLS] {to_json(tools)}[/AVAILABLE_TOOLS]", False
            prefix = f"{system}\n\n" if system is not None and i == len(rest) - 1 else ""
            yield f"[INST] {prefix}{m['content']}[/INST]", False
        elif m.get("tool_calls"):
            calls = ", ".join(to_json(call["function"]) for call in m["tool_calls"])
            yield f"[TOOL_CALLS] [{calls}]</s>", True
        elif m["role"] == "assistant":
            yield f" {m['content'].strip()}</s>", True
        else:
            yield f'[TOOL_RESULTS] {{"content": {m["content"]}}}[/TOOL_RESULTS]', False


@style(
    "mistral-with-system-last",
    """{%- if messages[0].role == "system" %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}{%- for m in rest %}{%- if m.role == "user" %}
{%- if system is defined and m == users[-1] %}{{- "[INST] " + system + "\n\n" + m.content + "[/INST]" }}
{%- else %}{{- "[INST] " + m.content + "[/INST]" }}{%- endif %}
{%- else %}{{- " " + m.content + eos_token }}{%- endif %}{%- endfor %}""",
    "[INST] [/INST]",
)
def mistral_system_last(messages: Messages, tools: Tools) -> Iterator[Piece]:
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    rest = messages[1:] if system is not None else messages
    last = [m["content"] for m in rest if m["role"] == "user"][-1]
    yield "<s>", False
    for m in rest:
        prefix = f"{system}\n\n" if system is not None and m["content"] == last else ""
        is_user = m["role"] == "user"
        yield (f"[INST] {prefix}{m['content']}[/INST]", False) if is_user else (f" {m['content']}</s>", True)


@style(
    "gemma",
    """{{ bos_token }}{%- if messages[0].role == 'system' -%}{%- set first = messages[0].content + '\n\n' -%}
{%- set rest = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}{%- set role = 'model' if m.role == 'assistant' else m.role -%}
{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}""",
    "<start_of_turn> <end_of_turn>",
    eos_token="<eos>",
    bos_token="<bos>",
)
def gemma(messages: Messages, tools: Tools) -> Iterator[Piece]:
    yield "<bos>", False
    first = ""
    for m in messages:
        if m["role"] == "system":
            first = m["content"] + "\n\n"
            continue
        is_model = m["role"] == "assistant"
        yield f"<start_of_turn>{'model' if is_model else 'user'}\n", False
        yield f"{first}{m['content'].strip()}<end_of_turn>", is_model
        yield "\n", False
        first = ""


@style(
    "phi-3",
    """{% for message in messages %}{% if message['content'] %}
{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "<|system|> <|user|> <|assistant|> <|end|>",
    eos_token="<|endoftext|>",
)
def phi3(messages: Messages, tools: Tools) -> Iterator[Piece]:
    for m in messages:
        yield f"<|{m['role']}|>\n", False
        yield m["content"] + "<|end|>", m["role"] == "assistant"
        yield "\n", False
    yield "<|endoftext|>", False


@style(
    "phi-4",
    """{% for message in messages %}
{{ '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
    "<|im_start|> <|im_sep|> <|im_end|>",
    eos_token="<|im_end|>",
)
def phi4(messages: Messages, tools: Tools) -> Iterator[Piece]:
    for m in messages:
        yield f"<|im_start|>{m['role']}<|im_sep|>", False
        yield m["content"] + "<|im_end|>", m["role"] == "assistant"


@style(
    "zephyr",
    """{% for message in messages %}{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% endif %}{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}{% endif %}{% endfor %}""",
    "",
)
def zephyr(messages: Messages, tools: Tools) -> Iterator[Piece]:
    for m in messages:
        yield f"<|{m['role']}|>", False
        yield f"\n{m['content']}</s>", m["role"] == "assistant"  # the generation prompt has no line break
        yield "\n", False


@style(
    "deepseek-r1",
    """{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for m in messages %}{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}{%- set content = m.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}""",
    "<｜User｜> <｜Assistant｜> <think> </think>",
    eos_token="<｜end▁of▁sentence｜>",
    supports=frozenset({"turns", "system", "thinking"}),
)
def deepseek_r1(messages: Messages, tools: Tools) -> Iterator[Piece]:
    yield "<s>", False
    for m in messages:
        if m["role"] == "system":
            yield m["content"], False
        elif m["role"] == "user":
            yield f"<｜User｜>{m['content']}", False
        else:
            yield "<｜Assistant｜>", False
            yield m["content"].split("</think>")[-1] + "<｜end▁of▁sentence｜>", True


@style(
    "cohere",
    """{{ bos_token }}{% for m in messages %}
{{- '<|START_OF_TURN_TOKEN|>'
+ {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>'}.get(m.role, '<|CHATBOT_TOKEN|>')
+ m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}""",
    "<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>",
    eos_token="<|END_OF_TURN_TOKEN|>",
)
def cohere(messages: Messages, tools: Tools) -> Iterator[Piece]:
    yield "<s>", False
    for m in messages:
        role = {"system": "SYSTEM", "user": "USER", "assistant": "CHATBOT"}[m["role"]]
        yield f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>", False
        yield m["content"].strip() + "<|END_OF_TURN_TOKEN|>", role == "CHATBOT"


@style(
    "granite",
    """{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = 'You are G.' %}{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}
{%- if tools %}{%- set listed = tools | tojson(indent=4) %}
{{- '<|start_of_role|>tools<|end_of_role|>' + listed + '<|end_of_text|>\n' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'tool' %}{%- set role = 'tool_response' %}
{%- else %}{%- set role = m.role %}{%- endif %}
{{- '<|start_of_role|>' + role + '<|end_of_role|>' }}
{%- if m.tool_calls %}{{- '<|tool_call|>' + m.tool_calls | map(attribute='function') | list | tojson }}
{%- else %}{{- m.content }}{%- endif %}{{- '<|end_of_text|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}""",
    "<|start_of_role|> <|end_of_role|> <|tool_call|>",
    eos_token="<|end_of_text|>",
    supports=frozenset({"turns", "system", "tools"}),
)
def granite(messages: Messages, tools: Tools) -> Iterator[Piece]:
    rest = list(messages)
    system = rest.pop(0)["content"] if rest[0]["role"] == "system" else "You are G."
    yield f"<|start_of_role|>system<|end_of_role|>{system}<|end_of_text|>\n", False
    if tools:
        listed = json.dumps(tools, ensure_ascii=False, indent=4)
        yield f"<|start_of_role|>tools<|end_of_role|>{listed}<|end_of_text|>\n", False
    for m in rest:
        role = {"tool": "tool_response"}.get(m["role"], m["role"])
        yield f"<|start_of_role|>{role}<|end_of_role|>", False
        calls = [call["function"] for call in m.get("tool_calls", [])]
        text = f"<|tool_call|>{to_json(calls)}" if calls else m["content"]
        yield text + "<|end_of_text|>", role == "assistant"
        yield "\n", False


@style(
    "vicuna",
    """{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}{{ 'A chat.' }}{% endif %}
{%- for m in messages %}{%- if m.role == 'user' %}{{- ' USER: ' + m.content.strip() }}
{%- elif m.role == 'assistant' %}{{- ' ASSISTANT: ' + m.content.strip() + eos_token }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- ' ASSISTANT:' }}{%- endif %}""",
    "",
)
def vicuna(messages: Messages, tools: Tools) -> Iterator[Piece]:
    yield messages[0]["content"] if messages[0]["role"] == "system" else "A chat.", False
    for m in messages:
        if m["role"] == "user":
            yield f" USER: {m['content'].strip()}", False
        elif m["role"] == "assistant":
            yield from [(" ASSISTANT:", False), (f" {m['content'].strip()}</s>", True)]


@style(
    "olmo-2",
    """{{ bos_token }}{% for m in messages %}{% if m.role != 'assistant' %}
{{- '<|' + m.role + '|>\n' + m.content + '\n' }}
{%- elif not loop.last %}{{ '<|assistant|>\n' + m.content + eos_token + '\n' }}
{%- else %}{{ '<|assistant|>\n' + m.content + eos_token }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}""",
    "",
)
def olmo2(messages: Messages, tools: Tools) -> Iterator[Piece]:
    yield "<s>", False
    for i, m in enumerate(messages):
        if m["role"] != "assistant":
            yield f"<|{m['role']}|>\n{m['content']}\n", False
        else:
            yield from [("<|assistant|>\n", False), (m["content"] + "</s>", True)]
            yield "\n" if i < len(messages) - 1 else "", False


@style(
    "glm-4",
    """[gMASK]<sop>{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}""",
    "[gMASK] <sop> <|system|> <|user|> <|assistant|>",
    eos_token="<|endoftext|>",
    stop_tokens=("<|user|>",),
)
def glm4(messages: Messages, tools: Tools) -> Iterator[Piece]:
    """The first token of the next user turn ends the assistant's turn. The last turn is followed by EOS."""
    yield "[gMASK]<sop>", False
    previous = None
    for m in messages:
        # The token that starts a user turn is what the model generates at the end of its own turn.
        yield f"<|{m['role']}|>", m["role"] == "user" and previous == "assistant"
        yield "\n", False
        yield m["content"], m["role"] == "assistant"
        previous = m["role"]
    if previous == "assistant":
        yield "<|endoftext|>", True


@style(
    "generation-blocks",
    """{% for m in messages %}{% if m.role == 'assistant' %}
{{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "<|im_start|> <|im_end|>",
    eos_token="<|im_end|>",
)
def generation_blocks(messages: Messages, tools: Tools) -> Iterator[Piece]:
    for m in messages:
        yield f"<|im_start|>{m['role']}\n", False
        yield m["content"] + "<|im_end|>", m["role"] == "assistant"
        # Jinja removes the first line break after a block, but not one that an expression writes.
        yield "\n\n" if m["role"] == "assistant" else "\n", False
