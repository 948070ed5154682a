"""Evaluated text ≡ a full pass ≡ transformers' loop over windows; information ≡ the textbook's numbers."""

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


def with_bos() -> Tokenizer:
    from tokenizers import processors

    made = byte_tokenizer()
    assert made.bos_token_id is not None
    made.backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", made.bos_token_id)]
    )
    return made


def damaged(checkpoint: Checkpoint) -> Checkpoint:
    with torch.no_grad():
        next(p for p in checkpoint.model.parameters() if p.ndim == 1).fill_(torch.nan)
    return checkpoint


# ---------------------------------------------------------------------------------------- decoders


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-gpt", "tiny-moe"])
def test_a_text_that_fits_is_one_full_pass(preset: str) -> None:
    checkpoint = small_checkpoint(preset)
    text = TEXT[:60]
    tokens = torch.tensor([checkpoint.tokenizer.encode(text)])  # type: ignore[union-attr]
    expected = F.cross_entropy(checkpoint.model(tokens)[0, :-1].double(), tokens[0, 1:], reduction="sum")
    score = evaluate_causal_lm(checkpoint, [text])
    assert score.total_nll == pytest.approx(expected.item(), rel=1e-6)
    assert (score.num_tokens, score.num_bytes, score.num_documents) == (tokens.shape[1] - 1, len(text.encode()) - 1, 1)
    assert score.loss == score.total_nll / score.num_tokens
    assert score.perplexity == pytest.approx(math.exp(score.loss))
    assert score.bits_per_byte == pytest.approx(score.loss / math.log(2))  # a token is a byte here


def test_calibration_is_that_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is held at a time, and however texts are batched."""
    checkpoint, text = small_checkpoint(), TEXT[:60]
    tokens = torch.tensor([checkpoint.tokenizer.encode(text)])  # type: ignore[union-attr]
    expected = evaluate_calibration(logits=checkpoint.model(tokens)[0, :-1].detach(), targets=tokens[0, 1:])
    monkeypatch.setattr(token_loss, "MAX_LOGITS_PER_CHUNK", 260 * 7)
    found = evaluate_causal_lm(checkpoint, [text]).calibration
    assert (found.bin_counts, found.bin_correct) == (expected.bin_counts, expected.bin_correct)
    assert found.to_dict()["ece"] == pytest.approx(expected.ece, abs=1e-6)
    assert found.squared_error_sum == pytest.approx(expected.squared_error_sum, rel=1e-5)
    twice = evaluate_causal_lm(checkpoint, [text, text], batch_size=1).calibration
    assert twice.bin_counts == tuple(2 * count for count in expected.bin_counts)


def test_behind_a_bos_every_byte_is_told() -> None:
    checkpoint = small_checkpoint(tokenizer=with_bos())
    score = evaluate_causal_lm(checkpoint, [TEXT, "x"], context=32)
    assert score.num_tokens == score.num_bytes == len(TEXT.encode()) + 1
    assert score.num_documents == 2


def by_hand(model: Any, ids: torch.Tensor, max_length: int, stride: int) -> tuple[float, int]:
    """The loop of transformers' page on perplexity, with each window's mean weighed by the labels it is a mean of."""
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
def test_windows_are_those_of_transformers(tmp_path: Path, context: int, stride: int) -> None:
    """Its window counts the last token that it tells, ours what it reads: one less."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=260, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    peer = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    peer.save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)
    ours = ct.load(tmp_path)
    assert ours.tokenizer is not None
    ids = torch.tensor([ours.tokenizer.encode(TEXT)])
    loss, count = by_hand(peer, ids, context + 1, stride)
    score = evaluate_causal_lm(ours, [TEXT], context=context, stride=stride)
    assert score.num_tokens == count == ids.shape[1] - 1
    assert score.loss == pytest.approx(loss, abs=1e-5)


@given(length=st.integers(0, 60), first=st.integers(1, 3), context=st.integers(1, 20), share=st.floats(0, 1))
def test_each_token_is_told_once_after_enough(length: int, first: int, context: int, share: float) -> None:
    stride = max(1, round(share * context))
    told: list[int] = []
    for window in sliding_windows(0, length, first, context, stride):
        assert 0 < window.end - window.start <= context
        for token in range(window.first_target, window.end + 1):
            assert token - window.start >= min(token, context - stride)
            assert token > window.start
            told.append(token)
    assert told == list(range(first, length))


