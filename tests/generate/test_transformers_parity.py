"""Greedy completions equal transformers' generate for every family and every cache implementation."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.family_configs import REQUIRED_KEYS
from support.family_parity import PeerModel, get_vocab_size, has_batch_dependent_rope, randomize_weights
from support.nightly import nightly_except

import cutaway as ct
from cutaway.generate import Completion

FAMILY_TESTS = Path(__file__).parents[1] / "families" / "tables"
DECODERS = [
    "arcee", "biogpt", "bloom", "codegen", "cohere", "cohere2", "cwm", "dbrx", "deepseek_v2", "deepseek_v3",
    "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe",
    "granitemoeshared", "helium", "jais2", "llama", "minimax_m2", "ministral", "mistral", "mixtral", "mpt", "olmo",
    "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "stablelm", "starcoder2", "xglm",
]  # fmt: skip
ENCODER_DECODERS = ["bart", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5"]
GENERATIVE = [*DECODERS, *ENCODER_DECODERS]
EVERY_RUN = ("bloom", "llama", "qwen3_moe", "t5")
"""Families tested in every run: ALiBi, GQA, experts, encoder-decoder."""
STEPS, STEPS_OF_EVERY_RUN = 256, 80
POSITIONS = 384
"""Minimum number of learned positions; random configs may have fewer."""


class PeerModelCaptured(Exception):  # noqa: N818
    """Carries the random peer model out of a family's test."""


