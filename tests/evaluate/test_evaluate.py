"""Causal, masked and seq2seq evaluation equal direct computation and transformers' sliding window."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import TEXT, TEXTS, small_checkpoint
from support.tokenizer_files import write_bert_files
from torch.nn import functional as F

import cutaway as ct
from cutaway.errors import InputError, WeightError
from cutaway.evaluate import evaluate_calibration, evaluate_causal_lm, evaluate_masked_lm, evaluate_seq2seq, token_loss
from cutaway.evaluate.causal_lm import first_token_bytes, sliding_windows
from cutaway.evaluate.token_loss import special_prefix_and_suffix
from cutaway.families.checkpoint import Checkpoint
from cutaway.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe


def bos_tokenizer() -> Tokenizer:
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    assert tokenizer.bos_token_id is not None
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    return tokenizer


def with_nan_weights(checkpoint: Checkpoint) -> Checkpoint:
    with torch.no_grad():
        next(p for p in checkpoint.model.parameters() if p.ndim == 1).fill_(torch.nan)
    return checkpoint


# ---------------------------------------------------------------------------------------- evaluate_causal_lm


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-gpt", "tiny-moe"])
def test_text_that_fits_equals_one_forward_pass(preset: str) -> None:
    checkpoint = small_checkpoint(preset)
    text = TEXT[:60]
    tokens = torch.tensor([checkpoint.tokenizer.encode(text)])  # type: ignore[union-attr]
    expected = F.cross_entropy(checkpoint.model(tokens)[0, :-1].double(), tokens[0, 1:], reduction="sum")
    score = evaluate_causal_lm(checkpoint, [text])
    assert score.total_nll == pytest.approx(expected.item(), rel=1e-6)
    assert (score.num_tokens, score.num_bytes, score.num_documents) == (tokens.shape[1] - 1, len(text.encode()) - 1, 1)
    assert score.loss == score.total_nll / score.num_tokens
    assert score.perplexity == pytest.approx(math.exp(score.loss))
    assert score.bits_per_byte == pytest.approx(score.loss / math.log(2))  # one token is one byte


def test_calibration_equals_that_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With logits in chunks and with any batch size."""
    checkpoint, text = small_checkpoint(), TEXT[:60]
    tokens = torch.tensor([checkpoint.tokenizer.encode(text)])  # type: ignore[union-attr]
    expected = evaluate_calibration(logits=checkpoint.model(tokens)[0, :-1].detach(), targets=tokens[0, 1:])
    monkeypatch.setattr(token_loss, "MAX_LOGITS_PER_CHUNK", 260 * 7)
    result = evaluate_causal_lm(checkpoint, [text]).calibration
    assert (result.bin_counts, result.bin_correct) == (expected.bin_counts, expected.bin_correct)
    assert result.to_dict()["ece"] == pytest.approx(expected.ece, abs=1e-6)
    assert result.squared_error_sum == pytest.approx(expected.squared_error_sum, rel=1e-5)
    twice = evaluate_causal_lm(checkpoint, [text, text], batch_size=1).calibration
    assert twice.bin_counts == tuple(2 * count for count in expected.bin_counts)


def test_every_byte_is_scored_after_a_bos() -> None:
    checkpoint = small_checkpoint(tokenizer=bos_tokenizer())
    score = evaluate_causal_lm(checkpoint, [TEXT, "x"], context=32)
    assert score.num_tokens == score.num_bytes == len(TEXT.encode()) + 1
    assert score.num_documents == 2


def sliding_window_loss(model: Any, ids: torch.Tensor, max_length: int, stride: int) -> tuple[float, int]:
    """The loop of transformers' documentation of perplexity, with each window's mean weighted by its labels."""
    total, count, previous = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + max_length, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : -(end - previous)] = -100
        shifted = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(ids[:, begin:end], labels=labels).loss) * shifted
        count, previous = count + shifted, end
        if end == ids.shape[1]:
            break
    return total / count, count


