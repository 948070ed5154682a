"""`cutaway eval` as a person and as a machine use it."""

import io
import json
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest
from support.checkpoints import TEXT, TEXTS, small_checkpoint
from support.tokenizer_files import write_bert_files

import cutaway as ct
from cutaway.cli import main
from cutaway.evaluate import evaluate_causal_lm, evaluate_masked_lm, evaluate_seq2seq
from cutaway.tokenizer import load_tokenizer

pytestmark = pytest.mark.unchecked


class Run(Protocol):
    def __call__(self, *arguments: object, code: int = 0, typed: bytes = b"") -> str: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The verb with these arguments and this standard input: what it wrote, or its complaint."""

    def with_arguments(*arguments: object, code: int = 0, typed: bytes = b"") -> str:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["cutaway", "eval", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        assert (ended.value.code or 0) == code, written.err
        assert "Traceback" not in written.err
        return written.err if code else written.out

    return with_arguments


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ct.save(small_checkpoint("tiny-gpt"), tmp_path_factory.mktemp("decoder") / "model")


@pytest.fixture(scope="module")
def pair_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ct.save(small_checkpoint("tiny-t5"), tmp_path_factory.mktemp("pairs") / "model")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    write_bert_files(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return ct.save(small_checkpoint("tiny-bert", tokenizer, vocab_size=tokenizer.vocab_size), folder / "model")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT, newline="")
    return path


def rows(path: Path, *every: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in every))
    return path


def test_json_is_one_object_with_what_the_library_finds(run: Run, decoder: Path, book: Path) -> None:
    told = json.loads(run(decoder, "--text", book, "--context", 20, "--stride", 7, "--batch-size", 3, "--json"))
    score = evaluate_causal_lm(ct.load(decoder), [TEXT], context=20, stride=7)
    assert told["loss"] == pytest.approx(score.loss, rel=1e-5)
    assert told["perplexity"] == pytest.approx(score.perplexity, rel=1e-4)
    assert told["bits_per_byte"] == pytest.approx(score.bits_per_byte, rel=1e-5)
    assert told["calibration"]["ece"] == pytest.approx(score.calibration.ece, abs=1e-5)
    assert sum(row["count"] for row in told["calibration"]["bins"]) == score.num_tokens
    exact = {
        "num_tokens": score.num_tokens, "num_bytes": score.num_bytes, "num_documents": 1, "context": 20, "stride": 7,
    }  # fmt: skip
    assert (exact | {"form": "decoder", "source": str(decoder), "skipped_documents": {}}).items() <= told.items()


def test_people_get_a_table(run: Run, decoder: Path, book: Path) -> None:
    shown = run(decoder, "--text", book)
    score = evaluate_causal_lm(ct.load(decoder), [TEXT])
    figures = (score.loss, score.bits_per_byte, score.calibration.ece)
    for part in ("nats a token", *(f"{each:.4f}" for each in figures), f"over {score.num_tokens:,} tokens"):
        assert part in shown
    assert "read up to 64 tokens at once, 32 further each time" in shown
    assert "Example: cutaway eval" in run("--help")


def test_files_directories_rows_and_pipes_are_the_same_text(run: Run, decoder: Path, tmp_path: Path) -> None:
    """Whatever is no text in a directory is passed over, and said."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    one, two = folder / "a.txt", folder / "deep" / "b.jsonl"
    one.write_text("\ufeff" + TEXT, encoding="utf-8", newline="")
    rows(two, {"text": "second text"}, {"text": 3}, {"text": " "}, [], {"text": "\ud800"})
    with two.open("ab") as file:
        file.write(b"{broken\n\n\xff\n")
    (folder / ".hidden").write_text("not read")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / "empty").write_text("")
    expected = evaluate_causal_lm(ct.load(decoder), [TEXT, "second text"])
    for arguments in ((folder,), (one, two), (one, "--text", two), ("-", "--text", two)):
        told = json.loads(run(decoder, "--text", *arguments, "--json", typed=TEXT.encode()))
        assert told["loss"] == pytest.approx(expected.loss, rel=1e-6)
        assert (told["num_tokens"], told["num_bytes"], told["num_documents"]) == (
            expected.num_tokens,
            expected.num_bytes,
            2,
        )
        more = int(arguments == (folder,))  # the picture, and the file with nothing in it
        bad = {"missing column": 2, "empty": 1 + more, "invalid UTF-8": 2 + more, "invalid JSON": 1}
        assert told["skipped_documents"] == bad
    named = rows(tmp_path / "named.jsonl", {"body": TEXT}, {"body": "second text"})
    told = json.loads(run(decoder, named, "--text-column", "body", "--json"))
    assert told["loss"] == pytest.approx(expected.loss, rel=1e-6)


