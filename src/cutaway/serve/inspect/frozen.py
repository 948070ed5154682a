"""The page as one file: its script, its style, and the answers to what one may ask about one text."""

import base64
import html
import json
from collections.abc import Callable, Iterator
from typing import Any

from cutaway.errors import CutawayError
from cutaway.model import EncoderDecoder
from cutaway.serve.built import files
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.questions import QUESTIONS

MOST = 48 << 20
"""Bytes of answers; what is asked first is kept first."""
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none';"
    " form-action 'none'"
)


def as_file(of: Inspector, progress: Callable[[int, int], None] = lambda done, total: None) -> tuple[str, bool]:
    """The file's text, and whether it holds everything; for a long text the last tokens' stages are kept."""
    held: dict[str, str] = {}
    size, whole = 0, True
    asked = list(questions(of))
    for done, (name, given) in enumerate(asked):
        progress(done, len(asked))
        try:
            answer = QUESTIONS[name].model_validate_json(json.dumps(given)).answer(of, Job())
        except CutawayError:  # the page says so too: a model without a head, a layer without positions
            continue
        packed = base64.b64encode(answer.packed()).decode()
        size += len(packed)
        if size > MOST:
            whole = False
            break
        held[spelled(name, given)] = packed
    progress(len(asked), len(asked))
    return document(of.name, held), whole


def spelled(name: str, given: dict[str, Any]) -> str:
    """As the page spells a question."""
    return f"{name} {json.dumps(plain(given), separators=(',', ':'), sort_keys=True, ensure_ascii=False)}"


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if inner is not None}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def questions(of: Inspector) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the screens Follow, Attention and Learn ask about this text, for its last token first."""
    yield "about", {}
    words = of.words
    yield "tokens", {"text": words.text, "side": "text"}
    look: dict[str, Any] = {"tokens": words.ids(words.text)}
    source: list[int] = []
    if isinstance(of.model, EncoderDecoder):
        yield "tokens", {"text": words.source or "", "side": "source"}
        source = look["source"] = words.source_ids(words.source or "")
    beside = max(len(source) - 1, 0)
    tokens = list(range(len(look["tokens"])))[::-1]
    yield from (("stream", {"look": look}), ("proof", {"look": look}), ("attentions", {}), ("kinds", {}), ("walk", {}))
    places = [(at, beside) for at in tokens] + [(tokens[0], at) for at in range(beside)]
    for at, source_at in places:
        yield "lane", {"look": look, "at": at, "source_at": source_at}
    for at in tokens:
        yield "glance", {"look": look, "at": at}
        yield "next", {"look": look, "at": at, "temperature": 1}
        yield "credit", {"look": look, "at": at}
    attentions = [name.removesuffix(".q") for name in of.sites if name.endswith(".q")]
    for name in attentions:
        yield "wall", {"look": look, "attention": name}
        for head in range(of.sites[f"{name}.q"].heads or 0):
            yield "head", {"look": look, "attention": name, "head": head}
    for at, source_at in places:
        for site in stages(of, attentions):
            yield "stage", {"look": look, "at": at, "source_at": source_at, "site": site}
        for name in attentions:
            for head in range(of.sites[f"{name}.q"].heads or 0):
                yield "row", {"look": look, "attention": name, "head": head, "at": at}


def stages(of: Inspector, attentions: list[str]) -> list[str]:
    extra = [f"{name}.{what}" for name in attentions for what in ("mask", "position")]
    below = [f"{name}.{what}" for name in of.sites if name.endswith("embed") for what in ("token", "position")]
    return [*of.sites, *extra, *below, "softmax"]


def document(name: str, held: dict[str, str]) -> str:
    """Nothing in it is asked of any server. A model's name and words are data, never markup."""
    built = files()
    script = built["page.js"].decode().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    style = built["page.css"].decode().replace("</style", "<\\/style")
    answers = json.dumps({"name": name, "held": held}, ensure_ascii=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{html.escape(name)} · cutaway</title>
<style>{style}</style>
</head>
<body>
<div id="cutaway"></div>
<script type="application/json" id="cutaway-answers">{answers}</script>
<script type="module">{script}</script>
</body>
</html>
"""
