"""What fits in a memory budget: exact answers at the edge, and shapes around it."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutaway as ct
from cutaway.errors import InputError
from cutaway.size import count_parameters, size
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
"""A preset of each kind of attention, FFN, position and form."""


def total(answer: MemoryFit, **changes: Any) -> int:
    """Bytes of the answer's question with something changed; the source's length goes with the context."""
    if "context" in changes:
        changes.setdefault("source_len", changes["context"])
    return SizeEstimate(replace(answer.options, **changes)).memory.total_bytes


# ---------------------------------------------------------------------------------------- contexts and batches


@given(
    slopes=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    bends=st.lists(st.integers(1, SEARCH_LIMIT), min_size=3, max_size=3),
    base=st.integers(0, 10**6),
    budget=st.integers(0, 10**12),
)
def test_the_search_finds_the_edge_of_any_line_with_bends(
    slopes: list[int], bends: list[int], base: int, budget: int
) -> None:
    def line(n: int) -> int:
        return base + sum(slope * max(0, n - bend) for slope, bend in zip(slopes, [0, *bends], strict=False))

    found = find_max_fitting(line, budget, SEARCH_LIMIT)
    if found is None:
        assert line(1) > budget
    else:
        assert line(found) <= budget
        assert found == SEARCH_LIMIT or line(found + 1) > budget


def test_the_search_takes_few_steps() -> None:
    steps = []

    def line(n: int) -> int:
        steps.append(n)
        return 10**9 + 131_072 * n + 60_000 * min(n, 8192)

    assert find_max_fitting(line, 24 * 10**9, SEARCH_LIMIT) == (23 * 10**9 - 60_000 * 8192) // 131_072
    assert len(steps) < 12


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", KINDS)
def test_more_tokens_and_more_sequences_never_take_less(name: str, mode: str) -> None:
    asked = size(name, mode=mode, context=100).options
    for changes in (
        [{"context": tokens, "source_len": tokens} for tokens in (1, 2, 33, 127, 128, 129, 500, 513, 2000, 4097, 8192)],
        [{"context": 8192 + more, "source_len": 8192 + more} for more in (1, 2, 500, 10_000, 10**6)],
        [{"batch_size": batch} for batch in (1, 2, 3, 50, 81, 82, 500)],
    ):
        totals = [SizeEstimate(replace(asked, **change)).memory.total_bytes for change in changes]
        assert totals == sorted(totals)


@pytest.mark.parametrize("name", ct.presets())
def test_every_preset_takes_more_for_more(name: str) -> None:
    asked = size(name, context=100).options
    for field in ("context", "batch_size"):
        totals = [SizeEstimate(replace(asked, **{field: many})).memory.total_bytes for many in (1, 60, 1000)]
        assert totals == sorted(totals)


EDGES: list[tuple[str, str, dict[str, Any]]] = [
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


@pytest.mark.parametrize(("name", "memory", "asked"), EDGES)
def test_the_answer_fits_and_one_more_does_not(name: str, memory: str, asked: dict[str, Any]) -> None:
    found = fit_to_memory(memory, name, **asked)
    fixed = {"source_len": asked["source_len"]} if "source_len" in asked else {}
    assert found.total_bytes == size(name, **asked).memory.total_bytes
    assert found.fits == (found.total_bytes <= found.memory_budget)
    longest, batch = found.max_context, found.max_batch_size
    if longest is not None:
        assert total(found, context=longest, **fixed) <= found.memory_budget
        if not found.unbounded_context and longest != found.max_position_embeddings:
            assert total(found, context=longest + 1, **fixed) > found.memory_budget
        shorter = {1, longest // 2, *(8192 // rows for rows in range(1, 9) if 8192 // rows <= longest)} - {0}
        assert all(total(found, context=context, **fixed) <= found.memory_budget for context in shorter)
    if batch is not None:
        step = 1 if found.options.parallel == "tp" else found.options.world_size
        assert batch % step == 0
        assert total(found, batch_size=batch) <= found.memory_budget
        assert found.unbounded_batch_size or total(found, batch_size=batch + step) > found.memory_budget
    assert longest is not None or total(found, context=1, **fixed) > found.memory_budget
    assert found.fits == (batch is not None and batch >= found.options.batch_size)


def test_a_model_that_does_not_fit_has_no_longest_context() -> None:
    found = fit_to_memory("16GB", "llama-3-70b")
    assert (found.fits, found.max_context, found.max_batch_size) == (False, None, None)
    assert not found.exceeds_model_context


def test_a_table_of_positions_is_a_hard_limit() -> None:
    found = fit_to_memory("2GB", "gpt2")
    assert found.max_context == found.max_position_embeddings == 1024
    assert not found.exceeds_model_context
    assert not found.unbounded_context
    assert fit_to_memory("2GB", "opus-mt-en-fr").max_context == 512  # a frozen table of sines
    with pytest.raises(InputError, match=r"1025.*ends at 1024; give 1024 or less"):
        fit_to_memory("2GB", "gpt2", context=1025)
    with pytest.raises(InputError, match=r"source_len is 4000.*encoder's table"):
        fit_to_memory("2GB", "bart-base", context=10, source_len=4000)


def test_a_rotation_has_no_limit_but_says_what_the_model_is_meant_for() -> None:
    found = fit_to_memory("40GB", "llama-3-8b")
    assert found.max_position_embeddings is None
    assert found.exceeds_model_context
    assert found.max_context is not None
    assert found.max_context > 8192
    assert not fit_to_memory("17GB", "llama-3-8b", context=100).exceeds_model_context


def test_windows_can_bound_the_memory() -> None:
    found = fit_to_memory("24GB", "mistral-7b-v0.1", kernel="flex")
    assert found.unbounded_context
    assert found.max_context == SEARCH_LIMIT
    assert total(found, context=SEARCH_LIMIT) == total(found, context=SEARCH_LIMIT // 2)


# ---------------------------------------------------------------------------------------- known facts


def test_a_classic_6b_serves_from_16_gb_in_half_precision_and_a_13b_does_not() -> None:
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


@pytest.mark.parametrize(("dtype", "fits"), [("bf16", False), ("int8", True), ("int4", True)])
def test_llama_3_8b_in_16_gb(dtype: str, fits: bool) -> None:
    assert fit_to_memory("16GB", "llama-3-8b", dtype=dtype).fits is fits


# ---------------------------------------------------------------------------------------- shapes
@pytest.mark.parametrize(
    ("source", "memory", "asked"),
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
def test_listed_shapes_are_around_the_budget_and_exact(source: str, memory: str, asked: dict[str, Any]) -> None:
    found = fit_to_memory(memory, source, **asked)
    listed = found.model_shapes
    assert {shape.fits for shape in listed} == {True, False}
    assert listed == tuple(sorted(listed, key=lambda shape: (shape.layers, shape.d_model)))
    assert len({shape.layers for shape in listed}) <= MAX_TABLE_SIZE
    assert len({shape.d_model for shape in listed}) <= MAX_TABLE_SIZE
    for shape in listed[:: max(1, len(listed) // 5)]:
        config = scale_config(found.options.config, shape.layers, shape.d_model)
        answer = SizeEstimate(replace(found.options, config=config))
        assert (answer.memory.total_bytes, answer.num_parameters) == (shape.total_bytes, shape.num_parameters)
        assert shape.fits == (shape.total_bytes <= found.memory_budget)
        assert found.memory_budget / 10 < shape.total_bytes < 2.5 * found.memory_budget


def test_a_source_near_the_budget_is_among_its_shapes() -> None:
    found = fit_to_memory("24GB", "llama-3-8b")
    assert [shape.total_bytes for shape in found.model_shapes if (shape.layers, shape.d_model) == (32, 4096)] == [
        found.total_bytes
    ]


def test_a_family_has_shapes_only() -> None:
    found = fit_to_memory("16GB", "llama", context=100)
    assert found.family == "llama"
    assert (found.total_bytes, found.fits, found.max_context, found.max_batch_size) == (None, None, None, None)


def test_nothing_and_everything_fit_with_a_note() -> None:
    nothing, everything = fit_to_memory("1MB", "llama"), fit_to_memory("1e18", "tiny-llama")
    assert [shape.fits for shape in nothing.model_shapes] == [False]
    assert "Not even the smallest" in nothing.note
    assert all(shape.fits for shape in everything.model_shapes)
    assert "many times over" in everything.note


def test_what_devices_cannot_share_is_left_out_with_a_note() -> None:
    found = fit_to_memory("24GB", "llama-3-8b", world_size=8, parallel="tp")
    assert "8 devices cannot share" in found.note
    assert all(shape.heads % 8 == 0 for shape in found.model_shapes)


def test_a_fit_is_plain_data() -> None:
    for source in ("llama-3.2-1b", "classic"):
        found = fit_to_memory("8GB", source, context=100)
        read = json.loads(json.dumps(found.to_dict()))
        assert read["memory_budget"] == 8 * 10**9
        assert read["max_context"] == found.max_context
        assert read["options"]["context"] == 100
        assert len(read["model_shapes"]) == len(found.model_shapes)
        assert read["model_shapes"][0].keys() == {"layers", "d_model", "heads", "num_parameters", "total_bytes", "fits"}


def test_compare_asks_the_same_of_each() -> None:
    answers = compare_models(["gpt2", ct.config("llama-3-8b")], context=100, mode="train")
    assert [answer.memory.total_bytes for answer in answers] == [
        size(name, context=100, mode="train").memory.total_bytes for name in ("gpt2", "llama-3-8b")
    ]
    for wrong in ([], "gpt2"):
        with pytest.raises(InputError, match="compare"):
            compare_models(wrong)