@pytest.mark.parametrize(("context", "stride"), [(24, 24), (24, 23), (24, 12), (24, 1), (7, 3), (1, 1), (63, 40)])
def test_sliding_window_equals_transformers(tmp_path: Path, context: int, stride: int) -> None:
    """transformers' max_length counts the last target; `context` counts input tokens, which is one less."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=260, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    hf_model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    hf_model.save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)
    checkpoint = ct.load(tmp_path)
    assert checkpoint.tokenizer is not None
    ids = torch.tensor([checkpoint.tokenizer.encode(TEXT)])
    loss, count = sliding_window_loss(hf_model, ids, context + 1, stride)
    score = evaluate_causal_lm(checkpoint, [TEXT], context=context, stride=stride)
    assert score.num_tokens == count == ids.shape[1] - 1
    assert score.loss == pytest.approx(loss, abs=1e-5)


@given(length=st.integers(0, 60), first=st.integers(1, 3), context=st.integers(1, 20), fraction=st.floats(0, 1))
def test_each_token_is_scored_once_with_enough_context(length: int, first: int, context: int, fraction: float) -> None:
    stride = max(1, round(fraction * context))
    scored: list[int] = []
    for window in sliding_windows(0, length, first, context, stride):
        assert 0 < window.end - window.start <= context
        for token in range(window.first_target, window.end + 1):
            assert token - window.start >= min(token, context - stride)
            assert token > window.start
            scored.append(token)
    assert scored == list(range(first, length))


def test_batching_does_not_change_the_result() -> None:
    checkpoint = small_checkpoint("tiny-moe")
    texts = [TEXT, "short", TEXT[30:90], "ab", "é"]
    single = [evaluate_causal_lm(checkpoint, [text], context=20, stride=7) for text in texts]
    for batch_size in (None, 1, 3, 50):
        batched = evaluate_causal_lm(checkpoint, texts, context=20, stride=7, batch_size=batch_size)
        assert batched.total_nll == pytest.approx(sum(score.total_nll for score in single), rel=1e-5)
        for name in ("num_tokens", "num_bytes", "num_documents"):
            assert getattr(batched, name) == sum(getattr(score, name) for score in single)


def test_chunked_logits_equal_full_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = small_checkpoint()
    expected = evaluate_causal_lm(checkpoint, [TEXT])
    sizes = []
    head = checkpoint.model.head
    head.register_forward_hook(lambda module, args, logits: sizes.append(logits.numel()))  # type: ignore[union-attr]
    monkeypatch.setattr(token_loss, "MAX_LOGITS_PER_CHUNK", 260 * 7)
    assert evaluate_causal_lm(checkpoint, [TEXT]).total_nll == pytest.approx(expected.total_nll, rel=1e-6)
    assert max(sizes) == 260 * 7


def test_stride_1_gives_each_token_the_full_context() -> None:
    """With stride 1, each token is scored with a full context, as in one forward pass per token."""
    checkpoint = small_checkpoint()
    ids = torch.tensor(checkpoint.tokenizer.encode(TEXT))  # type: ignore[union-attr]
    nll = 0.0
    for position in range(1, len(ids)):
        context = ids[max(0, position - 10) : position]
        nll -= checkpoint.model(context[None])[0, -1].double().log_softmax(-1)[ids[position]].item()
    assert evaluate_causal_lm(checkpoint, [TEXT], context=10, stride=1).total_nll == pytest.approx(nll, rel=1e-5)


def test_training_mode_is_restored_and_dropout_is_off() -> None:
    checkpoint = small_checkpoint("tiny-gpt")
    expected = evaluate_causal_lm(checkpoint, [TEXT])
    checkpoint.model.train()
    assert evaluate_causal_lm(checkpoint, [TEXT]) == expected
    assert checkpoint.model.training
    assert all(parameter.grad is None for parameter in checkpoint.model.parameters())


def test_progress_reaches_the_total() -> None:
    calls: list[tuple[int, int]] = []
    evaluate_causal_lm(
        small_checkpoint(), [TEXT, TEXT], context=20, stride=20, batch_size=3, progress=lambda *args: calls.append(args)
    )
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] == 2 * math.ceil((len(TEXT.encode()) - 1) / 20)


def test_first_token_bytes() -> None:
    """Byte and BPE tokens, including parts of a character, which do not decode to text."""
    for tokenizer in (byte_tokenizer(), train_bpe([TEXT] * 3, 300)):
        for text in ("The dog", "é", "日本", " x", "😀!"):
            ids = tokenizer.encode(text)
            rest = [tokenizer.id_to_token(token) or "" for token in ids[1:]]
            assert first_token_bytes(tokenizer, ids[0], text) == len(text.encode()) - sum(map(len, rest))


@pytest.mark.unchecked
def test_causal_lm_errors() -> None:
    rope, learned = small_checkpoint(), small_checkpoint("tiny-gpt")
    no_tokenizer = Checkpoint(rope.model, rope.config)
    small_vocab = small_checkpoint(vocab_size=200)
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("no token to score", rope, [], {}),
        ("no token to score", rope, ["", "a"], {}),
        ("pass a list of texts", rope, TEXT, {}),
        ("not str", rope, [3], {}),
        ("surrogate", rope, ["ab\ud800"], {}),
        ("no tokenizer", no_tokenizer, [TEXT], {}),
        ("ids, 0 to 199", small_vocab, ["a日"], {}),
        ("positions for 64 tokens", learned, [TEXT], {"context": 65}),
        ("context is 0", rope, [TEXT], {"context": 0}),
        ("stride is 21", rope, [TEXT], {"context": 20, "stride": 21}),
        ("stride is True", rope, [TEXT], {"stride": True}),
        ("batch_size is 0", rope, [TEXT], {"batch_size": 0}),
        ("not a decoder", small_checkpoint("tiny-t5"), [TEXT], {}),
        ("is a str", "gpt2", [TEXT], {}),
    ]
    for message, checkpoint, texts, kwargs in cases:
        with pytest.raises(InputError, match=message):
            evaluate_causal_lm(checkpoint, texts, **kwargs)
    with pytest.raises(WeightError, match="the logits are NaN"):
        evaluate_causal_lm(with_nan_weights(small_checkpoint()), [TEXT])


def test_text_longer_than_learned_positions_uses_windows() -> None:
    score = evaluate_causal_lm(small_checkpoint("tiny-gpt"), [TEXT])
    assert (score.context, score.stride, score.num_tokens) == (64, 32, len(TEXT.encode()) - 1)


# ---------------------------------------------------------------------------------------- evaluate_masked_lm


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("bert")
    write_bert_files(directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return small_checkpoint("tiny-bert", tokenizer, vocab_size=tokenizer.vocab_size)


def test_masked_loss_equals_direct_computation(encoder: Checkpoint) -> None:
    tokenizer: Any = encoder.tokenizer
    model: Any = encoder.model
    tokens = tokenizer.encode(TEXTS[2])
    assert len(tokens) == 3
    logits = model(torch.tensor([[tokens[0], tokenizer.mask_token_id, tokens[2]]]))[0, 1].double()
    score = evaluate_masked_lm(encoder, [TEXTS[2]])
    assert (score.num_tokens, score.num_documents) == (1, 1)
    assert score.total_nll == pytest.approx(-logits.log_softmax(-1)[tokens[1]].item(), rel=1e-5)
    assert score.num_correct == score.accuracy == score.calibration.accuracy == int(logits.argmax() == tokens[1])
    assert score.calibration.confidence == pytest.approx(logits.softmax(-1).max().item(), rel=1e-5)


def test_masked_positions_depend_only_on_the_seed(encoder: Checkpoint) -> None:
    expected = evaluate_masked_lm(encoder, TEXTS, seed=4, context=12)
    for batch_size in (1, 2, 7):
        score = evaluate_masked_lm(encoder, TEXTS, seed=4, context=12, batch_size=batch_size)
        assert score.total_nll == pytest.approx(expected.total_nll, rel=1e-5)
        assert (score.num_tokens, score.num_correct, score.num_documents) == (
            expected.num_tokens,
            expected.num_correct,
            3,
        )
    assert len({round(evaluate_masked_lm(encoder, TEXTS, seed=seed).total_nll, 6) for seed in range(6)}) > 3
    tokenizer: Any = encoder.tokenizer
    all_masked = evaluate_masked_lm(encoder, TEXTS, mlm_probability=1.0)
    assert all_masked.num_tokens == sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS)


def test_masked_accuracy_of_a_constant_model(encoder: Checkpoint) -> None:
    """The head always predicts one token, so it is correct where that token is masked."""
    tokenizer: Any = encoder.tokenizer
    constant = small_checkpoint("tiny-bert", tokenizer, vocab_size=tokenizer.vocab_size)
    model_id = tokenizer.encode("model", add_special_tokens=False)[0]
    with torch.no_grad():
        head: Any = constant.model.head
        for parameter in constant.model.parameters():
            parameter.zero_()
        head.bias[model_id] = 50.0
    assert evaluate_masked_lm(constant, ["model model"], mlm_probability=1.0).accuracy == 1
    assert evaluate_masked_lm(constant, ["she"], mlm_probability=1.0).accuracy == 0


@pytest.mark.unchecked
def test_masked_lm_errors(encoder: Checkpoint) -> None:
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("no masked language modeling head", small_checkpoint(), TEXTS, {}),
        ("no mask token", small_checkpoint("tiny-bert"), TEXTS, {}),
        ("no token to mask", encoder, [""], {}),
        ("mlm_probability is 0", encoder, TEXTS, {"mlm_probability": 0}),
        ("special tokens fill", encoder, TEXTS, {"context": 2}),
        ("seed is -1", encoder, TEXTS, {"seed": -1}),
        ("pass a list of texts", encoder, TEXTS[0], {}),
    ]
    for message, checkpoint, texts, kwargs in cases:
        with pytest.raises(InputError, match=message):
            evaluate_masked_lm(checkpoint, texts, **kwargs)
    tokenizer: Any = encoder.tokenizer
    with pytest.raises(WeightError, match="the logits are NaN"):
        evaluate_masked_lm(
            with_nan_weights(small_checkpoint("tiny-bert", tokenizer, vocab_size=tokenizer.vocab_size)), TEXTS
        )


def test_special_prefix_and_suffix(encoder: Checkpoint) -> None:
    tokenizer: Any = encoder.tokenizer
    assert special_prefix_and_suffix(tokenizer) == ([tokenizer.token_to_id("[CLS]")], [tokenizer.token_to_id("[SEP]")])
    assert special_prefix_and_suffix(byte_tokenizer()) == ([], [])
    assert special_prefix_and_suffix(bos_tokenizer()) == ([256], [])


# ---------------------------------------------------------------------------------------- evaluate_seq2seq

PAIRS = [("one", "1"), ("twenty-two", "22"), ("é", "")]


def test_seq2seq_loss_equals_single_pairs() -> None:
    checkpoint = small_checkpoint("tiny-t5")
    tokenizer: Any = checkpoint.tokenizer
    pairs = [*PAIRS[:2], ("a longer source", "a longer target")]
    nll, num_tokens = 0.0, 0
    for source, target in pairs:
        ids = torch.tensor([[0, *tokenizer.encode(target), 257]])
        logits = checkpoint.model(torch.tensor([tokenizer.encode(source)]), ids[:, :-1])[0]
        nll += F.cross_entropy(logits.double(), ids[0, 1:], reduction="sum").item()
        num_tokens += ids.shape[1] - 1
    for batch_size in (None, 1, 2):
        score = evaluate_seq2seq(checkpoint, pairs, batch_size=batch_size)
        assert score.total_nll == pytest.approx(nll, rel=1e-5)
        assert (score.num_tokens, score.num_pairs, score.calibration.count) == (num_tokens, 3, num_tokens)


def test_greedy_outputs_are_exact_matches() -> None:
    """Greedy outputs match, regardless of num_beams in the generation config; a longer target does not match."""
    checkpoint = small_checkpoint("tiny-t5")
    checkpoint.generation_config |= {"suppress_tokens": list(range(128, 260))}
    sources = ["one", "two", "three", "four", "a longer source"]
    generated = [output.tokens for output in ct.generate(checkpoint, sources, beams=1, max_new_tokens=12)]
    eos = next(token for token in generated[0] if token != generated[0][0])  # an EOS that comes after some tokens
    checkpoint.generation_config |= {"eos_token_id": eos, "num_beams": 3}
    outputs = ct.generate(checkpoint, sources, beams=1, max_new_tokens=12)
    pairs = [
        (source, output.text or "")
        for source, output in zip(sources, outputs, strict=True)
        if output.finish_reason == "stop" and (output.text or "").strip()
    ]
    assert pairs
    wrong_pairs = [(pairs[0][0], pairs[0][1] + "x"), ("two", "x")]
    for batch_size in (None, 1, 2):
        score = evaluate_seq2seq(checkpoint, [*pairs, *wrong_pairs], batch_size=batch_size)
        assert (score.num_exact_matches, score.num_pairs) == (len(pairs), len(pairs) + 2)
    assert evaluate_seq2seq(checkpoint, pairs).accuracy == 1
    assert evaluate_seq2seq(checkpoint, pairs, exact_match=False).num_exact_matches == 0


def test_exact_match_of_a_constant_model() -> None:
    checkpoint = small_checkpoint("tiny-bart")
    model: Any = checkpoint.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.head.bias[257] = 9.0  # EOS as the first token
    score = evaluate_seq2seq(checkpoint, [("a", " "), ("b", "c")])
    assert (score.num_pairs, score.num_exact_matches) == (2, 1)


@pytest.mark.unchecked
def test_seq2seq_errors() -> None:
    t5 = small_checkpoint("tiny-t5")
    no_start = Checkpoint(t5.model, t5.config, tokenizer_loader=lambda: Tokenizer(byte_tokenizer().backend))
    cases: list[tuple[str, Any, Any]] = [
        ("not an encoder-decoder", small_checkpoint(), PAIRS),
        ("pairs is empty", t5, []),
        ("pair 0 must be a tuple .source, target. of two strings, not 'one'", t5, ["one"]),
        ("pair 1 has an empty source or target", t5, [("a", "b"), ("", "c")]),
        ("no decoder start token", no_start, PAIRS),
    ]
    for message, checkpoint, pairs in cases:
        with pytest.raises(InputError, match=message):
            evaluate_seq2seq(checkpoint, pairs)
    with pytest.raises(WeightError, match="the logits are NaN"):
        evaluate_seq2seq(with_nan_weights(small_checkpoint("tiny-t5")), PAIRS[:1])