def test_encoders_and_pairs(run: Run, encoder: Path, pair_model: Path, tmp_path: Path) -> None:
    path = rows(tmp_path / "texts.jsonl", *({"text": text} for text in TEXTS))
    told = json.loads(run(encoder, "--text", path, "--seed", 3, "--json"))
    masks = evaluate_masked_lm(ct.load(encoder), TEXTS, seed=3)
    assert told["loss"] == pytest.approx(masks.loss, rel=1e-5)
    assert (told["accuracy"], told["num_tokens"], told["num_correct"]) == (
        masks.accuracy,
        masks.num_tokens,
        masks.num_correct,
    )
    assert f"of {masks.num_tokens} masked tokens" in run(encoder, "--text", path)
    pairs = [("one", "1"), ("two", "2")]
    path = rows(tmp_path / "pairs.jsonl", *({"in": a, "out": b} for a, b in pairs))
    told = json.loads(run(pair_model, "--text", path, "--text-column", "in", "--target-column", "out", "--json"))
    score = evaluate_seq2seq(ct.load(pair_model), pairs)
    assert told["loss"] == pytest.approx(score.loss, rel=1e-5)
    assert (told["accuracy"], told["num_pairs"], told["num_exact_matches"]) == (
        score.accuracy,
        2,
        score.num_exact_matches,
    )
    assert "of 2 answers are the target" in run(pair_model, path, "--text-column", "in", "--target-column", "out")


def test_mistakes_get_one_sentence(
    run: Run, decoder: Path, encoder: Path, pair_model: Path, book: Path, tmp_path: Path
) -> None:
    empty, binary, short = tmp_path / "empty.txt", tmp_path / "binary.bin", tmp_path / "short.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\x7fELF\xff\x00\xfe")
    short.write_text("x")
    (tmp_path / "bare").mkdir()
    pairs = rows(tmp_path / "pairs.jsonl", {"in": "a", "out": "b"})
    cases: list[tuple[str, list[object]]] = [
        ("give --text FILE", [decoder]),
        ("1 × empty", [decoder, "--text", empty]),
        ("1 × invalid UTF-8", [decoder, "--text", binary]),
        ("no token to tell", [decoder, "--text", short]),
        ("does not exist", [decoder, "--text", tmp_path / "missing"]),
        ("holds no files", [decoder, "--text", tmp_path / "bare"]),
        ("name their --text-column", [decoder, "--text", pairs]),
        ("positions for 64 tokens", [decoder, "--text", book, "--context", 65]),
        ("stride is 9", [decoder, "--text", book, "--context", 8, "--stride", 9]),
        ("context is 0", [decoder, "--text", book, "--context", 0]),
        ("batch_size is -1", [decoder, "--text", book, "--batch-size", -1]),
        (
            "--target-column has no meaning for a decoder",
            [decoder, "--text", pairs, "--text-column", "in", "--target-column", "out"],
        ),
        ("--seed has no meaning for a decoder", [decoder, "--text", book, "--seed", 1]),
        ("--stride has no meaning for an encoder", [encoder, "--text", book, "--stride", 1]),
        ("measured on pairs", [pair_model, "--text", book]),
        ("1 × text file without target column", [pair_model, "--text", book, "--target-column", "out"]),
        ("does not exist", [tmp_path / "nowhere", "--text", book]),
        ("is not available", [decoder, "--text", book, "--device", "nope"]),
    ]
    for sentence, arguments in cases:
        complaint = run(*arguments, code=2)
        assert sentence in complaint
        assert complaint.startswith("cutaway: ")
        assert complaint.count("\n") == 1


def test_weights_that_are_not_numbers_are_said(run: Run, book: Path, tmp_path: Path) -> None:
    """Numbers that are too large for their dtype look fine in the file."""
    checkpoint = small_checkpoint("tiny-gpt")
    for parameter in checkpoint.model.parameters():
        parameter.data.fill_(1e30)
    directory = ct.save(checkpoint, tmp_path / "model")
    assert "the logits are not numbers" in run(directory, "--text", book, code=2)


def test_a_dtype_is_followed(run: Run, decoder: Path, book: Path) -> None:
    whole, half = (
        json.loads(run(decoder, "--text", book, "--dtype", dtype, "--json")) for dtype in ("float32", "bfloat16")
    )
    assert whole["loss"] != half["loss"]
    assert whole["loss"] == pytest.approx(half["loss"], rel=0.1)
