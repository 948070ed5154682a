"""Export of the inspector page as one HTML file: script, style, and the query results of four screens for one text."""

import base64
import html
import json
from collections.abc import Callable, Iterator

from cutaway.errors import CutawayError
from cutaway.model import EncoderDecoder
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries import QUERIES
from cutaway.serve.static_files import load_static_files

MAX_EXPORT_BYTES = 48 << 20
"""Maximum size of all query results in bytes. Queries are included in order until this limit is reached."""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none';"
    " form-action 'none'"
)


def export_html(inspector: Inspector, progress: Callable[[int, int], None]) -> tuple[str, bool]:
    """Return the inspector page as HTML, and whether it contains all query results for the default text.

    If the results exceed MAX_EXPORT_BYTES, the results for the first tokens of the text are left out.
    """
    results: dict[str, str] = {}
    size, is_complete = 0, True
    queries = list(_list_export_queries(inspector))
    for done, (name, params) in enumerate(queries):
        progress(done, len(queries))
        try:
            result = QUERIES[name].model_validate_json(json.dumps(params)).run(inspector, QueryJob())
        except CutawayError:  # the live page shows the same error, such as that the model has no head
            continue
        encoded = base64.b64encode(result.to_safetensors()).decode()
        size += len(encoded)
        if size > MAX_EXPORT_BYTES:
            is_complete = False
            break
        results[_result_key(name, params)] = encoded
    progress(len(queries), len(queries))
    return _render_html(inspector.name, results), is_complete


def _result_key(query_name: str, params: dict[str, object]) -> str:
    """Return the key of a query's result in the exported page. The script of the page builds the same string."""
    return f"{query_name} {json.dumps(_drop_none(params), separators=(',', ':'), sort_keys=True, ensure_ascii=False)}"


def _drop_none(value: object) -> object:
    if isinstance(value, dict):
        return {key: _drop_none(inner) for key, inner in value.items() if inner is not None}
    return [_drop_none(inner) for inner in value] if isinstance(value, list) else value


def _list_export_queries(inspector: Inspector) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield name and parameters of the queries for the default text: screens Model, Trace, Attention and Learn.

    Queries about single tokens start with the last token.
    """
    yield "model_info", {}
    yield "architecture", {}
    tokenizer = inspector.tokenizer
    yield "tokenize", {"text": tokenizer.default_text, "field": "text"}
    model_input = {"tokens": tokenizer.encode(tokenizer.default_text)}
    if isinstance(inspector.model, EncoderDecoder):
        yield "tokenize", {"text": tokenizer.default_source or "", "field": "source"}
        model_input["source"] = tokenizer.encode_source(tokenizer.default_source or "")
    last_source_position = max(len(model_input.get("source", ())) - 1, 0)
    tokens = list(range(len(model_input["tokens"])))[::-1]
    yield "residual_norms", {"input": model_input}
    yield "consistency_check", {"input": model_input}
    yield "interventions", {"input": model_input, "position": tokens[0]}
    yield from (("attention_layers", {}), ("head_types", {}), ("lessons", {}))
    positions = [(position, last_source_position) for position in tokens]
    positions += [(tokens[0], position) for position in range(last_source_position)]
    for position, source_position in positions:
        yield "journey", {"input": model_input, "position": position, "source_position": source_position}
    for position in tokens:
        yield "attention_by_layer", {"input": model_input, "position": position}
        yield "next_token", {"input": model_input, "position": position, "temperature": 1}
        yield "logit_attribution", {"input": model_input, "position": position}
    attentions = [name.removesuffix(".q") for name in inspector.sites if name.endswith(".q")]
    heads = [(name, head) for name in attentions for head in range(inspector.sites[f"{name}.q"].num_heads or 0)]
    for name in attentions:
        yield "attention_thumbnails", {"input": model_input, "attention": name}
        for head in [head for attention, head in heads if attention == name]:
            yield "attention_head", {"input": model_input, "attention": name, "head": head}
    for position, source_position in positions:
        for site in _list_activation_sites(inspector, attentions):
            positions_at = {"position": position, "source_position": source_position}
            yield "activation", {"input": model_input, **positions_at, "site": site}
        for name, head in heads:
            yield "attention_row", {"input": model_input, "attention": name, "head": head, "position": position}


def _list_activation_sites(inspector: Inspector, attention_names: list[str]) -> list[str]:
    embeddings = [name for name in inspector.sites if name.endswith("embed")]
    attention_sites = [f"{name}.{suffix}" for name in attention_names for suffix in ("mask", "position")]
    embedding_sites = [f"{name}.{suffix}" for name in embeddings for suffix in ("token", "position")]
    return [*inspector.sites, *attention_sites, *embedding_sites, "softmax"]


def _render_html(model_name: str, results: dict[str, str]) -> str:
    """Return the exported page as HTML without network requests. The model name and the query results are escaped."""
    files = load_static_files()
    script = files["page.js"].decode().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    style = files["page.css"].decode().replace("</style", "<\\/style")
    embedded_results = json.dumps({"name": model_name, "results": results}, ensure_ascii=False).replace("<", "\\u003c")
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
<script type="application/json" id="cutaway-results">{embedded_results}</script>
<script type="module">{script}</script>
</body>
</html>
"""
