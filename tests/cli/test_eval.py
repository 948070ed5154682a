"""`cutaway eval`: table, JSON, document sources, forms, errors."""

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
    """Run the verb; returns standard output, or the error message if the exit code is not 0."""

    def run_eval(*arguments: object, code: int = 0, typed: bytes = b"") -> str:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["cutaway", "eval", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        with pytest.raises(SystemExit) as exit_info:
            main()
        written = capsys.readouterr()
        assert (exit_info.value.code or 0) == code, written.err
        assert "Traceback" not in written.err
        return written.err if code else written.out

    return run_eval


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ct.save(small_checkpoint("tiny-gpt"), tmp_path_factory.mktemp("decoder") / "model")


@pytest.fixture(scope="module")
def pair_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ct.save(small_checkpoint("tiny-t5"), tmp_path_factory.mktemp("pairs") / "model")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("encoder")
    write_bert_files(directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return ct.save(small_checkpoint("tiny-bert", tokenizer, vocab_size=tokenizer.vocab_size), directory / "model")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT, newline="")
    return path


def write_jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in records))
    return path


def test_json_equals_evaluate_causal_lm(run: Run, decoder: Path, text_file: Path) -> None:
    data = json.loads(run(decoder, "--text", text_file, "--context", 20, "--stride", 7, "--batch-size", 3, "--json"))
    expected = evaluate_causal_lm(ct.load(decoder), [TEXT], context=20, stride=7)
    assert data["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert data["perplexity"] == pytest.approx(expected.perplexity, rel=1e-4)
    assert data["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert data["calibration"]["ece"] == pytest.approx(expected.calibration.ece, abs=1e-5)
    assert sum(row["count"] for row in data["calibration"]["bins"]) == expected.num_tokens
    counts = {
        "num_tokens": expected.num_tokens, "num_bytes": expected.num_bytes, "num_documents": 1, "context": 20,
        "stride": 7,
    }  # fmt: skip
    assert (counts | {"form": "decoder", "source": str(decoder), "skipped_documents": {}}).items() <= data.items()


def test_table_shows_the_results(run: Run, decoder: Path, text_file: Path) -> None:
    output = run(decoder, "--text", text_file)
    expected = evaluate_causal_lm(ct.load(decoder), [TEXT])
    values = (expected.loss, expected.bits_per_byte, expected.calibration.ece)
    for part in ("nats per token", *(f"{value:.4f}" for value in values), f"over {expected.num_tokens:,} tokens"):
        assert part in output
    assert "context of up to 64 tokens, stride 32" in output
    assert "Example: cutaway eval" in run("--help")


def test_files_directories_jsonl_and_stdin_give_equal_results(run: Run, decoder: Path, tmp_path: Path) -> None:
    """Files and rows that are not text are skipped and reported."""
    directory = tmp_path / "texts"
    (directory / "deep").mkdir(parents=True)
    text_path, jsonl_path = directory / "a.txt", directory / "deep" / "b.jsonl"
    text_path.write_text("\ufeff" + TEXT, encoding="utf-8", newline="")
    write_jsonl(jsonl_path, {"text": "second text"}, {"text": 3}, {"text": " "}, [], {"text": "\ud800"})
    with jsonl_path.open("ab") as file:
        file.write(b"{broken\n\n\xff\n")
    (directory / ".hidden").write_text("not read")
    (directory / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (directory / "empty").write_text("")
    expected = evaluate_causal_lm(ct.load(decoder), [TEXT, "second text"])
    for arguments in (
        (directory,),
        (text_path, jsonl_path),
        (text_path, "--text", jsonl_path),
        ("-", "--text", jsonl_path),
    ):
        data = json.loads(run(decoder, "--text", *arguments, "--json", typed=TEXT.encode()))
        assert data["loss"] == pytest.approx(expected.loss, rel=1e-6)
        assert (data["num_tokens"], data["num_bytes"], data["num_documents"]) == (
            expected.num_tokens,
            expected.num_bytes,
            2,
        )
        num_extra = int(arguments == (directory,))  # the image and the empty file
        skipped = {"missing column": 2, "empty": 1 + num_extra, "invalid UTF-8": 2 + num_extra, "invalid JSON": 1}
        assert data["skipped_documents"] == skipped
    named_path = write_jsonl(tmp_path / "named.jsonl", {"body": TEXT}, {"body": "second text"})
    data = json.loads(run(decoder, named_path, "--text-column", "body", "--json"))
    assert data["loss"] == pytest.approx(expected.loss, rel=1e-6)


def test_encoder_and_encoder_decoder(run: Run, encoder: Path, pair_model: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "texts.jsonl", *({"text": text} for text in TEXTS))
    data = json.loads(run(encoder, "--text", path, "--seed", 3, "--json"))
    expected_masked = evaluate_masked_lm(ct.load(encoder), TEXTS, seed=3)
    assert data["loss"] == pytest.approx(expected_masked.loss, rel=1e-5)
    assert (data["accuracy"], data["num_tokens"], data["num_correct"]) == (
        expected_masked.accuracy,
        expected_masked.num_tokens,
        expected_masked.num_correct,
    )
    assert f"of {expected_masked.num_tokens} masked tokens" in run(encoder, "--text", path)
    pairs = [("one", "1"), ("two", "2")]
    path = write_jsonl(tmp_path / "pairs.jsonl", *({"in": a, "out": b} for a, b in pairs))
    data = json.loads(run(pair_model, "--text", path, "--text-column", "in", "--target-column", "out", "--json"))
    expected_seq2seq = evaluate_seq2seq(ct.load(pair_model), pairs)
    assert data["loss"] == pytest.approx(expected_seq2seq.loss, rel=1e-5)
    assert (data["accuracy"], data["num_pairs"], data["num_exact_matches"]) == (
        expected_seq2seq.accuracy,
        2,
        expected_seq2seq.num_exact_matches,
    )
    assert "of 2 outputs match the target exactly" in run(
        pair_model, path, "--text-column", "in", "--target-column", "out"
    )


def test_errors_have_one_message(
    run: Run, decoder: Path, encoder: Path, pair_model: Path, text_file: Path, tmp_path: Path
) -> None:
    empty, binary, short = tmp_path / "empty.txt", tmp_path / "binary.bin", tmp_path / "short.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\x7fELF\xff\x00\xfe")
    short.write_text("x")
    (tmp_path / "bare").mkdir()
    pairs = write_jsonl(tmp_path / "pairs.jsonl", {"in": "a", "out": "b"})
    cases: list[tuple[str, list[object]]] = [
        ("pass --text FILE", [decoder]),
        ("1 × empty", [decoder, "--text", empty]),
        ("1 × invalid UTF-8", [decoder, "--text", binary]),
        ("no token to score", [decoder, "--text", short]),
        ("does not exist", [decoder, "--text", tmp_path / "missing"]),
        ("has no files", [decoder, "--text", tmp_path / "bare"]),
        ("set --text-column", [decoder, "--text", pairs]),
        ("positions for 64 tokens", [decoder, "--text", text_file, "--context", 65]),
        ("stride is 9", [decoder, "--text", text_file, "--context", 8, "--stride", 9]),
        ("context is 0", [decoder, "--text", text_file, "--context", 0]),
        ("batch_size is -1", [decoder, "--text", text_file, "--batch-size", -1]),
        (
            "--target-column does not apply to a decoder",
            [decoder, "--text", pairs, "--text-column", "in", "--target-column", "out"],
        ),
        ("--seed does not apply to a decoder", [decoder, "--text", text_file, "--seed", 1]),
        ("--stride does not apply to an encoder", [encoder, "--text", text_file, "--stride", 1]),
        ("source and target pairs", [pair_model, "--text", text_file]),
        ("1 × text file without target column", [pair_model, "--text", text_file, "--target-column", "out"]),
        ("does not exist", [tmp_path / "nowhere", "--text", text_file]),
        ("is not available", [decoder, "--text", text_file, "--device", "nope"]),
    ]
    for message, arguments in cases:
        error = run(*arguments, code=2)
        assert message in error
        assert error.startswith("cutaway: ")
        assert error.count("\n") == 1


def test_non_finite_logits_are_an_error(run: Run, text_file: Path, tmp_path: Path) -> None:
    """The weights are finite, and the activations overflow."""
    checkpoint = small_checkpoint("tiny-gpt")
    for parameter in checkpoint.model.parameters():
        parameter.data.fill_(1e30)
    directory = ct.save(checkpoint, tmp_path / "model")
    assert "the logits are NaN" in run(directory, "--text", text_file, code=2)


def test_dtype_option_applies(run: Run, decoder: Path, text_file: Path) -> None:
    float32, bfloat16 = (
        json.loads(run(decoder, "--text", text_file, "--dtype", dtype, "--json")) for dtype in ("float32", "bfloat16")
    )
    assert float32["loss"] != bfloat16["loss"]
    assert float32["loss"] == pytest.approx(bfloat16["loss"], rel=0.1)
