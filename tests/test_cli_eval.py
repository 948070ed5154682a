"""`cutaway eval` as a person and as a machine use it."""

import io
import json
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest
from test_measure import TEXT, TEXTS, small
from test_text_peers import bert

import cutaway as ct
from cutaway.cli import main
from cutaway.measure import measure, measure_masked, measure_pairs
from cutaway.text import tokenizer_from_directory

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
    return ct.save(small("tiny-gpt"), tmp_path_factory.mktemp("decoder") / "model")


@pytest.fixture(scope="module")
def pair_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ct.save(small("tiny-t5"), tmp_path_factory.mktemp("pairs") / "model")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    bert(folder)
    tokenizer = tokenizer_from_directory(folder)
    assert tokenizer is not None
    return ct.save(small("tiny-bert", tokenizer, vocab_size=tokenizer.vocab_size), folder / "model")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT, newline="")
    return path


def rows(path: Path, *every: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in every))
    return path


def test_json_is_one_object_with_what_the_library_finds(run: Run, decoder: Path, book: Path) -> None:
    told = json.loads(run(decoder, "--text", book, "--context", 20, "--stride", 7, "--batch", 3, "--json"))
    score = measure(ct.load(decoder), [TEXT], context=20, stride=7)
    assert told["loss"] == pytest.approx(score.loss, rel=1e-5)
    assert told["perplexity"] == pytest.approx(score.perplexity, rel=1e-4)
    assert told["bits_per_byte"] == pytest.approx(score.bits_per_byte, rel=1e-5)
    assert told["calibration"]["error"] == pytest.approx(score.calibration.error, abs=1e-5)
    assert sum(row["count"] for row in told["calibration"]["bins"]) == score.tokens
    exact = {"tokens": score.tokens, "bytes": score.bytes, "documents": 1, "context": 20, "stride": 7}
    assert (exact | {"form": "decoder", "source": str(decoder), "passed_over": {}}).items() <= told.items()


def test_people_get_a_table(run: Run, decoder: Path, book: Path) -> None:
    shown = run(decoder, "--text", book)
    score = measure(ct.load(decoder), [TEXT])
    figures = (score.loss, score.bits_per_byte, score.calibration.error)
    for part in ("nats a token", *(f"{each:.4f}" for each in figures), f"over {score.tokens:,} tokens"):
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
    expected = measure(ct.load(decoder), [TEXT, "second text"])
    for arguments in ((folder,), (one, two), (one, "--text", two), ("-", "--text", two)):
        told = json.loads(run(decoder, "--text", *arguments, "--json", typed=TEXT.encode()))
        assert told["loss"] == pytest.approx(expected.loss, rel=1e-6)
        assert (told["tokens"], told["bytes"], told["documents"]) == (expected.tokens, expected.bytes, 2)
        more = int(arguments == (folder,))  # the picture, and the file with nothing in it
        bad = {"missing field": 2, "empty": 1 + more, "undecodable bytes": 2 + more, "broken JSON": 1}
        assert told["passed_over"] == bad
    named = rows(tmp_path / "named.jsonl", {"body": TEXT}, {"body": "second text"})
    told = json.loads(run(decoder, named, "--field", "body", "--json"))
    assert told["loss"] == pytest.approx(expected.loss, rel=1e-6)


def test_encoders_and_pairs(run: Run, encoder: Path, pair_model: Path, tmp_path: Path) -> None:
    path = rows(tmp_path / "texts.jsonl", *({"text": text} for text in TEXTS))
    told = json.loads(run(encoder, "--text", path, "--seed", 3, "--json"))
    masks = measure_masked(ct.load(encoder), TEXTS, seed=3)
    assert told["loss"] == pytest.approx(masks.loss, rel=1e-5)
    assert (told["accuracy"], told["tokens"], told["right"]) == (masks.accuracy, masks.tokens, masks.right)
    assert f"of {masks.tokens} masked tokens" in run(encoder, "--text", path)
    pairs = [("one", "1"), ("two", "2")]
    path = rows(tmp_path / "pairs.jsonl", *({"in": a, "out": b} for a, b in pairs))
    told = json.loads(run(pair_model, "--text", path, "--field", "in", "--target", "out", "--json"))
    score = measure_pairs(ct.load(pair_model), pairs)
    assert told["loss"] == pytest.approx(score.loss, rel=1e-5)
    assert (told["accuracy"], told["pairs"], told["exact"]) == (score.accuracy, 2, score.exact)
    assert "of 2 answers are the target" in run(pair_model, path, "--field", "in", "--target", "out")


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
        ("1 × undecodable bytes", [decoder, "--text", binary]),
        ("no token to tell", [decoder, "--text", short]),
        ("does not exist", [decoder, "--text", tmp_path / "missing"]),
        ("holds no files", [decoder, "--text", tmp_path / "bare"]),
        ("name their --field", [decoder, "--text", pairs]),
        ("positions for 64 tokens", [decoder, "--text", book, "--context", 65]),
        ("stride is 9", [decoder, "--text", book, "--context", 8, "--stride", 9]),
        ("context is 0", [decoder, "--text", book, "--context", 0]),
        ("batch is -1", [decoder, "--text", book, "--batch", -1]),
        ("--target has no meaning for a decoder", [decoder, "--text", pairs, "--field", "in", "--target", "out"]),
        ("--seed has no meaning for a decoder", [decoder, "--text", book, "--seed", 1]),
        ("--stride has no meaning for an encoder", [encoder, "--text", book, "--stride", 1]),
        ("measured on pairs", [pair_model, "--text", book]),
        ("1 × text where pairs are asked for", [pair_model, "--text", book, "--target", "out"]),
        ("does not exist", [tmp_path / "nowhere", "--text", book]),
        ("is not here", [decoder, "--text", book, "--device", "nope"]),
    ]
    for sentence, arguments in cases:
        complaint = run(*arguments, code=2)
        assert sentence in complaint
        assert complaint.startswith("cutaway: ")
        assert complaint.count("\n") == 1


def test_weights_that_are_not_numbers_are_said(run: Run, book: Path, tmp_path: Path) -> None:
    """Numbers that are too large for their dtype look fine in the file."""
    checkpoint = small("tiny-gpt")
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
