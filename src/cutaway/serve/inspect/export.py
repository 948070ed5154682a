"""Export of the inspector page as one HTML file: script, style, and the results of the queries of its screens."""

import html
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cutaway.errors import CutawayError
from cutaway.model import EncoderDecoder, EncoderOnly, Transformer
from cutaway.serve.inspect.export_activations import add_activations, list_shown_sites
from cutaway.serve.inspect.export_bundle import BASE85, FLOAT16, FLOAT16_8_BIT, FLOAT32, ExportBundle, encode_base85
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries import QUERIES
from cutaway.serve.static_files import load_static_files

MAX_EXPORT_BYTES = 48 << 20
"""Maximum size of the activations in bytes. If those of all tokens exceed it, the first tokens are left out."""
MAX_SINGLE_THREAD_PARAMETERS = 30_000_000
MAX_POSITION_PAIRS = 1024
"""Maximum number of pairs of a target and a source token of an encoder-decoder."""
MAX_HEAD_EDITS = 32
"""Maximum number of edits of single heads; with more heads, none is included."""
NUM_NEW_TOKENS = 24
"""Number of generated tokens, as in Generate.svelte."""
SIZE_DEVICES = ("h100-sxm", "rtx-4090")
"""Devices of the screen Size, besides the first Apple device and the first CPU of the catalog."""
WITHOUT_INPUT = (
    "attention_layers",
    "head_types",
    "lessons",
    "interview_questions",
    "ablation_results",
    "trained_variants",
)
"""Queries without parameters."""
EDIT_TENSORS = ("kl", "norms_before", "norms_after")
"""Tensors of the query `edit_effect` that the page shows."""
PRECISIONS = {
    "attention_head": FLOAT16,
    "attention_by_layer": FLOAT16,
    "attention_thumbnails": FLOAT16_8_BIT,
    "edit_effect": FLOAT16,
}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none';"
    " form-action 'none'"
)
SCRIPT_LOADER = """
const digits = "%(digits)s", text = document.getElementById("cutaway-script").textContent;
const bytes = new DataView(new ArrayBuffer(text.length / 5 * 4));
for (let index = 0, at = 0; index < text.length; index += 5, at += 4) {
  let word = 0;
  for (let digit = 0; digit < 5; digit++) word = word * 85 + digits.indexOf(text[index + digit]);
  bytes.setUint32(at, word);
}
const compressed = new Blob([new Uint8Array(bytes.buffer, 0, %(size)d)]).stream();
const script = document.createElement("script");
script.type = "module";
script.textContent = await new Response(compressed.pipeThrough(new DecompressionStream("deflate"))).text();
document.head.append(script);
"""
"""Script that decompresses and runs the script of the page, which is a third as large in this form."""
Params = dict[str, Any]


def export_html(inspector: Inspector, progress: Callable[[int, int], None]) -> tuple[str, bool]:
    """Return the inspector page as HTML, and whether it contains the results of all tokens of the default text."""
    exporter = _Exporter(inspector)
    queries = list(exporter.list_queries())
    total = len(queries) + 1
    with _one_thread(inspector.model):
        for done, (name, params) in enumerate(queries):
            progress(done, total)
            exporter.run(name, params)
        progress(len(queries), total)
        exporter.add_activations()
    progress(total, total)
    return _render_html(inspector.name, exporter), len(exporter.positions) == len(exporter.model_input["tokens"])


@contextmanager
def _one_thread(model: Transformer) -> Iterator[None]:
    """Run a small model in one thread: its operations take less time than the synchronization of several threads."""
    num_threads = torch.get_num_threads()
    if sum(parameter.numel() for parameter in model.parameters()) < MAX_SINGLE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class _RecordingJob(QueryJob):
    """A job that keeps partial results."""

    def __init__(self, partials: list[QueryResult]) -> None:
        super().__init__()
        self.partials = partials

    def send_partial(self, result: QueryResult) -> None:
        self.partials.append(result)