def test_batches_and_texts_beside_change_nothing() -> None:
    checkpoint = small_checkpoint("tiny-moe")
    texts = [TEXT, "short", TEXT[30:90], "ab", "é"]
    alone = [evaluate_causal_lm(checkpoint, [text], context=20, stride=7) for text in texts]
    for batch in (None, 1, 3, 50):
        together = evaluate_causal_lm(checkpoint, texts, context=20, stride=7, batch_size=batch)
        assert together.total_nll == pytest.approx(sum(score.total_nll for score in alone), rel=1e-5)
        for name in ("num_tokens", "num_bytes", "num_documents"):
            assert getattr(together, name) == sum(getattr(score, name) for score in alone)


def test_logits_in_chunks_are_logits_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = small_checkpoint()
    whole = evaluate_causal_lm(checkpoint, [TEXT])
    seen = []
    head = checkpoint.model.head
    head.register_forward_hook(lambda module, given, logits: seen.append(logits.numel()))  # type: ignore[union-attr]
    monkeypatch.setattr(token_loss, "MAX_LOGITS_PER_CHUNK", 260 * 7)
    assert evaluate_causal_lm(checkpoint, [TEXT]).total_nll == pytest.approx(whole.total_nll, rel=1e-6)
    assert max(seen) == 260 * 7


def test_more_before_a_token_is_what_a_small_stride_gives() -> None:
    """With a stride of one each token is told after all that the context holds: as one by one."""
    checkpoint = small_checkpoint()
    ids = torch.tensor(checkpoint.tokenizer.encode(TEXT))  # type: ignore[union-attr]
    nats = 0.0
    for place in range(1, len(ids)):
        before = ids[max(0, place - 10) : place]
        nats -= checkpoint.model(before[None])[0, -1].double().log_softmax(-1)[ids[place]].item()
    assert evaluate_causal_lm(checkpoint, [TEXT], context=10, stride=1).total_nll == pytest.approx(nats, rel=1e-5)


def test_a_model_in_training_is_measured_without_dropout_and_goes_on() -> None:
    checkpoint = small_checkpoint("tiny-gpt")
    expected = evaluate_causal_lm(checkpoint, [TEXT])
    checkpoint.model.train()
    assert evaluate_causal_lm(checkpoint, [TEXT]) == expected
    assert checkpoint.model.training
    assert all(parameter.grad is None for parameter in checkpoint.model.parameters())


def test_progress_ends_at_its_total() -> None:
    seen: list[tuple[int, int]] = []
    evaluate_causal_lm(
        small_checkpoint(), [TEXT, TEXT], context=20, stride=20, batch_size=3, progress=lambda *at: seen.append(at)
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == 2 * math.ceil((len(TEXT.encode()) - 1) / 20)


def test_the_bytes_of_a_first_token() -> None:
    """Of bytes, of pieces, and of pieces of letters, which decode to nothing by themselves."""
    for tokenizer in (byte_tokenizer(), train_bpe([TEXT] * 3, 300)):
        for text in ("The dog", "é", "日本", " x", "😀!"):
            ids = tokenizer.encode(text)
            rest = [tokenizer.id_to_token(token) or "" for token in ids[1:]]
            assert first_token_bytes(tokenizer, ids[0], text) == len(text.encode()) - sum(map(len, rest))


@pytest.mark.unchecked
def test_what_cannot_be_measured_is_said() -> None:
    ours, learned = small_checkpoint(), small_checkpoint("tiny-gpt")
    bare = Checkpoint(ours.model, ours.config)
    wide = small_checkpoint(vocab_size=200)
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("no token to tell", ours, [], {}),
        ("no token to tell", ours, ["", "a"], {}),
        ("put it into a list", ours, TEXT, {}),
        ("is a string", ours, [3], {}),
        ("surrogate", ours, ["ab\ud800"], {}),
        ("no tokenizer", bare, [TEXT], {}),
        ("ids 0 to 199", wide, ["a日"], {}),
        ("positions for 64 tokens", learned, [TEXT], {"context": 65}),
        ("context is 0", ours, [TEXT], {"context": 0}),
        ("stride is 21", ours, [TEXT], {"context": 20, "stride": 21}),
        ("stride is True", ours, [TEXT], {"stride": True}),
        ("batch_size is 0", ours, [TEXT], {"batch_size": 0}),
        ("no decoder", small_checkpoint("tiny-t5"), [TEXT], {}),
        ("is a str", "gpt2", [TEXT], {}),
    ]
    for sentence, checkpoint, texts, how in cases:
        with pytest.raises(InputError, match=sentence):
            evaluate_causal_lm(checkpoint, texts, **how)
    with pytest.raises(WeightError, match="not numbers"):
        evaluate_causal_lm(damaged(small_checkpoint()), [TEXT])


