"""What fits: exact answers at the edge, families of shapes that keep their kind, and sizes as people write them."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import configs

import cutaway as ct
from cutaway.config import Config, Heads
from cutaway.errors import CutawayError, InputError
from cutaway.size import count, size
from cutaway.size.fit import MOST, Fit, compare, fit, largest
from cutaway.size.shapes import LAYERS, TABLE, family, fewest_layers, head_width, heads_of, layers_of, scaled
from cutaway.size.sizing import Size
from cutaway.size.units import parse_bytes, parse_count, parse_rate

KINDS = [
    "gpt2", "opt-350m", "bloom-560m", "falcon-7b", "llama-3.2-1b", "mistral-7b-v0.1", "gemma-2-2b", "gemma-3-1b",
    "olmoe-1b-7b", "gpt-oss-20b", "deepseek-v2-lite", "bert-base", "albert-base-v2", "modernbert-base", "t5-small",
    "bart-base", "opus-mt-en-fr", "tiny-mla",
]  # fmt: skip
"""A preset of each kind of attention, FFN, position and form."""


def total(answer: Fit, **changes: Any) -> int:
    """Bytes of the answer's question with something changed; the source's length goes with the context."""
    if "context" in changes:
        changes.setdefault("source", changes["context"])
    return Size(replace(answer.question, **changes)).memory.total


# ---------------------------------------------------------------------------------------- contexts and batches


@given(
    slopes=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    bends=st.lists(st.integers(1, MOST), min_size=3, max_size=3),
    base=st.integers(0, 10**6),
    budget=st.integers(0, 10**12),
)
def test_the_search_finds_the_edge_of_any_line_with_bends(
    slopes: list[int], bends: list[int], base: int, budget: int
) -> None:
    def line(n: int) -> int:
        return base + sum(slope * max(0, n - bend) for slope, bend in zip(slopes, [0, *bends], strict=False))

    found = largest(line, budget, MOST)
    if found is None:
        assert line(1) > budget
    else:
        assert line(found) <= budget
        assert found == MOST or line(found + 1) > budget


def test_the_search_takes_few_steps() -> None:
    steps = []

    def line(n: int) -> int:
        steps.append(n)
        return 10**9 + 131_072 * n + 60_000 * min(n, 8192)

    assert largest(line, 24 * 10**9, MOST) == (23 * 10**9 - 60_000 * 8192) // 131_072
    assert len(steps) < 12


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", KINDS)
def test_more_tokens_and_more_sequences_never_take_less(name: str, mode: str) -> None:
    asked = size(name, mode=mode, context=100).question
    for changes in (
        [{"context": tokens, "source": tokens} for tokens in (1, 2, 33, 127, 128, 129, 500, 513, 2000, 4097, 8192)],
        [{"context": 8192 + more, "source": 8192 + more} for more in (1, 2, 500, 10_000, 10**6)],
        [{"batch": batch} for batch in (1, 2, 3, 50, 81, 82, 500)],
    ):
        totals = [Size(replace(asked, **change)).memory.total for change in changes]
        assert totals == sorted(totals)


@pytest.mark.parametrize("name", ct.presets())
def test_every_preset_takes_more_for_more(name: str) -> None:
    asked = size(name, context=100).question
    for field in ("context", "batch"):
        totals = [Size(replace(asked, **{field: many})).memory.total for many in (1, 60, 1000)]
        assert totals == sorted(totals)


EDGES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-3-8b", "24GB", {}),
    ("llama-3-8b", "80GB", {"batch": 32}),
    ("llama-3.2-1b", "30GB", {"mode": "train", "checkpointing": "full", "context": 512}),
    ("llama-3-8b", "24GB", {"dtype": "int4", "kv_dtype": "int8", "batch": 5, "context": 2000}),
    ("smollm2-135m", "9GB", {"mode": "train", "gpus": 4, "batch": 8, "parallel": "sharded", "context": 100}),
    ("llama-3.2-1b", "6GB", {"gpus": 3, "batch": 6, "context": 1000}),
    ("gemma-2-2b", "9GB", {"batch": 3, "context": 1000}),
    ("gemma-3-1b", "4GB", {"kernel": "flex"}),
    ("deepseek-v2-lite", "60GB", {"context": 4096}),
    ("tiny-t5", "1GB", {"batch": 2}),
    ("t5-small", "2GB", {"source_length": 700, "context": 20}),
    ("bert-base", "1GB", {"mode": "train"}),
]


@pytest.mark.parametrize(("name", "memory", "asked"), EDGES)
def test_the_answer_fits_and_one_more_does_not(name: str, memory: str, asked: dict[str, Any]) -> None:
    found = fit(memory, name, **asked)
    fixed = {"source": asked["source_length"]} if "source_length" in asked else {}
    assert found.total == size(name, **asked).memory.total
    assert found.fits == (found.total <= found.budget)
    longest, batch = found.longest_context, found.largest_batch
    if longest is not None:
        assert total(found, context=longest, **fixed) <= found.budget
        if not found.unbounded and longest != found.position_limit:
            assert total(found, context=longest + 1, **fixed) > found.budget
        shorter = {1, longest // 2, *(8192 // rows for rows in range(1, 9) if 8192 // rows <= longest)} - {0}
        assert all(total(found, context=context, **fixed) <= found.budget for context in shorter)
    if batch is not None:
        step = 1 if found.question.parallel == "tensor" else found.question.gpus
        assert batch % step == 0
        assert total(found, batch=batch) <= found.budget
        assert found.unbounded_batch or total(found, batch=batch + step) > found.budget
    assert longest is not None or total(found, context=1, **fixed) > found.budget
    assert found.fits == (batch is not None and batch >= found.question.batch)


def test_a_model_that_does_not_fit_has_no_longest_context() -> None:
    found = fit("16GB", "llama-3-70b")
    assert (found.fits, found.longest_context, found.largest_batch) == (False, None, None)
    assert not found.beyond_context


def test_a_table_of_positions_is_a_hard_limit() -> None:
    found = fit("2GB", "gpt2")
    assert found.longest_context == found.position_limit == 1024
    assert not found.beyond_context
    assert not found.unbounded
    assert fit("2GB", "opus-mt-en-fr").longest_context == 512  # a frozen table of sines
    with pytest.raises(InputError, match=r"1025.*ends at 1024; give 1024 or less"):
        fit("2GB", "gpt2", context=1025)
    with pytest.raises(InputError, match=r"source_length is 4000.*encoder's table"):
        fit("2GB", "bart-base", context=10, source_length=4000)


def test_a_rotation_has_no_limit_but_says_what_the_model_is_meant_for() -> None:
    found = fit("40GB", "llama-3-8b")
    assert found.position_limit is None
    assert found.beyond_context
    assert found.longest_context is not None
    assert found.longest_context > 8192
    assert not fit("17GB", "llama-3-8b", context=100).beyond_context


def test_windows_can_bound_the_memory() -> None:
    found = fit("24GB", "mistral-7b-v0.1", kernel="flex")
    assert found.unbounded
    assert found.longest_context == MOST
    assert total(found, context=MOST) == total(found, context=MOST // 2)


# ---------------------------------------------------------------------------------------- known facts


def test_a_classic_6b_serves_from_16_gb_in_half_precision_and_a_13b_does_not() -> None:
    six, thirteen = (scaled(family("classic"), *shape) for shape in ((32, 4096), (40, 5120)))
    assert 6.4e9 < count(six).total < 6.9e9
    assert size(six, context=512, dtype="fp16").memory.total < 16e9 < size(thirteen, dtype="fp16").stored.bytes
    listed = {(shape.layers, shape.width): shape for shape in fit("16GB", "classic", dtype="fp16").shapes}
    assert listed[32, 4096].fits
    assert listed[32, 4096].parameters == count(six).total
    assert listed[32, 4096].heads == 32
    assert not any(shape.fits for (layers, width), shape in listed.items() if layers >= 40 and width >= 5120)


@pytest.mark.parametrize(("dtype", "fits"), [("bf16", False), ("int8", True), ("int4", True)])
def test_llama_3_8b_in_16_gb(dtype: str, fits: bool) -> None:
    assert fit("16GB", "llama-3-8b", dtype=dtype).fits is fits


def test_llamas_family_is_llama_3s_shape() -> None:
    assert count(family("llama")).total == count(ct.config("llama-3-8b")).total
    layer = 8192 * (64 + 2 * 16 + 64) * 128 + 3 * 8192 * 28_672 + 2 * 8192
    assert count(scaled(family("llama"), 80, 8192)).total == 80 * layer + 2 * 128_256 * 8192 + 8192


# ---------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("name", ct.presets())
def test_a_source_at_its_own_shape_is_itself(name: str) -> None:
    config = ct.config(name)
    assert scaled(config, layers_of(config), config.d_model) == config


def shared_by(config: Config) -> list[float]:
    """How many queries share a key, block by block; one key for all stays one, whatever the width."""
    every = [block.attention for stack in config.stacks.values() for block in stack.block]
    return [each.heads / each.n_kv_heads for each in every if isinstance(each, Heads) and each.kv_heads != 1]


@pytest.mark.parametrize("name", ct.presets())
def test_twice_as_wide_keeps_every_ratio(name: str) -> None:
    config = ct.config(name)
    layers, width = layers_of(config), config.d_model
    wide, deep = scaled(config, layers, 2 * width), scaled(config, 2 * layers, width)
    assert (wide.d_model, layers_of(wide)) == (2 * width, layers)
    assert heads_of(wide) == 2 * heads_of(config)
    assert head_width(wide) == head_width(config)
    assert shared_by(wide) == shared_by(config)
    assert (deep.d_model, layers_of(deep)) == (width, 2 * layers)
    assert [stack.layers for stack in deep.stacks.values()] == [2 * stack.layers for stack in config.stacks.values()]
    assert count(deep).total >= count(config).total
    assert count(wide).total > 1.5 * count(config).total
    assert wide.vocab_size == config.vocab_size


def test_deepseek_scales_its_experts_and_latents() -> None:
    half = scaled(ct.config("deepseek-v3"), 31, 3584)
    dense, mixed = half.decoder.blocks[0], half.decoder.blocks[3]
    attention = mixed.attention
    assert (attention.heads, attention.q_rank, attention.kv_rank, attention.d_nope) == (64, 768, 256, 128)
    assert (mixed.ffn.experts, mixed.ffn.expert.hidden, mixed.ffn.shared.hidden) == (256, 1024, 1024)
    assert dense.ffn.hidden == 9216


def test_key_heads_stay_a_divisor() -> None:
    small = scaled(ct.config("llama-3-8b"), 12, 768)  # 6 heads, of which 1.5 would be keys
    assert (small.decoder.blocks[0].attention.heads, small.decoder.blocks[0].attention.kv_heads) == (6, 2)


@given(config=configs(), layers=st.sampled_from(LAYERS), width=st.sampled_from([64, 128, 768, 1024]))
def test_any_model_can_be_scaled(config: Config, layers: int, width: int) -> None:
    assert scaled(config, layers_of(config), config.d_model) == config
    if layers >= fewest_layers(config):
        other = scaled(config, layers, width)
        assert (layers_of(other), other.d_model) == (layers, width)
        assert size(other, context=8).memory.total > 0


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
        ("llama-3-8b", "8GB", {"gpus": 4, "parallel": "tensor"}),
    ],
)
def test_listed_shapes_are_around_the_budget_and_exact(source: str, memory: str, asked: dict[str, Any]) -> None:
    found = fit(memory, source, **asked)
    listed = found.shapes
    assert {shape.fits for shape in listed} == {True, False}
    assert listed == tuple(sorted(listed, key=lambda shape: (shape.layers, shape.width)))
    assert len({shape.layers for shape in listed}) <= TABLE
    assert len({shape.width for shape in listed}) <= TABLE
    for shape in listed[:: max(1, len(listed) // 5)]:
        config = scaled(found.question.config, shape.layers, shape.width)
        answer = Size(replace(found.question, config=config))
        assert (answer.memory.total, answer.params) == (shape.total, shape.parameters)
        assert shape.fits == (shape.total <= found.budget)
        assert found.budget / 10 < shape.total < 2.5 * found.budget


def test_a_source_near_the_budget_is_among_its_shapes() -> None:
    found = fit("24GB", "llama-3-8b")
    assert [shape.total for shape in found.shapes if (shape.layers, shape.width) == (32, 4096)] == [found.total]


def test_a_family_has_shapes_only() -> None:
    found = fit("16GB", "llama", context=100)
    assert found.family == "llama"
    assert (found.total, found.fits, found.longest_context, found.largest_batch) == (None, None, None, None)


def test_nothing_and_everything_fit_with_a_note() -> None:
    nothing, everything = fit("1MB", "llama"), fit("1e18", "tiny-llama")
    assert [shape.fits for shape in nothing.shapes] == [False]
    assert "Not even the smallest" in nothing.note
    assert all(shape.fits for shape in everything.shapes)
    assert "many times over" in everything.note


def test_what_devices_cannot_share_is_left_out_with_a_note() -> None:
    found = fit("24GB", "llama-3-8b", gpus=8, parallel="tensor")
    assert "8 devices cannot share" in found.note
    assert all(shape.heads % 8 == 0 for shape in found.shapes)


def test_a_fit_is_plain_data() -> None:
    for source in ("llama-3.2-1b", "classic"):
        found = fit("8GB", source, context=100)
        read = json.loads(json.dumps(found.to_dict()))
        assert read["budget"] == 8 * 10**9
        assert read["longest_context"] == found.longest_context
        assert read["question"]["context"] == 100
        assert len(read["shapes"]) == len(found.shapes)
        assert read["shapes"][0].keys() == {"layers", "width", "heads", "parameters", "total", "fits"}


def test_compare_asks_the_same_of_each() -> None:
    answers = compare(["gpt2", ct.config("llama-3-8b")], context=100, mode="train")
    assert [answer.memory.total for answer in answers] == [
        size(name, context=100, mode="train").memory.total for name in ("gpt2", "llama-3-8b")
    ]
    for wrong in ([], "gpt2"):
        with pytest.raises(InputError, match="compare"):
            compare(wrong)


# ---------------------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16GB", 16 * 10**9), ("16GiB", 16 * 2**30), ("16gib", 16 * 2**30), ("16Gi", 16 * 2**30), ("24g", 24 * 10**9),
        (" 1.5 TB ", 15 * 10**11), ("16e9", 16 * 10**9), (16e9, 16 * 10**9), (7, 7), ("512MiB", 2**29),
        (".5k", 500), ("0.1GB", 10**8), ("1.7", 1), ("4096B", 4096), ("80 bytes", 80),
    ],
)  # fmt: skip
def test_bytes(text: str | float, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "GB", "-1GB", "0", 0, -3, "0.5", "nan", "inf", float("nan"), float("inf"), "16 apples", "16XB", "1e400GB",
        "16GB16", "1,000", True, None, "0x10", "16GBs", "1e-10GB", "١٦GB", "9" * 10_000,
    ],
)  # fmt: skip
def test_nonsense_is_no_size(text: Any) -> None:
    with pytest.raises(CutawayError, match=r"16GB .*16GiB") as error:
        parse_bytes(text)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError):
        fit(text, "gpt2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("15T", 15 * 10**12), ("8k", 8000), ("8Ki", 8192), ("1.5M", 1_500_000), ("1e12", 10**12), ("300B", 3 * 10**11),
     (4096, 4096), ("1.5e3", 1500), (1e12, 10**12)],
)  # fmt: skip
def test_counts(text: str | float, expected: int) -> None:
    assert parse_count(text) == expected


@pytest.mark.parametrize("text", ["1.5", "0", "-8k", "many", "8kB", "nan", 0.5, "1.0005k", "1e99", False])
def test_nonsense_is_no_count(text: Any) -> None:
    with pytest.raises(InputError, match="write a whole number above zero"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3.35TB/s", 3.35e12), ("989TFLOPS", 989e12), ("989e12", 989e12), (989e12, 989e12), ("2 TiB/s", 2.0**41),
     ("1.98PFLOPS", 1.98e15), ("900gb/s", 9e11), ("100 TFLOP/s", 1e14), ("320TOPS", 3.2e14), ("5T", 5e12)],
)  # fmt: skip
def test_rates(text: str | float, expected: float) -> None:
    assert parse_rate(text) == expected


@pytest.mark.parametrize("text", ["fast", "0", "-1TB/s", "nan", "1e99", "3TB", "400Gb/s", "1TB/h", 0.0, True])
def test_nonsense_is_no_rate(text: Any) -> None:
    with pytest.raises(InputError, match="write"):
        parse_rate(text)