def random_peer_model(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerModel:
    """The random peer model of the family's own test for this seed."""
    monkeypatch.syspath_prepend(str(FAMILY_TESTS))
    module = importlib.import_module(f"test_{name}")

    def capture(peer: PeerModel, *_: Any) -> None:
        raise PeerModelCaptured(peer)

    monkeypatch.setattr(module, "check_family", capture)
    with pytest.raises(PeerModelCaptured) as caught:
        getattr(module, f"test_{name}_matches_transformers")(seed, tmp_path)
    return caught.value.args[0]


def build_and_load(peer: PeerModel, directory: Path, seed: int) -> tuple[Any, Any]:
    """transformers' model, and a checkpoint loaded from its files."""
    config = peer.config
    for key in ("n_positions", "max_position_embeddings", "max_seq_len"):
        if getattr(config, key, POSITIONS) < POSITIONS and not has_batch_dependent_rope(config):
            setattr(config, key, POSITIONS)
    kernel = "sdpa" if peer.skip_eager else "eager"
    model = peer.auto_class.from_config(config, attn_implementation=kernel).float().eval()
    randomize_weights(model, seed, peer.frozen)
    if peer.modify_model is not None:
        peer.modify_model(model)
    model.save_pretrained(directory)
    return model, ct.load(directory)


def check_same_tokens(
    model: Any, prompt: list[int], completion: Completion, expected: list[int], decoder_prefix: list[int]
) -> None:
    """Equal tokens, or a first difference where the top two logits are equal up to rounding."""
    if completion.tokens == expected:
        return
    i = next(i for i, (a, b) in enumerate(zip(completion.tokens, expected, strict=True)) if a != b)
    with torch.no_grad():
        tokens = torch.tensor([decoder_prefix + expected[:i]])
        logits = model(torch.tensor([prompt]), tokens) if decoder_prefix != prompt else model(tokens)
    top2 = logits[0, -1].topk(2)
    margin = float((top2.values[0] - top2.values[1]) / logits[0, -1].abs().max())
    description = f"token {i} is {completion.tokens[i]}, not {expected[i]}; margin {margin:.1e}"
    assert {completion.tokens[i], expected[i]} == set(top2.indices.tolist()), description
    assert margin < 1e-4, description


KINDS = ("full", "ring", "paged")


def compare(
    name: str,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, ...] = (11, 30),
    kinds: tuple[str, ...] = KINDS,
    steps: int = STEPS,
) -> None:
    peer = random_peer_model(name, seed, tmp_path, monkeypatch)
    model, checkpoint = build_and_load(peer, tmp_path / "reference", seed)
    is_encoder_decoder = checkpoint.config.form == "encoder-decoder"
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(5, get_vocab_size(peer.config), (n,), generator=generator).tolist() for n in lengths]
    has_longrope = "longrope" in str(getattr(peer.config, "rope_parameters", ""))
    use_cache = (
        peer.use_cache and peer.compare_generate and not has_longrope
    )  # transformers does not recompute its cache at the switch length
    expected = []
    for prompt in prompts:
        with torch.no_grad():
            tokens = (
                copy.deepcopy(model)
                .generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=steps,
                    do_sample=False,
                    num_beams=1,
                    eos_token_id=None,
                    pad_token_id=0,
                    use_cache=use_cache,
                )[0]
                .tolist()
            )
        expected.append(tokens[-steps:])
    stack = checkpoint.model.stacks["decoder"]
    dynamic = any(getattr(position, "switch_length", None) for position in stack.positions.values())
    for kind in ["full"] if dynamic and kinds == ("ring",) else kinds:
        if dynamic and kind == "ring":
            continue  # overwritten keys cannot be recomputed with other frequencies
        completions = ct.generate(
            checkpoint,
            prompts,
            max_new_tokens=steps,
            ignore_eos=True,
            cache_implementation=kind,
            max_model_len=POSITIONS,
            max_num_seqs=2,
            prefill_chunk_size=16,
        )
        for prompt, completion, expected_tokens in zip(prompts, completions, expected, strict=True):
            decoder_prefix = [model.generation_config.decoder_start_token_id] if is_encoder_decoder else prompt
            check_same_tokens(checkpoint.model, prompt, completion, expected_tokens, decoder_prefix)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", nightly_except(EVERY_RUN, GENERATIVE))
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache implementation per family; all of them and longer completions nightly."""
    index = GENERATIVE.index(name)
    seed = 1 if name == "phi3" else index % 8
    compare(name, seed, tmp_path, monkeypatch, kinds=(KINDS[index % 3],), steps=STEPS_OF_EVERY_RUN)


@pytest.mark.unchecked
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", GENERATIVE)
def test_greedy_tokens_equal_transformers_for_more_seeds(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, seed, tmp_path, monkeypatch, (11, 3, 30))


def test_all_generative_families_are_listed() -> None:
    from cutaway.families import families

    generative = {
        name
        for name, family in families().items()
        if family.config_from_hf(REQUIRED_KEYS.get(name, {}))[0].form != "encoder"
    }
    assert generative == set(GENERATIVE)


FILES = [
    {},
    {"forced_bos_token_id": 9, "forced_eos_token_id": 2},
    {"forced_bos_token_id": 9, "min_length": 9, "eos_token_id": [token for token in range(5, 97) if token % 9]},
    {"no_repeat_ngram_size": 2, "forced_eos_token_id": 2},
    {"bad_words_ids": [[10], [11, 12], [20, 21]], "suppress_tokens": [13, 14], "begin_suppress_tokens": [15]},
    {"num_beams": 3, "no_repeat_ngram_size": 2, "length_penalty": 0.8, "early_stopping": True},
    {"num_beams": 2, "forced_bos_token_id": 9, "min_length": 8, "repetition_penalty": 1.3},
    {"max_length": 13},
]


@pytest.mark.unchecked
@pytest.mark.parametrize("files", FILES)
def test_generation_config_completions_equal_transformers(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced and suppressed tokens and beams from the generation config."""
    model, checkpoint = build_and_load(random_peer_model("bart", 2, tmp_path, monkeypatch), tmp_path / "reference", 2)
    settings = {"max_length": 25, "eos_token_id": [2, 30, 31], "decoder_start_token_id": 2, "pad_token_id": 1, **files}
    checkpoint.generation_config = settings
    model.generation_config = transformers.GenerationConfig(**settings)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 60, (n,), generator=generator).tolist() for n in (3, 9, 17, 9)]
    completions = ct.generate(checkpoint, prompts)
    for prompt, completion in zip(prompts, completions, strict=True):
        with torch.no_grad():
            expected = model.generate(torch.tensor([prompt]), do_sample=False)[0, 1:].tolist()
        assert completion.tokens == expected
