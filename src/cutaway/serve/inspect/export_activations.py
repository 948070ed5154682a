"""Results of the query `activation` for all tokens and sites of an exported page.

A query per token and site takes seconds for a short text. The values of all tokens of a site are therefore taken from
the cached activations at once, and the fields that do not depend on the token from one query. The results for two
tokens are compared with those of the query; if they differ, a query is run for every token of the site.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutaway.errors import CutawayError
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.export_bundle import (
    FLOAT16_8_BIT,
    FLOAT32,
    POSITION,
    ExportBundle,
    RowTensor,
    result_key,
    round_numbers,
)
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries import QUERIES
from cutaway.serve.inspect.queries.activation import compute_position_values
from cutaway.serve.inspect.snippet import build_snippet
from cutaway.serve.inspect.stage_sentences import StageInputs, describe_stage

Query = Callable[[int], QueryResult | None]


def list_shown_sites(inspector: Inspector) -> list[str]:
    """Return the sites, and the names of derived values, that the page can show."""
    attentions = [name.removesuffix(".q") for name in inspector.sites if name.endswith(".q")]
    embeddings = [name for name in inspector.sites if name.endswith("embed")]
    attention_values = [f"{name}.{suffix}" for name in attentions for suffix in ("mask", "position")]
    embedding_values = [f"{name}.{suffix}" for name in embeddings for suffix in ("token", "position")]
    # The residual stream before a block is the one after the previous block, which the page shows.
    sites = [name for name in inspector.sites if not name.endswith(".resid_pre") or ".cross." in name]
    return [*sites, *attention_values, *embedding_values, "softmax"]


def add_activations(
    bundle: ExportBundle,
    inspector: Inspector,
    model_input: dict[str, Any],
    positions: Sequence[int],
    source_positions: Sequence[int],
) -> None:
    """Add the results of the query `activation` at every shown site for these tokens of the text and the source."""
    validated = ModelInput.model_validate(model_input)
    site_names = [name for name in inspector.sites if not name.endswith((".scores", ".pattern", "logits"))]
    activations = inspector.get_activations_at(validated, site_names, QueryJob())
    for site in list_shown_sites(inspector):
        is_source = reads_source(inspector, site)
        name = "source_position" if is_source else "position"
        pattern = _find_pattern(bundle, inspector, model_input, site)

        def query(index: int, site: str = site, name: str = name) -> QueryResult | None:
            params = {"input": model_input, "position": 0, "source_position": 0, name: index, "site": site}
            try:
                return QUERIES["activation"].model_validate_json(json.dumps(params)).run(inspector, QueryJob())
            except CutawayError:  # a value that the model does not have, such as a position embedding
                return None

        indices = source_positions if is_source else positions
        precision = FLOAT32 if site in ("logits", "softmax") else FLOAT16_8_BIT
        # A key without the position of the other text: the result does not depend on it.
        params = {"input": model_input, "site": site}
        template = query(indices[-1]) if indices else None
        if template is None:
            continue
        rows = _build_rows(inspector, activations, validated, site, indices, query, template)
        if rows is None:
            for index in indices:
                result = query(index)
                assert result is not None
                bundle.add("activation", {**params, name: index}, result, group=site, precision=precision)
            continue
        stored = {} if pattern is None else {"values": pattern.rows(bundle, indices[0])}
        tensors = rows.store_tensors(bundle, indices, precision, stored)
        bundle.add_rows("activation", params, name, indices[0], rows.shared_fields, rows.columns(indices), tensors)


class _StoredPattern(NamedTuple):
    """The attention patterns (T, S) of all heads of an attention in the bundle, at equal distances."""

    first: int
    """Index of the tensor of the first head."""
    num_heads: int
    num_keys: int
    stride: int

    def rows(self, bundle: ExportBundle, first: int) -> RowTensor:
        """Return views of the weights (H, S) of the query tokens from `first` on."""
        dtype, _, offset = bundle.tensors[self.first]
        start, shape = offset + first * self.num_keys, [self.num_heads, self.num_keys]
        return RowTensor(dtype, start, self.num_keys, shape, [self.stride, 1])


def _find_pattern(
    bundle: ExportBundle, inspector: Inspector, model_input: dict[str, Any], site: str
) -> _StoredPattern | None:
    """Return where the patterns of a site are stored; None if they are not, or max-pooled because the text is long."""
    attention, _, suffix = site.rpartition(".")
    if suffix != "pattern":
        return None
    params = {"input": model_input, "attention": attention}
    heads = range(inspector.sites[f"{attention}.q"].num_heads or 0)
    entries = [bundle.results.get(result_key("attention_head", {**params, "head": head})) for head in heads]
    if None in entries or len(entries) < 2:
        return None
    indices = [entry[2]["pattern"] for entry in entries if entry is not None]
    tensors = [bundle.tensors[index] for index in indices]
    is_cross = attention.endswith(".cross") or site.startswith("encoder.")
    num_keys = len(model_input["source"] if is_cross and "source" in model_input else model_input["tokens"])
    stride = tensors[1][2] - tensors[0][2]
    if any(tensor[0] != "F16" or tensor[2] != tensors[0][2] + head * stride for head, tensor in enumerate(tensors)):
        return None
    return _StoredPattern(indices[0], len(heads), num_keys, stride) if tensors[0][1][1] == num_keys else None


def reads_source(inspector: Inspector, site: str) -> bool:
    """Whether the activation is of a source token of an encoder-decoder. The script of the page has the same rule."""
    is_encoder_decoder = len(inspector.model.stacks) > 1
    return is_encoder_decoder and (site.startswith("encoder.") or (".cross." in site and site.endswith((".k", ".v"))))


def _build_rows(
    inspector: Inspector,
    activations: ActivationCache,
    model_input: ModelInput,
    site: str,
    indices: Sequence[int],
    query: Query,
    template: QueryResult,
) -> "_ResultBuilder | None":
    """Return the results of all tokens, or None if they cannot be built from the cached activations.

    `template` is the result of the query for the last token.
    """
    values = _read_all_tokens(inspector, activations, site, max(indices) + 1)
    if values is None:
        return None
    build = _ResultBuilder(inspector, activations, model_input, site, values, template)
    is_equal = _are_equal(build(indices[-1]), template) and _are_equal(build(indices[0]), query(indices[0]))
    return build if is_equal else None


class _ResultBuilder:
    """Results of one site: the values (T, …) of all tokens, and the other fields from one result of the query."""

    def __init__(
        self,
        inspector: Inspector,
        activations: ActivationCache,
        model_input: ModelInput,
        site: str,
        values: Tensor,
        template: QueryResult,
    ) -> None:
        self.inspector, self.activations, self.template = inspector, activations, template
        self.model_input, self.site = model_input, site
        self.values, masked = values, values == -torch.inf
        self.has_masked = masked.flatten(1).any(1).tolist()
        self.all_tokens = {"values": values.masked_fill(masked, 0.0), "masked": masked}
        flat, finite = values.flatten(1), values.flatten(1).isfinite()
        count = finite.sum(1).clamp(min=1)
        self.statistics = {
            "norm": flat.masked_fill(~finite, 0.0).norm(dim=1).tolist(),
            "min": flat.masked_fill(~finite, torch.inf).amin(1).tolist(),
            "max": flat.masked_fill(~finite, -torch.inf).amax(1).tolist(),
            "mean": (flat.masked_fill(~finite, 0.0).sum(1) / count).tolist(),
        }
        self.has_values = finite.any(1).tolist()
        self.code = build_snippet(inspector, model_input, site, POSITION)

    def __call__(self, index: int) -> QueryResult:
        """Return the result of the query for a token."""
        names = ("values", "masked") if self.has_masked[index] else ("values",)
        code = self.code.replace(POSITION, str(index))
        data = {**self.template.data, **self.fields(index), "python_code": code}
        return QueryResult(data, {name: self.all_tokens[name][index] for name in names})

    @property
    def shared_fields(self) -> dict[str, object]:
        """The fields that are the same for all tokens; the Python code has a placeholder for the position."""
        return {**self.template.data, "python_code": self.code}

    def columns(self, indices: Sequence[int]) -> dict[str, list[object]]:
        """Return the fields that differ between the tokens: a list of their values by name."""
        rows = [self.fields(index) for index in indices]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def store_tensors(
        self, bundle: ExportBundle, indices: Sequence[int], precision: str, stored: Mapping[str, RowTensor]
    ) -> dict[str, RowTensor]:
        """Store the tensors of consecutive tokens, except those that are stored already."""
        rows, tensors = slice(indices[0], indices[-1] + 1), dict(stored)
        if "values" not in tensors:
            tensors["values"] = bundle.add_row_tensor(self.all_tokens["values"][rows], precision)
        if any(self.has_masked[rows]):
            masked = bundle.add_row_tensor(self.all_tokens["masked"][rows], precision)
            tensors["masked"] = masked._replace(present=[int(has) for has in self.has_masked[rows]])
        return tensors

    def fields(self, index: int) -> dict[str, object]:
        """Return the fields of a token that differ between the tokens."""
        statistics = {
            name: values[index] if self.has_values[index] else 0.0 for name, values in self.statistics.items()
        }
        with torch.no_grad():
            stage = StageInputs(self.inspector, self.activations, self.site, index, self.values[index])
            return {**statistics, "sentence": describe_stage(stage)}


def _read_all_tokens(inspector: Inspector, activations: ActivationCache, site: str, num_tokens: int) -> Tensor | None:
    """Return the values (T, …) of the tokens at a site; None for logits and softmax."""
    attention, _, suffix = site.rpartition(".")
    with torch.no_grad():
        if suffix in ("scores", "pattern", "mask") and attention in activations.attention_calls:
            recomputed = activations.recompute_attention(attention)
            scores = recomputed.scores[0].transpose(0, 1).float()  # (T, H, S)
            if suffix == "mask":
                return torch.zeros_like(scores).masked_fill(scores == -torch.inf, -torch.inf)
            return scores if suffix == "scores" else recomputed.pattern()[0].transpose(0, 1).float()
        if suffix in ("token", "position"):
            rows = [compute_position_values(inspector, activations, site, index)[0] for index in range(num_tokens)]
            return torch.stack(rows)
        if site not in activations.values:
            return None
        value = activations.values[site]
        return value[0].float() if value.ndim > 2 else value.float()


def _are_equal(built: QueryResult, expected: QueryResult | None) -> bool:
    """Whether two results have equal fields, up to rounding, and equal tensors."""
    if expected is None or built.tensors.keys() != expected.tensors.keys() or built.data.keys() != expected.data.keys():
        return False
    for name, value in built.data.items():
        other = expected.data[name]
        if isinstance(value, float) and isinstance(other, float):
            if abs(value - other) > 1e-4 * max(1.0, abs(other)):
                return False
        elif round_numbers(value) != round_numbers(other):
            return False
    return all(
        value.shape == expected.tensors[name].shape
        and torch.allclose(value.float(), expected.tensors[name].float(), atol=1e-5)
        for name, value in built.tensors.items()
    )
