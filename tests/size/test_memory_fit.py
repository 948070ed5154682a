"""`fit_to_memory`: exact limits at the budget, and shapes near it."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutaway as ct
from cutaway.errors import InputError
from cutaway.size import count_parameters, memory_fit, size
from cutaway.size.estimate import SizeEstimate
from cutaway.size.memory_fit import SEARCH_LIMIT, MemoryFit, compare_models, find_max_fitting, fit_to_memory
from cutaway.size.model_scaling import (
    MAX_TABLE_SIZE,
    build_family_config,
    scale_config,
)

KINDS = [
    "gpt2", "opt-350m", "bloom-560m", "falcon-7b", "llama-3.2-1b", "mistral-7b-v0.1", "gemma-2-2b", "gemma-3-1b",
    "olmoe-1b-7b", "gpt-oss-20b", "deepseek-v2-lite", "bert-base", "albert-base-v2", "modernbert-base", "t5-small",
    "bart-base", "opus-mt-en-fr", "tiny-mla",
]  # fmt: skip
"""One preset per kind of attention, FFN, position and form."""


@pytest.fixture
def without_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not list model shapes, which takes most of the time."""
    monkeypatch.setattr(memory_fit, "list_shapes_near_budget", lambda *_: ((), ""))


def total_bytes(fit: MemoryFit, **changes: Any) -> int:
    """Memory of the fit's options with changes; the source length equals the context."""
    if "context" in changes:
        changes.setdefault("source_len", changes["context"])
    return SizeEstimate(replace(fit.options, **changes)).memory.total_bytes


# ---------------------------------------------------------------------------------------- context length and batch size


@given(
    slopes=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    bends=st.lists(st.integers(1, SEARCH_LIMIT), min_size=3, max_size=3),
    base=st.integers(0, 10**6),
    budget=st.integers(0, 10**12),
)
def test_find_max_fitting_is_exact_for_piecewise_linear_totals(
    slopes: list[int], bends: list[int], base: int, budget: int
) -> None:
    def line(n: int) -> int:
        return base + sum(slope * max(0, n - bend) for slope, bend in zip(slopes, [0, *bends], strict=False))

    result = find_max_fitting(line, budget, SEARCH_LIMIT)
    if result is None:
        assert line(1) > budget
    else:
        assert line(result) <= budget
        assert result == SEARCH_LIMIT or line(result + 1) > budget


def test_find_max_fitting_takes_few_steps() -> None:
    steps = []

    def line(n: int) -> int:
        steps.append(n)
        return 10**9 + 131_072 * n + 60_000 * min(n, 8192)

    assert find_max_fitting(line, 24 * 10**9, SEARCH_LIMIT) == (23 * 10**9 - 60_000 * 8192) // 131_072
    assert len(steps) < 12


@pytest.mark.sample(8)
@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", KINDS)
def test_memory_is_monotonic_in_context_and_batch_size(name: str, mode: str) -> None:
    options = size(name, mode=mode, context=100).options
    for changes in (
        [{"context": tokens, "source_len": tokens} for tokens in (1, 2, 33, 127, 128, 129, 500, 513, 2000, 4097, 8192)],
        [{"context": 8192 + extra, "source_len": 8192 + extra} for extra in (1, 2, 500, 10_000, 10**6)],
        [{"batch_size": batch} for batch in (1, 2, 3, 50, 81, 82, 500)],
    ):
        totals = [SizeEstimate(replace(options, **change)).memory.total_bytes for change in changes]
        assert totals == sorted(totals)


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", ct.presets())
def test_memory_of_every_preset_is_monotonic(name: str) -> None:
    options = size(name, context=100).options
    for field in ("context", "batch_size"):
        totals = [SizeEstimate(replace(options, **{field: value})).memory.total_bytes for value in (1, 60, 1000)]
        assert totals == sorted(totals)


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-3-8b", "24GB", {}),
    ("llama-3-8b", "80GB", {"batch_size": 32}),
    ("llama-3.2-1b", "30GB", {"mode": "train", "activation_checkpointing": "full", "context": 512}),
    ("llama-3-8b", "24GB", {"dtype": "int4", "kv_cache_dtype": "int8", "batch_size": 5, "context": 2000}),
    ("smollm2-135m", "9GB", {"mode": "train", "world_size": 4, "batch_size": 8, "parallel": "fsdp", "context": 100}),
    ("llama-3.2-1b", "6GB", {"world_size": 3, "batch_size": 6, "context": 1000}),
    ("gemma-2-2b", "9GB", {"batch_size": 3, "context": 1000}),
    ("gemma-3-1b", "4GB", {"kernel": "flex"}),
    ("deepseek-v2-lite", "60GB", {"context": 4096}),
    ("tiny-t5", "1GB", {"batch_size": 2}),
    ("t5-small", "2GB", {"source_len": 700, "context": 20}),
    ("bert-base", "1GB", {"mode": "train"}),
]