class _Exporter:
    """The default input of an inspector, and the results of the queries that the exported page sends for it."""

    def __init__(self, inspector: Inspector) -> None:
        self.inspector, tokenizer = inspector, inspector.tokenizer
        self.model_input: Params = {"tokens": tokenizer.encode(tokenizer.default_text)}
        if isinstance(inspector.model, EncoderDecoder):
            self.model_input["source"] = tokenizer.encode_source(tokenizer.default_source or "")
        self.bundle = ExportBundle(
            str(self.model_input["tokens"])
        )  # the Python code of each activation has the token ids
        length, self.num_source = len(self.model_input["tokens"]), len(self.model_input.get("source", ()))
        self.positions = self._select_positions(length)
        default = tokenizer.default_position
        self.position = self.positions[-1] if default is None or default not in self.positions else default
        self.edits: list[dict[str, Any]] = []
        self.devices: list[str] = []

    def _select_positions(self, length: int) -> list[int]:
        """Return the last positions whose activations fit in MAX_EXPORT_BYTES."""
        per_token = 0
        for name in list_shown_sites(self.inspector):
            site = self.inspector.sites.get(name)
            if site is not None:
                shape = site.shape(1, length, self.num_source or None)
                per_token += 2 * torch.Size(shape).numel() // max(1, length)
        count = max(1, min(length, MAX_EXPORT_BYTES // max(1, per_token)))
        return list(range(length - count, length))

    def run(self, name: str, params: Params) -> None:
        """Run a query and add its result. A query that does not apply to the model has none."""
        partials: list[QueryResult] = []
        job = _RecordingJob(partials)
        try:
            result = QUERIES[name].model_validate_json(json.dumps(params)).run(self.inspector, job)
        except CutawayError:  # the live page shows the same error, such as that the model has no head
            return
        if name == "size_catalog":
            result = self._filter_catalog(result)
        if name == "model_info":
            result = QueryResult({**result.data, "examples": []}, result.tensors)
        if name == "edit_effect":
            self.edits.append(params["input"].get("edits", {}))
            result = QueryResult(
                result.data, {key: result.tensors[key] for key in EDIT_TENSORS if key in result.tensors}
            )
        self.bundle.add(
            name,
            params,
            result,
            group=str(params.get("attention", "")),
            partials=partials if name == "generate" else None,
            precision=PRECISIONS.get(name, FLOAT32),
        )

    def _filter_catalog(self, result: QueryResult) -> QueryResult:
        devices: Any = result.data["devices"]
        kept = [device for device in devices if device["name"] in self.devices]
        return QueryResult({**result.data, "presets": [], "dtypes": [], "devices": kept})

    def add_activations(self) -> None:
        sources = list(range(self.num_source))
        add_activations(self.bundle, self.inspector, self.model_input, self.positions, sources)

    def list_queries(self) -> Iterator[tuple[str, Params]]:
        """Yield name and parameters of the queries that the exported page sends, except those of single activations."""
        inspector, tokenizer, model_input = self.inspector, self.inspector.tokenizer, self.model_input
        yield from (("model_info", {}), ("architecture", {}))
        yield "tokenize", {"text": tokenizer.default_text, "field": "text"}
        if self.num_source:
            yield "tokenize", {"text": tokenizer.default_source or "", "field": "source"}
        for name in ("residual_norms", "consistency_check"):
            yield name, {"input": model_input}
        for name in WITHOUT_INPUT:
            yield name, {}
        for position, source_position in self.list_position_pairs():
            yield "journey", {"input": model_input, "position": position, "source_position": source_position}
        for position in self.positions:
            yield "attention_by_layer", {"input": model_input, "position": position}
            yield "next_token", {"input": model_input, "position": position, "temperature": 1}
            yield "logit_attribution", {"input": model_input, "position": position}
        for attention in [name.removesuffix(".q") for name in inspector.sites if name.endswith(".q")]:
            yield "attention_thumbnails", {"input": model_input, "attention": attention}
            is_source = self.num_source > 0 and attention.startswith("encoder.")
            position = self.num_source - 1 if is_source else self.position
            for head in range(inspector.sites[f"{attention}.q"].num_heads or 0):
                params = {"input": model_input, "attention": attention, "head": head}
                yield "attention_head", params
                yield "worked_attention", {**params, "position": position}
        yield "interventions", {"input": model_input, "position": self.position}
        for edits in self.list_edits():
            yield "edit_effect", {"input": {**model_input, "edits": edits}, "position": self.position}
        yield from self.list_generation()
        yield from self.list_sizes()

    def list_position_pairs(self) -> list[tuple[int, int]]:
        """Return pairs of a target and a source position: all of them, or the first ones if there are too many."""
        sources = range(max(1, self.num_source))
        pairs = [(position, source) for position in self.positions for source in reversed(sources)]
        default = [(position, sources[-1]) for position in self.positions]
        default += [(self.position, source) for source in sources]
        return pairs if len(pairs) <= MAX_POSITION_PAIRS else list(dict.fromkeys(default))

    def list_edits(self) -> list[dict[str, Any]]:
        """Return single edits: none, no mask, no positions, and without a block, a sublayer or a head."""
        info = QUERIES["model_info"]().run(self.inspector, QueryJob()).data
        structural: Any = info["structural_edits"]
        stack_prefixes = [f"{name}." for name in self.inspector.model.stacks] if self.num_source else [""]
        edits: list[dict[str, Any]] = [{}]
        heads: list[dict[str, Any]] = []
        for prefix in stack_prefixes:
            for name in ("mask", "positions"):
                if "drop" in structural.get(f"{prefix}{name}", ()):
                    edits.append({f"{prefix}{name}": {"do": "drop"}})
            stack = self.inspector.model.stacks[prefix.removesuffix(".")] if prefix else self.inspector.output_stack
            for layer in range(len(stack.blocks)):
                block = f"{prefix}blocks.{layer}"
                if "skip" in structural.get(block, ()):
                    edits.append({block: {"do": "skip"}})
                sublayers = [f"{block}.{name}.out" for name in ("attn", "cross", "ffn")]
                edits += [{site: {"do": "zero"}} for site in sublayers if site in self.inspector.sites]
                num_heads = self.inspector.sites[f"{block}.attn.q"].num_heads or 0
                heads += [{f"{block}.attn.z": {"do": "zero", "heads": [head]}} for head in range(num_heads)]
        return edits + (heads if len(heads) <= MAX_HEAD_EDITS else [])

    def list_generation(self) -> Iterator[tuple[str, Params]]:
        """Yield the query of the greedy continuation, or of the predictions at the masks of an encoder."""
        if isinstance(self.inspector.model, EncoderOnly):
            yield "fill_mask", {"text": self.inspector.tokenizer.default_text}
            return
        tokens = self.model_input["tokens"][:1] if self.num_source else self.model_input["tokens"]
        context = self.inspector.config.context
        if not self.num_source and context is not None and len(tokens) >= context:
            return
        yield (
            "generate",
            {
                "input": {**self.model_input, "tokens": tokens},
                "num_prompt_tokens": len(tokens),
                "num_tokens": NUM_NEW_TOKENS,
                "max_new_tokens": NUM_NEW_TOKENS,
                "temperature": 0,
                "seed": 0,
            },
        )

    def list_sizes(self) -> Iterator[tuple[str, Params]]:
        """Yield the queries of the size of the model for inference and training on a few devices."""
        catalog: Any = QUERIES["size_catalog"]().run(self.inspector, QueryJob()).data
        by_kind = {device["kind"]: device["name"] for device in reversed(catalog["devices"])}
        names = {device["name"] for device in catalog["devices"]}
        selected = (*SIZE_DEVICES, by_kind.get("apple", ""), by_kind.get("cpu", ""))
        self.devices = [name for name in selected if name in names]
        yield "size_catalog", {}
        for hardware in self.devices:
            for mode in ("infer", "train"):
                options = {"batch_size": 1, "mode": mode, "hardware": hardware}
                yield "model_sizes", {"models": [{"base": catalog["loaded_model"]}], **options}
                yield "memory_fit", {"model": {"base": catalog["loaded_model"]}, **options}


def _render_html(model_name: str, exporter: _Exporter) -> str:
    """Return the exported page as HTML without network requests. The model name and the query results are escaped."""
    files = load_static_files()
    script = zlib.compress(files["page.js"], 9)
    style = files["page.css"].decode().replace("</style", "<\\/style")
    bundle = exporter.bundle.to_bytes()
    embedded = {
        "name": model_name,
        "positions": exporter.positions,
        "edit_position": exporter.position,
        "edits": exporter.edits,
        "bundle": encode_base85(bundle),
        "bundle_bytes": len(bundle),
    }
    embedded_results = json.dumps(embedded, ensure_ascii=False).replace("<", "\\u003c")
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
<script type="text/plain" id="cutaway-script">{encode_base85(script)}</script>
<script type="module">{SCRIPT_LOADER % {"digits": BASE85, "size": len(script)}}</script>
</body>
</html>
"""
