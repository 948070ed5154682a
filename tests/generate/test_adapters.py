"""Generation with adapters: prompts with different adapters in one batch equal those of merged models, on all paths."""

from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.generate import Engine, EngineConfig, SamplingParams
from cutaway.generate.engine.page_allocator import PagePool
from cutaway.model import Transformer
from cutaway.model.adapters.adapter_methods import BASE_ADAPTER

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [5, 6, 7, 8, 9, 10, 12], [20, 21, 22, 23], [12, 13, 14], [1, 2]]
NAMES = ["sql", "chat", BASE_ADAPTER, "sql", BASE_ADAPTER, "chat"]
NUM_TOKENS = 6


def build_adapted(preset: str, *, std: float = 0.2, **config: Any) -> Transformer:
    """A model with the adapters 'sql' and 'chat', of different sizes."""
    model = ct.build(preset, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, adapter in {
        "sql": {"rank": 4, "targets": ["all-linear"]},
        "chat": {"rank": 2, "targets": ["attn.q", "attn.o", "attn.v"], "alpha": 6.0},
    }.items():
        model.add_adapter(adapter | config, name, seed=0)
        for key, parameter in model.named_parameters():
            if f".adapters.{name}.lora" in key:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model.requires_grad_(False)


def tokens_of(model: Transformer, prompts: Any, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0} | options
    return [completion.tokens for completion in ct.generate(model, prompts, **options)]


def merged_models(model: Transformer) -> dict[str, Transformer]:
    merged = {}
    for name in (BASE_ADAPTER, *model.adapters):
        with model.use_adapter(None if name == BASE_ADAPTER else name):
            merged[name] = model.merge_and_unload()
    return merged


def expected_tokens(model: Transformer, **options: Any) -> list[list[int]]:
    """Tokens of each prompt alone, from the merged model."""
    merged = merged_models(model)
    expected = [tokens_of(merged[name], [p], **options)[0] for name, p in zip(NAMES, PROMPTS, strict=True)]
    base = [tokens_of(merged[BASE_ADAPTER], [prompt], **options)[0] for prompt in PROMPTS]
    assert sum(a != b for a, b in zip(expected, base, strict=True)) >= 3, "the adapters change too little"
    return expected


@pytest.fixture(scope="module")
def llama_tokens() -> list[list[int]]:
    """Tokens of each prompt alone, from the merged models of tiny-llama."""
    return expected_tokens(build_adapted("tiny-llama"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("preset", "config"),
    [
        ("tiny-llama", {}),
        ("tiny-llama", {"use_dora": True}),
        ("tiny-gpt", {"targets": ["embed", "attn.*"]}),
        ("tiny-mla", {"targets": ["attn.*"]}),
        ("tiny-moe", {"targets": ["attn.*", "ffn.*"]}),
    ],
    ids=["llama", "dora", "tied-embedding", "mla", "experts"],
)
def test_batch_of_different_adapters_equals_each_alone(preset: str, config: dict[str, Any]) -> None:
    model = build_adapted(preset, **config)
    alone = [tokens_of(model, [prompt], adapter=name)[0] for name, prompt in zip(NAMES, PROMPTS, strict=True)]
    base = [tokens_of(model, [prompt], adapter=BASE_ADAPTER)[0] for prompt in PROMPTS]
    assert sum(a != b for a, b in zip(alone, base, strict=True)) >= 3
    assert tokens_of(model, PROMPTS, adapter=NAMES) == alone
    assert model.active_adapter == "chat", "generation changes the active adapter"
    assert tokens_of(model, PROMPTS) == tokens_of(model, PROMPTS, adapter="chat")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "paged"},
        {"prefill_chunk_size": 2, "max_num_seqs": 2},
        {"weight_bits": 16},
        {"draft_model": "ngram"},
        {"beams": 2},
    ],
    ids=["default", "paged", "chunked", "packed", "ngram", "beams"],
)
def test_all_paths_equal_merged_models(options: dict[str, Any], llama_tokens: list[list[int]]) -> None:
    model, expected = build_adapted("tiny-llama"), llama_tokens
    if "weight_bits" in options or "beams" in options:  # other tokens: compare with the same path of merged models
        expected = expected_tokens(model, **options)
    if "beams" in options:
        options = options | {"temperature": 0.0}
    assert tokens_of(model, PROMPTS, adapter=NAMES, **options) == expected


def test_draft_model_with_adapters(llama_tokens: list[list[int]]) -> None:
    """The draft model has its own active adapter, also if it is the same model."""
    model, draft = build_adapted("tiny-llama"), ct.build("tiny-llama", seed=0)
    assert tokens_of(model, PROMPTS, adapter=NAMES, draft_model=model) == llama_tokens
    assert tokens_of(model, PROMPTS, adapter=NAMES, draft_model=draft) == llama_tokens


def test_int8_weights_are_those_of_the_merged_model() -> None:
    model = build_adapted("tiny-llama")
    expected = expected_tokens(model, weight_bits=8)
    assert tokens_of(model, PROMPTS, adapter=NAMES, weight_bits=8) == expected


@pytest.mark.nightly
@pytest.mark.unchecked
def test_compiled_steps_equal_merged_models() -> None:
    model = build_adapted("tiny-llama")
    assert tokens_of(model, PROMPTS, adapter=NAMES, compile=True) == expected_tokens(model)


