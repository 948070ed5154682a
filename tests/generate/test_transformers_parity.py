"""Greedy answers ≡ transformers' generate, for every family: long, ragged, past the windows, in each kind of cache."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.family_parity import PeerModel, get_vocab_size, has_batch_dependent_rope, randomize_weights

import cutaway as ct
from cutaway.generate import Completion

HERE = Path(__file__).parents[1] / "families" / "tables"
CONTINUED = [
    "bloom", "cohere", "cohere2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo",
    "gpt_neox", "gpt_oss", "gptj", "granite", "llama", "mistral", "mixtral", "mpt", "olmo", "olmo2", "opt", "phi",
    "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2",
]  # fmt: skip
ANSWERED = ["bart", "marian", "mt5", "pegasus", "t5"]
STEPS = 256
POSITIONS = 384
"""For tables of positions that the draws make too short."""


class Drawn(Exception):  # noqa: N818
    """Carries a family's draw out of its own test."""


def drawn(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerModel:
    """What the family's own test draws for this seed."""
    monkeypatch.syspath_prepend(str(HERE))
    module = importlib.import_module(f"test_{name}")

    def stop(peer: PeerModel, *_: Any) -> None:
        raise Drawn(peer)

    monkeypatch.setattr(module, "check_family", stop)
    with pytest.raises(Drawn) as caught:
        getattr(module, f"test_{name}_is_the_peers")(seed, tmp_path)
    return caught.value.args[0]


def opened(peer: PeerModel, directory: Path, seed: int) -> tuple[Any, Any]:
    """The peer's model, and ours with its weights."""
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


def check_same(ours: Any, prompt: list[int], answer: Completion, theirs: list[int], start: list[int]) -> None:
    """The same tokens, or tokens that part where the best two are one but for rounding."""
    if answer.tokens == theirs:
        return
    place = next(i for i, (a, b) in enumerate(zip(answer.tokens, theirs, strict=True)) if a != b)
    with torch.no_grad():
        text = torch.tensor([start + theirs[:place]])
        logits = ours(torch.tensor([prompt]), text) if start != prompt else ours(text)
    best = logits[0, -1].topk(2)
    margin = float((best.values[0] - best.values[1]) / logits[0, -1].abs().max())
    what = f"token {place} is {answer.tokens[place]}, not {theirs[place]}; margin {margin:.1e}"
    assert {answer.tokens[place], theirs[place]} == set(best.indices.tolist()), what
    assert margin < 1e-4, what


KINDS = ("full", "ring", "paged")


def compare(
    name: str,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, ...] = (11, 30),
    kinds: tuple[str, ...] = KINDS,
) -> None:
    peer = drawn(name, seed, tmp_path, monkeypatch)
    model, checkpoint = opened(peer, tmp_path / "theirs", seed)
    both = checkpoint.config.form == "encoder-decoder"
    g = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(5, get_vocab_size(peer.config), (n,), generator=g).tolist() for n in lengths]
    turning = "longrope" in str(getattr(peer.config, "rope_parameters", ""))
    use_cache = peer.use_cache and peer.compare_generate and not turning  # its cache is not read again past the turn
    expected = []
    for prompt in prompts:
        with torch.no_grad():
            tokens = (
                copy.deepcopy(model)
                .generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=STEPS,
                    do_sample=False,
                    num_beams=1,
                    eos_token_id=None,
                    pad_token_id=0,
                    use_cache=use_cache,
                )[0]
                .tolist()
            )
        expected.append(tokens[-STEPS:])
    stack = checkpoint.model.stacks["decoder"]
    dynamic = any(getattr(position, "switch_length", None) for position in stack.positions.values())
    for kind in ["full"] if dynamic and kinds == ("ring",) else kinds:
        if dynamic and kind == "ring":
            continue  # what it has pushed out cannot be turned by other angles
        answers = ct.generate(
            checkpoint,
            prompts,
            max_new_tokens=STEPS,
            ignore_eos=True,
            cache_implementation=kind,
            max_model_len=POSITIONS,
            max_num_seqs=2,
            prefill_chunk_size=16,
        )
        for prompt, answer, theirs in zip(prompts, answers, expected, strict=True):
            start = [model.generation_config.decoder_start_token_id] if both else prompt
            check_same(checkpoint.model, prompt, answer, theirs, start)


@pytest.mark.unchecked
@pytest.mark.parametrize(("number", "name"), list(enumerate([*CONTINUED, *ANSWERED])))
def test_greedy_tokens_are_the_peers(number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one kind of cache each, by turns; with all of them at night."""
    compare(name, 1 if name == "phi3" else number % 8, tmp_path, monkeypatch, kinds=(KINDS[number % 3],))


@pytest.mark.unchecked
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [*CONTINUED, *ANSWERED])
def test_greedy_tokens_are_the_peers_for_more_draws(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, seed, tmp_path, monkeypatch, (11, 3, 30))


def test_every_family_that_writes_is_here() -> None:
    from cutaway.families import families

    writes = {name for name, family in families().items() if family.config_from_hf({})[0].form != "encoder"}
    assert writes == {*CONTINUED, *ANSWERED}


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
def test_answers_by_the_files_settings_are_the_peers(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First and last tokens, bans and beams, as the checkpoint's own files have them."""
    model, checkpoint = opened(drawn("bart", 2, tmp_path, monkeypatch), tmp_path / "theirs", 2)
    settings = {"max_length": 25, "eos_token_id": [2, 30, 31], "decoder_start_token_id": 2, "pad_token_id": 1, **files}
    checkpoint.generation_config = settings
    model.generation_config = transformers.GenerationConfig(**settings)
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 60, (n,), generator=g).tolist() for n in (3, 9, 17, 9)]
    answers = ct.generate(checkpoint, prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            theirs = model.generate(torch.tensor([prompt]), do_sample=False)[0, 1:].tolist()
        assert answer.tokens == theirs