@pytest.mark.usefixtures("without_shapes")
@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "memory", "options"), CASES)
def test_maxima_fit_and_one_more_does_not(name: str, memory: str, options: dict[str, Any]) -> None:
    fit = fit_to_memory(memory, name, **options)
    fixed = {"source_len": options["source_len"]} if "source_len" in options else {}
    assert fit.total_bytes == size(name, **options).memory.total_bytes
    assert fit.fits == (fit.total_bytes <= fit.memory_budget)
    max_context, max_batch_size = fit.max_context, fit.max_batch_size
    if max_context is not None:
        assert total_bytes(fit, context=max_context, **fixed) <= fit.memory_budget
        if not fit.unbounded_context and max_context != fit.max_position_embeddings:
            assert total_bytes(fit, context=max_context + 1, **fixed) > fit.memory_budget
        shorter = {1, max_context // 2, *(8192 // rows for rows in range(1, 9) if 8192 // rows <= max_context)} - {0}
        assert all(total_bytes(fit, context=context, **fixed) <= fit.memory_budget for context in shorter)
    if max_batch_size is not None:
        step = 1 if fit.options.parallel == "tp" else fit.options.world_size
        assert max_batch_size % step == 0
        assert total_bytes(fit, batch_size=max_batch_size) <= fit.memory_budget
        assert fit.unbounded_batch_size or total_bytes(fit, batch_size=max_batch_size + step) > fit.memory_budget
    assert max_context is not None or total_bytes(fit, context=1, **fixed) > fit.memory_budget
    assert fit.fits == (max_batch_size is not None and max_batch_size >= fit.options.batch_size)


@pytest.mark.usefixtures("without_shapes")
def test_model_that_does_not_fit_has_no_maxima() -> None:
    fit = fit_to_memory("16GB", "llama-3-70b")
    assert (fit.fits, fit.max_context, fit.max_batch_size) == (False, None, None)
    assert not fit.exceeds_model_context


@pytest.mark.usefixtures("without_shapes")
def test_position_table_limits_the_context() -> None:
    fit = fit_to_memory("2GB", "gpt2")
    assert fit.max_context == fit.max_position_embeddings == 1024
    assert not fit.exceeds_model_context
    assert not fit.unbounded_context
    assert fit_to_memory("2GB", "opus-mt-en-fr").max_context == 512  # sinusoids stored as a table
    with pytest.raises(InputError, match=r"1025.*has 1024 rows; pass at most 1024"):
        fit_to_memory("2GB", "gpt2", context=1025)
    with pytest.raises(InputError, match=r"source_len is 4000.*encoder's position table"):
        fit_to_memory("2GB", "bart-base", context=10, source_len=4000)


@pytest.mark.usefixtures("without_shapes")
def test_rope_has_no_limit_but_reports_exceeding_the_model_context() -> None:
    fit = fit_to_memory("40GB", "llama-3-8b")
    assert fit.max_position_embeddings is None
    assert fit.exceeds_model_context
    assert fit.max_context is not None
    assert fit.max_context > 8192
    assert not fit_to_memory("17GB", "llama-3-8b", context=100).exceeds_model_context


@pytest.mark.usefixtures("without_shapes")
def test_sliding_windows_can_bound_the_memory() -> None:
    fit = fit_to_memory("24GB", "mistral-7b-v0.1", kernel="flex")
    assert fit.unbounded_context
    assert fit.max_context == SEARCH_LIMIT
    assert total_bytes(fit, context=SEARCH_LIMIT) == total_bytes(fit, context=SEARCH_LIMIT // 2)


# ---------------------------------------------------------------------------------------- known cases


def test_classic_6b_fits_16_gb_in_fp16_and_13b_does_not() -> None:
    six, thirteen = (scale_config(build_family_config("classic"), *shape) for shape in ((32, 4096), (40, 5120)))
    assert 6.4e9 < count_parameters(six).total < 6.9e9
    assert (
        size(six, context=512, dtype="fp16").memory.total_bytes
        < 16e9
        < size(thirteen, dtype="fp16").checkpoint.total_bytes
    )
    listed = {
        (shape.layers, shape.d_model): shape for shape in fit_to_memory("16GB", "classic", dtype="fp16").model_shapes
    }
    assert listed[32, 4096].fits
    assert listed[32, 4096].num_parameters == count_parameters(six).total
    assert listed[32, 4096].heads == 32
    assert not any(shape.fits for (layers, width), shape in listed.items() if layers >= 40 and width >= 5120)


@pytest.mark.usefixtures("without_shapes")
@pytest.mark.parametrize(("dtype", "fits"), [("bf16", False), ("int8", True), ("int4", True)])
def test_llama_3_8b_in_16_gb(dtype: str, fits: bool) -> None:
    assert fit_to_memory("16GB", "llama-3-8b", dtype=dtype).fits is fits


# ---------------------------------------------------------------------------------------- shapes
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("source", "memory", "options"),
    [
        ("classic", "16GB", {}),
        ("llama", "24GB", {"mode": "train", "context": 512}),
        ("llama-3.2-1b", "8GB", {"context": 1000}),
        ("gpt2", "1GB", {}),
        ("gemma-3-1b", "4GB", {}),
        ("olmoe-1b-7b", "16GB", {}),
        ("tiny-mla", "1GB", {}),
        ("bert-base", "1GB", {}),
        ("t5-small", "1GB", {}),
        ("llama-3-8b", "8GB", {"world_size": 4, "parallel": "tp"}),
    ],
)
def test_model_shapes_are_near_the_budget_and_exact(source: str, memory: str, options: dict[str, Any]) -> None:
    fit = fit_to_memory(memory, source, **options)
    listed = fit.model_shapes
    assert {shape.fits for shape in listed} == {True, False}
    assert listed == tuple(sorted(listed, key=lambda shape: (shape.layers, shape.d_model)))
    assert len({shape.layers for shape in listed}) <= MAX_TABLE_SIZE
    assert len({shape.d_model for shape in listed}) <= MAX_TABLE_SIZE
    for shape in listed[:: max(1, len(listed) // 5)]:
        config = scale_config(fit.options.config, shape.layers, shape.d_model)
        estimate = SizeEstimate(replace(fit.options, config=config))
        assert (estimate.memory.total_bytes, estimate.num_parameters) == (shape.total_bytes, shape.num_parameters)
        assert shape.fits == (shape.total_bytes <= fit.memory_budget)
        assert fit.memory_budget / 10 < shape.total_bytes < 2.5 * fit.memory_budget


def test_source_near_the_budget_is_listed() -> None:
    fit = fit_to_memory("24GB", "llama-3-8b")
    assert [shape.total_bytes for shape in fit.model_shapes if (shape.layers, shape.d_model) == (32, 4096)] == [
        fit.total_bytes
    ]


def test_family_has_shapes_only() -> None:
    fit = fit_to_memory("16GB", "llama", context=100)
    assert fit.family == "llama"
    assert (fit.total_bytes, fit.fits, fit.max_context, fit.max_batch_size) == (None, None, None, None)


def test_note_if_no_or_every_shape_fits() -> None:
    nothing, everything = fit_to_memory("1MB", "llama"), fit_to_memory("1e18", "tiny-llama")
    assert [shape.fits for shape in nothing.model_shapes] == [False]
    assert "smallest shape does not fit" in nothing.note
    assert all(shape.fits for shape in everything.model_shapes)
    assert "far below the budget" in everything.note


def test_note_if_shapes_cannot_be_sharded() -> None:
    fit = fit_to_memory("24GB", "llama-3-8b", world_size=8, parallel="tp")
    assert "cannot be split over 8 devices" in fit.note
    assert all(shape.heads % 8 == 0 for shape in fit.model_shapes)


def test_fit_to_dict_is_json() -> None:
    for source in ("llama-3.2-1b", "classic"):
        fit = fit_to_memory("8GB", source, context=100)
        data = json.loads(json.dumps(fit.to_dict()))
        assert data["memory_budget"] == 8 * 10**9
        assert data["max_context"] == fit.max_context
        assert data["options"]["context"] == 100
        assert len(data["model_shapes"]) == len(fit.model_shapes)
        assert data["model_shapes"][0].keys() == {"layers", "d_model", "heads", "num_parameters", "total_bytes", "fits"}


def test_compare_models_uses_the_same_options() -> None:
    estimates = compare_models(["gpt2", ct.config("llama-3-8b")], context=100, mode="train")
    assert [estimate.memory.total_bytes for estimate in estimates] == [
        size(name, context=100, mode="train").memory.total_bytes for name in ("gpt2", "llama-3-8b")
    ]
    for invalid, message in (([], "pass at least one model to compare"), ("gpt2", "pass a list of models")):
        with pytest.raises(InputError, match=message):
            compare_models(invalid)