@pytest.mark.gpu
@pytest.mark.unchecked
@pytest.mark.parametrize("cache", ["full", "paged"])
@pytest.mark.parametrize(
    ("preset", "config"),
    [("tiny-llama", {}), ("tiny-llama", {"use_dora": True}), ("tiny-moe", {"targets": ["attn.*"]})],
    ids=["llama", "dora", "moe"],
)
def test_cuda_graphs_equal_merged_models(preset: str, config: dict[str, Any], cache: str) -> None:
    """Decode steps in CUDA graphs and eager ones with several adapters, against the merged model of each adapter."""
    model = build_adapted(preset, **config).to("cuda")
    expected = expected_tokens(model, compile=False)
    for compile in (True, False):
        assert tokens_of(model, PROMPTS, adapter=NAMES, compile=compile, cache_implementation=cache) == expected


def test_encoder_decoder() -> None:
    model = build_adapted("tiny-bart", targets=["all-linear"])
    merged = merged_models(model)

    def run(model: Transformer, prompts: list[list[int]], adapters: list[str] | None) -> list[list[int]]:
        names = None if adapters is None else [None if name == BASE_ADAPTER else name for name in adapters]
        config = EngineConfig(
            model, max_model_len=32, decoder_start_token_id=2, adapters=names and tuple(dict.fromkeys(names))
        )
        engine = Engine(config)
        params = SamplingParams(max_new_tokens=6, ignore_eos=True)
        requests = [
            engine.submit(prompt, params, seed=0, adapter=None if adapters is None else name)
            for prompt, name in zip(prompts, adapters or [""] * len(prompts), strict=True)
        ]
        engine.run()
        return [request.result().tokens for request in requests]

    expected = [run(merged[name], [prompt], None)[0] for name, prompt in zip(NAMES, PROMPTS, strict=True)]
    assert run(model.eval(), PROMPTS, NAMES) == expected


def test_prefix_cache_is_separate_for_each_adapter() -> None:
    """The same prompt with another adapter does not read the keys and values of the first."""
    model = build_adapted("tiny-llama").eval()
    prompt = [5 + i % 60 for i in range(100)]
    config = EngineConfig(model, max_model_len=128, cache_implementation="paged", adapters=("sql", "chat", None))
    engine = Engine(config)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    results: dict[str, list[list[int]]] = {}
    for name in ("sql", "chat", BASE_ADAPTER, "sql", "chat"):
        hits = engine.scheduler.stats.prefix_cache_hits
        request = engine.submit(prompt, params, seed=0, adapter=name)
        engine.run()
        is_hit = engine.scheduler.stats.prefix_cache_hits > hits
        assert is_hit == (name in results), "pages are shared with the same adapter only"
        results.setdefault(name, []).append(request.result().tokens)
    for name, tokens in results.items():
        assert tokens == [tokens_of(merged_models(model)[name], [prompt], max_new_tokens=6)[0]] * len(tokens)
    pool = PagePool(8, 2)
    allocated = pool.allocate([1, 2, 3, 4, 5], 5, "a")
    assert allocated is not None
    pool.cache_full_pages(allocated[0], [1, 2, 3, 4], "a")
    assert len(pool.find_cached_prefix([1, 2, 3, 4, 5], "a")) == 2
    assert not pool.find_cached_prefix([1, 2, 3, 4, 5], "b")
    assert not pool.find_cached_prefix([1, 2, 3, 4, 5])


def test_other_threads_use_other_adapters() -> None:
    """`use_adapters` applies in the calling thread, so that two threads can use one model."""
    from concurrent.futures import ThreadPoolExecutor

    model = build_adapted("tiny-llama").eval()
    tokens = torch.tensor([[1, 2, 3]])

    def logits(name: str | None) -> torch.Tensor:
        with torch.no_grad(), model.use_adapters([name]):
            result: torch.Tensor = model(tokens)
        return result

    with torch.no_grad():
        expected = {None if n == BASE_ADAPTER else n: each(tokens) for n, each in merged_models(model).items()}
    names = [None, "sql", "chat"] * 20
    with ThreadPoolExecutor(3) as pool:
        for name, result in zip(names, pool.map(logits, names), strict=True):
            torch.testing.assert_close(result, expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ("other", "there is no adapter 'other'; add it first, or use one of: sql, chat"),
        (["sql"], "adapter has 1 names, but there are 6 prompts"),
        (3, "adapter is 3; pass the name"),
    ],
)
def test_invalid_adapters_are_refused(adapter: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ct.generate(build_adapted("tiny-llama"), PROMPTS, adapter=adapter)  # type: ignore[arg-type]


def test_paths_that_cannot_apply_an_adapter_are_refused() -> None:
    """An adapter of a tied embedding cannot be merged, and packed weights need a merged adapter."""
    model = build_adapted("tiny-gpt", targets=["embed"])
    with pytest.raises(InputError, match="tied to the embedding"):
        tokens_of(model, PROMPTS, weight_bits=8)
    merged_in_place = build_adapted("tiny-llama").merge_adapter()
    assert tokens_of(merged_in_place, PROMPTS) == tokens_of(build_adapted("tiny-llama"), PROMPTS)
    with pytest.raises(InputError, match="unmerge_adapter"):
        tokens_of(merged_in_place, PROMPTS, adapter="sql")
    with pytest.raises(InputError, match="the model has none"):
        ct.generate(ct.build("tiny-llama", seed=0), PROMPTS, adapter="sql")
    with pytest.raises(InputError, match="3 rows, but adapters of 2 rows"), model.use_adapters(["sql", "chat"]):
        model(torch.ones(3, 4, dtype=torch.long))
    experts = build_adapted("tiny-moe", targets=["ffn.*"])
    with pytest.raises(InputError, match="adapters of experts"), experts.use_adapters(["sql", "chat"]):
        experts(torch.ones(2, 4, dtype=torch.long))