def test_a_longer_text_than_learned_positions_is_read_in_windows() -> None:
    score = evaluate_causal_lm(small_checkpoint("tiny-gpt"), [TEXT])
    assert (score.context, score.stride, score.num_tokens) == (64, 32, len(TEXT.encode()) - 1)


# ---------------------------------------------------------------------------------------- encoders


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("bert")
    write_bert_files(directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return small_checkpoint("tiny-bert", tokenizer, vocab_size=tokenizer.vocab_size)


def test_masked_tokens_are_told_as_by_hand(encoder: Checkpoint) -> None:
    tokenizer: Any = encoder.tokenizer
    head: Any = encoder.model
    tokens = tokenizer.encode(TEXTS[2])
    assert len(tokens) == 3
    logits = head(torch.tensor([[tokens[0], tokenizer.mask_token_id, tokens[2]]]))[0, 1].double()
    score = evaluate_masked_lm(encoder, [TEXTS[2]])
    assert (score.num_tokens, score.num_documents) == (1, 1)
    assert score.total_nll == pytest.approx(-logits.log_softmax(-1)[tokens[1]].item(), rel=1e-5)
    assert score.num_correct == score.accuracy == score.calibration.accuracy == int(logits.argmax() == tokens[1])
    assert score.calibration.confidence == pytest.approx(logits.softmax(-1).max().item(), rel=1e-5)


def test_masks_depend_on_the_seed_alone(encoder: Checkpoint) -> None:
    expected = evaluate_masked_lm(encoder, TEXTS, seed=4, context=12)
    for batch in (1, 2, 7):
        again = evaluate_masked_lm(encoder, TEXTS, seed=4, context=12, batch_size=batch)
        assert again.total_nll == pytest.approx(expected.total_nll, rel=1e-5)
        assert (again.num_tokens, again.num_correct, again.num_documents) == (
            expected.num_tokens,
            expected.num_correct,
            3,
        )
    assert len({round(evaluate_masked_lm(encoder, TEXTS, seed=seed).total_nll, 6) for seed in range(6)}) > 3
    tokenizer: Any = encoder.tokenizer
    every = evaluate_masked_lm(encoder, TEXTS, mlm_probability=1.0)
    assert every.num_tokens == sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS)


def test_a_model_that_knows_is_right(encoder: Checkpoint) -> None:
    """Its head always says one token, so it is right where that is hidden."""
    tokenizer: Any = encoder.tokenizer
    sure = small_checkpoint("tiny-bert", tokenizer, vocab_size=tokenizer.vocab_size)
    model_id = tokenizer.encode("model", add_special_tokens=False)[0]
    with torch.no_grad():
        head: Any = sure.model.head
        for parameter in sure.model.parameters():
            parameter.zero_()
        head.bias[model_id] = 50.0
    assert evaluate_masked_lm(sure, ["model model"], mlm_probability=1.0).accuracy == 1
    assert evaluate_masked_lm(sure, ["she"], mlm_probability=1.0).accuracy == 0


@pytest.mark.unchecked
def test_what_cannot_be_masked_is_said(encoder: Checkpoint) -> None:
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("no head for masks", small_checkpoint(), TEXTS, {}),
        ("no mask token", small_checkpoint("tiny-bert"), TEXTS, {}),
        ("no token to hide", encoder, [""], {}),
        ("mlm_probability is 0", encoder, TEXTS, {"mlm_probability": 0}),
        ("special tokens fill", encoder, TEXTS, {"context": 2}),
        ("seed is -1", encoder, TEXTS, {"seed": -1}),
        ("put it into a list", encoder, TEXTS[0], {}),
    ]
    for sentence, checkpoint, texts, how in cases:
        with pytest.raises(InputError, match=sentence):
            evaluate_masked_lm(checkpoint, texts, **how)
    tokenizer: Any = encoder.tokenizer
    with pytest.raises(WeightError, match="not numbers"):
        evaluate_masked_lm(damaged(small_checkpoint("tiny-bert", tokenizer, vocab_size=tokenizer.vocab_size)), TEXTS)


