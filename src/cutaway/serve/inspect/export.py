"""The page as one file: its script, its style, and the answers to what one may ask about one text."""

import base64
import html
import json
from collections.abc import Callable, Iterator
from typing import Any

from cutaway.errors import CutawayError
from cutaway.model import EncoderDecoder
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries import QUERIES
from cutaway.serve.static_files import load_static_files

MAX_EXPORT_BYTES = 48 << 20
"""Bytes of answers; what is asked first is kept first."""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none';"
    " form-action 'none'"
)


def export_html(
    inspector: Inspector, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[str, bool]:
    """The file's text, and whether it holds everything; for a long text the last tokens' stages are kept."""
    held: dict[str, str] = {}
    size, whole = 0, True
    asked = list(list_export_queries(inspector))
    for done, (name, given) in enumerate(asked):
        progress(done, len(asked))
        try:
            answer = QUERIES[name].model_validate_json(json.dumps(given)).run(inspector, QueryJob())
        except CutawayError:  # the page says so too: a model without a head, a layer without positions
            continue
        packed = base64.b64encode(answer.to_safetensors()).decode()
        size += len(packed)
        if size > MAX_EXPORT_BYTES:
            whole = False
            break
        held[result_key(name, given)] = packed
    progress(len(asked), len(asked))
    return _render_html(inspector.name, held), whole


def result_key(query_name: str, params: dict[str, Any]) -> str:
    """As the page spells a question."""
    return f"{query_name} {json.dumps(_drop_none(params), separators=(',', ':'), sort_keys=True, ensure_ascii=False)}"


def _drop_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_none(inner) for key, inner in value.items() if inner is not None}
    return [_drop_none(inner) for inner in value] if isinstance(value, list) else value


def list_export_queries(inspector: Inspector) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the screens Trace, Attention and Learn ask about this text, for its last token first."""
    yield "model_info", {}
    words = inspector.tokenizer
    yield "tokenize", {"text": words.default_text, "field": "text"}
    model_input: dict[str, Any] = {"tokens": words.encode(words.default_text)}
    source: list[int] = []
    if isinstance(inspector.model, EncoderDecoder):
        yield "tokenize", {"text": words.default_source or "", "field": "source"}
        source = model_input["source"] = words.encode_source(words.default_source or "")
    beside = max(len(source) - 1, 0)
    tokens = list(range(len(model_input["tokens"])))[::-1]
    yield "residual_norms", {"input": model_input}
    yield "consistency_check", {"input": model_input}
    yield from (("attention_layers", {}), ("head_types", {}), ("lessons", {}))
    positions = [(position, beside) for position in tokens] + [(tokens[0], position) for position in range(beside)]
    for position, source_position in positions:
        yield "journey", {"input": model_input, "position": position, "source_position": source_position}
    for position in tokens:
        yield "attention_by_layer", {"input": model_input, "position": position}
        yield "next_token", {"input": model_input, "position": position, "temperature": 1}
        yield "logit_attribution", {"input": model_input, "position": position}
    attentions = [name.removesuffix(".q") for name in inspector.sites if name.endswith(".q")]
    for name in attentions:
        yield "attention_thumbnails", {"input": model_input, "attention": name}
        for head in range(inspector.sites[f"{name}.q"].num_heads or 0):
            yield "attention_head", {"input": model_input, "attention": name, "head": head}
    for position, source_position in positions:
        for site in _list_activation_sites(inspector, attentions):
            where = {"position": position, "source_position": source_position}
            yield "activation", {"input": model_input, **where, "site": site}
        for name in attentions:
            for head in range(inspector.sites[f"{name}.q"].num_heads or 0):
                yield "attention_row", {"input": model_input, "attention": name, "head": head, "position": position}


def _list_activation_sites(inspector: Inspector, attention_names: list[str]) -> list[str]:
    extra = [f"{name}.{what}" for name in attention_names for what in ("mask", "position")]
    below = [f"{name}.{what}" for name in inspector.sites if name.endswith("embed") for what in ("token", "position")]
    return [*inspector.sites, *extra, *below, "softmax"]


def _render_html(model_name: str, results: dict[str, str]) -> str:
    """Nothing in it is asked of any server. A model's name and words are data, never markup."""
    built = load_static_files()
    script = built["page.js"].decode().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    style = built["page.css"].decode().replace("</style", "<\\/style")
    answers = json.dumps({"name": model_name, "results": results}, ensure_ascii=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">
<title>{html.escape(model_name)} · cutaway</title>
<style>{style}</style>
</head>
<body>
<div id="cutaway"></div>
<script type="application/json" id="cutaway-results">{answers}</script>
<script type="module">{script}</script>
</body>
</html>
"""