def test_special_tokens_around_a_text_are_found(encoder: Checkpoint) -> None:
    tokenizer: Any = encoder.tokenizer
    assert special_prefix_and_suffix(tokenizer) == ([tokenizer.token_to_id("[CLS]")], [tokenizer.token_to_id("[SEP]")])
    assert special_prefix_and_suffix(byte_tokenizer()) == ([], [])
    assert special_prefix_and_suffix(with_bos()) == ([256], [])


# ---------------------------------------------------------------------------------------- pairs

PAIRS = [("one", "1"), ("twenty-two", "22"), ("é", "")]


def test_pairs_are_told_as_one_by_one() -> None:
    checkpoint = small_checkpoint("tiny-t5")
    tokenizer: Any = checkpoint.tokenizer
    pairs = [*PAIRS[:2], ("a longer source", "a longer target")]
    nats, tokens = 0.0, 0
    for source, target in pairs:
        ids = torch.tensor([[0, *tokenizer.encode(target), 257]])
        logits = checkpoint.model(torch.tensor([tokenizer.encode(source)]), ids[:, :-1])[0]
        nats += F.cross_entropy(logits.double(), ids[0, 1:], reduction="sum").item()
        tokens += ids.shape[1] - 1
    for batch in (None, 1, 2):
        score = evaluate_seq2seq(checkpoint, pairs, batch_size=batch)
        assert score.total_nll == pytest.approx(nats, rel=1e-5)
        assert (score.num_tokens, score.num_pairs, score.calibration.count) == (tokens, 3, tokens)


def test_its_own_answers_are_right() -> None:
    """What the model itself writes is exact, whatever its files would search with; a text that goes on is not."""
    checkpoint = small_checkpoint("tiny-t5")
    checkpoint.generation_config |= {"suppress_tokens": list(range(128, 260))}
    sources = ["one", "two", "three", "four", "a longer source"]
    written = [each.tokens for each in ct.generate(checkpoint, sources, beams=1, max_new_tokens=12)]
    end = next(token for token in written[0] if token != written[0][0])  # an end that comes after some tokens
    checkpoint.generation_config |= {"eos_token_id": end, "num_beams": 3}
    answers = ct.generate(checkpoint, sources, beams=1, max_new_tokens=12)
    ended = [
        (source, answer.text or "")
        for source, answer in zip(sources, answers, strict=True)
        if answer.finish_reason == "stop" and (answer.text or "").strip()
    ]
    assert ended
    for batch in (None, 1, 2):
        score = evaluate_seq2seq(checkpoint, [*ended, (ended[0][0], ended[0][1] + "x"), ("two", "x")], batch_size=batch)
        assert (score.num_exact_matches, score.num_pairs) == (len(ended), len(ended) + 2)
    assert evaluate_seq2seq(checkpoint, ended).accuracy == 1
    assert evaluate_seq2seq(checkpoint, ended, exact_match=False).num_exact_matches == 0


def test_a_model_that_says_one_thing_is_right_about_it() -> None:
    checkpoint = small_checkpoint("tiny-bart")
    model: Any = checkpoint.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.head.bias[257] = 9.0  # the end, at once
    score = evaluate_seq2seq(checkpoint, [("a", " "), ("b", "c")])
    assert (score.num_pairs, score.num_exact_matches) == (2, 1)


@pytest.mark.unchecked
def test_what_is_no_pair_is_said() -> None:
    ours = small_checkpoint("tiny-t5")
    no_start = Checkpoint(ours.model, ours.config, tokenizer_loader=lambda: Tokenizer(byte_tokenizer().backend))
    cases: list[tuple[str, Any, Any]] = [
        ("no encoder-decoder", small_checkpoint(), PAIRS),
        ("no pairs", ours, []),
        ("pair 0 is 'one'", ours, ["one"]),
        ("pair 1 has an empty side", ours, [("a", "b"), ("", "c")]),
        ("what a target begins with", no_start, PAIRS),
    ]
    for sentence, checkpoint, pairs in cases:
        with pytest.raises(InputError, match=sentence):
            evaluate_seq2seq(checkpoint, pairs)
    with pytest.raises(WeightError, match="not numbers"):
        evaluate_seq2seq(damaged(small_checkpoint("tiny-t5")), PAIRS[:1])
