"""Data pipeline: documents, preparation, shuffling and datasets; no token lost or repeated, deterministic positions."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from itertools import permutations
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_runs import text_source

import cutaway as ct
from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from cutaway.train.data import documents, memmap, prepare, tokenize
from cutaway.train.data.datasets import MixtureDataset, PackedBatch, PackedDataset, Seq2SeqDataset
from cutaway.train.data.documents import Document, SkippedDocuments, read_documents
from cutaway.train.data.prepare import PreparedData, prepare_data
from cutaway.train.data.shuffle import shuffle_indices
from cutaway.train.data.sources import list_source_files
from cutaway.train.data.training_data import load_training_data
from cutaway.train.distributed.process_group import rank_positions
from cutaway.train.recipe.schema import DataConfig, Seq2SeqConfig, SourceConfig

BYTES = byte_tokenizer()
EOS_ID = BYTES.eos_token_id
TEXTS = [f"document {number}: " + "xyzé"[number % 4] * (number % 23) for number in range(60)]


def write_jsonl(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "texts.jsonl", *({"text": text} for text in TEXTS))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "pairs.jsonl", *({"de": f"Wort {n}", "en": "w" * (n + 1)} for n in range(20)))


def prepare_texts(
    path: Path, directory: Path, validation_split: float = 0.2, seed: int = 7, **options: Any
) -> PreparedData:
    return prepare_data([text_source(path)], BYTES, directory, validation_split=validation_split, seed=seed, **options)


def decode_documents(split: memmap.TokenSplit, tokenizer: Tokenizer = BYTES) -> list[str]:
    documents = np.split(split.tokens, split.offsets[1:-1])
    assert all(document[-1] == tokenizer.eos_token_id for document in documents)
    return [tokenizer.decode(document.tolist()) for document in documents]


# Shuffling


def test_shuffle_is_a_permutation() -> None:
    for size in range(1, 301):
        assert sorted(shuffle_indices(np.arange(size), size, 3, size % 5).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2**31 + 1, 10**12, 2**62 + 12345])
def test_shuffle_of_very_large_sizes(size: int) -> None:
    indices = np.linspace(0, size - 1, 20_001).astype(np.int64).clip(0, size - 1)
    indices = np.unique(np.concatenate([indices, np.arange(1000)]))
    shuffled = shuffle_indices(indices, size, 1, 0)
    assert len(np.unique(shuffled)) == len(indices)
    assert 0 <= shuffled.min() <= shuffled.max() < size
    assert np.histogram(shuffled / size, 10, (0, 1))[0].min() > 0.9 * len(indices) / 10


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(shuffle_indices(np.arange(100), 100, seed, epoch)) for seed in range(4) for epoch in range(8)]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("size", [3, 5, 8])
def test_every_pair_of_positions_is_equally_likely(size: int) -> None:
    counts = dict.fromkeys(permutations(range(size), 2), 0)
    expected = 60
    for epoch in range(expected * len(counts)):
        first, second = shuffle_indices(np.array([0, 1]), size, 11, epoch).tolist()
        counts[first, second] += 1
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    df = len(counts) - 1
    assert abs(chi_square - df) < 4 * (2 * df) ** 0.5  # four standard deviations of χ²


@pytest.mark.parametrize("size", [5000, 4096, 2**40 + 1])
def test_neighbors_are_shuffled_independently(size: int) -> None:
    octants = shuffle_indices(np.arange(4001), size, 1, 9) * 8 // size
    counts = np.bincount(octants[:-1] * 8 + octants[1:], minlength=64)
    assert abs(((counts - 62.5) ** 2 / 62.5).sum() - 63) < 4 * 126**0.5


def test_index_outside_the_size_is_an_error() -> None:
    for index, size in [(5, 5), (-1, 5), (0, 0)]:
        with pytest.raises(InputError, match="outside"):
            shuffle_indices(np.array([index]), size, 0, 0)


# Documents


def test_files_are_read_in_order_and_hidden_ones_skipped(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes(b"zwei\r\n")
    (tmp_path / "a.py").write_bytes(b"\xef\xbb\xbfone = 1\n")
    write_jsonl(tmp_path / "c.jsonl", {"text": "three"}, b"", {"text": "four", "more": [1]})
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    assert list(read_documents(text_source(tmp_path))) == [
        Document(text) for text in ("one = 1\n", "zwei\r\n", "three", "four")
    ]
    assert list(read_documents(text_source(tmp_path / "b" / "two.txt"))) == [Document("zwei\r\n")]


def test_invalid_rows_are_counted_with_an_example_and_skipped(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "x.jsonl",
        {"text": "good"},
        b'{"text": "broken',
        b"[" * 100_000,
        {"other": "column"},
        {"text": 5},
        ["no object"],
        b'{"text": "\xff\xfe"}',
        b'{"text": "\\ud800"}',
        {"text": " \n"},
        {"text": "good too"},
    )
    skipped = SkippedDocuments()
    assert [document.text for document in read_documents(text_source(path), skipped)] == ["good", "good too"]
    assert skipped.counts == {"invalid JSON": 2, "missing column": 3, "invalid UTF-8": 2, "empty": 1}
    assert skipped.examples["invalid JSON"].startswith(f"{path} line 2: ")
    assert skipped.total == 8
    assert "2 × invalid JSON" in str(skipped)


def test_unreadable_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\x00")
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "never")
    os.mkfifo(tmp_path / "pipe.txt")
    skipped = SkippedDocuments()
    assert list(read_documents(text_source(tmp_path), skipped)) == [Document("good")]
    assert skipped.counts == {"unreadable file": 2, "invalid UTF-8": 1, "empty": 1}


def test_pairs_need_both_columns(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", {"de": "eins", "en": "one"}, {"de": "zwei"}, {"de": "drei", "en": ""})
    (tmp_path / "notes.txt").write_text("no pair")
    skipped = SkippedDocuments()
    assert list(read_documents(text_source(path.parent, "de", "en"), skipped)) == [Document("eins", "one")]
    assert skipped.counts == {"text file without target column": 1, "missing column": 1, "empty": 1}


def test_long_file_is_split_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARS", 50)
    text = "".join(f"line {number} é\n" * (number % 4) for number in range(40)) + "x" * 130
    (tmp_path / "x.txt").write_text(text)
    texts = [document.text for document in read_documents(text_source(tmp_path / "x.txt"))]
    assert "".join(texts) == text
    assert len(texts) > 5
    assert all(len(text) <= 100 for text in texts)
    assert all(text.endswith("\n") for text in texts[:-3])


def test_parquet_without_pyarrow_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="pip install pyarrow"):
        list(read_documents(text_source(tmp_path / "x.parquet")))


def test_parquet_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the part of pyarrow that is used."""
    table = {"text": ["one", None, "", "two"], "other": [1, 2, 3, 4]}

    class ParquetFile:
        def __init__(self, path: Path) -> None:
            if not path.read_bytes().startswith(b"PAR1"):
                raise ValueError("no magic bytes")
            self.schema_arrow = SimpleNamespace(names=list(table))

        def iter_batches(self, batch_size: int, columns: list[str]) -> Iterator[Any]:
            rows = [dict(zip(columns, row, strict=True)) for row in zip(*(table[c] for c in columns), strict=True)]
            yield SimpleNamespace(to_pylist=lambda: rows)

    package, module = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    module.ParquetFile = ParquetFile  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "y.parquet").write_bytes(b"else")
    skipped = SkippedDocuments()
    assert [document.text for document in read_documents(text_source(tmp_path), skipped)] == ["one", "two"]
    assert skipped.counts == {"missing column": 1, "empty": 1, "invalid Parquet": 1}
    skipped = SkippedDocuments()
    assert list(read_documents(text_source(tmp_path / "x.parquet", "absent"), skipped)) == []
    assert skipped.counts == {"missing column": 1}


def test_standard_library_source_excludes_tests() -> None:
    files = list_source_files(SourceConfig())
    names = [file.name for file in files]
    assert {"heapq.py", "asyncio/tasks.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    assert 5e6 < sum(file.size for file in files) < 50e6


def test_missing_sources_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(InputError, match=r"does not exist|has no files"):
            list(read_documents(text_source(path)))
    with pytest.raises(InputError, match="the recipe has no text"):
        list_source_files(SourceConfig(path=""))
    with pytest.raises(InputError, match="standard library has no columns"):
        list_source_files(SourceConfig(target_column="x"))


# Prepared data


def test_every_document_is_in_one_split_and_ends_with_eos(texts: Path, tmp_path: Path) -> None:
    data = prepare_texts(texts, tmp_path / "data")
    train, validation = decode_documents(data.train), decode_documents(data.validation)
    assert sorted(train + validation) == sorted(TEXTS)
    assert [text for text in TEXTS if text in train] == train  # in order
    assert 4 <= len(validation) <= 22
    assert data.train.tokens.dtype == np.uint16
    sizes = [sum(len(text.encode()) for text in split) for split in (train, validation)]
    assert [data.train.num_bytes, data.validation.num_bytes] == sizes
    assert not data.skipped.total


def test_more_files_do_not_change_the_split_of_the_others(texts: Path, tmp_path: Path) -> None:
    before = decode_documents(prepare_texts(texts, tmp_path / "data").validation)
    sources = [text_source(write_jsonl(tmp_path / "more.jsonl", {"text": "m"})), text_source(texts)]
    after = prepare_data(sources, BYTES, tmp_path / "data", validation_split=0.2, seed=7)
    assert [text for text in decode_documents(after.validation) if text != "m"] == before
    assert decode_documents(prepare_texts(texts, tmp_path / "data", seed=8).validation) != before


def test_prepared_data_is_reused(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(texts, *({"text": text} for text in TEXTS), b"broken")
    first = prepare_texts(texts, tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "read_file", lambda *_: pytest.fail("files were read again"))
        reused = prepare_texts(texts, tmp_path / "data")
    assert reused.directory == first.directory
    assert reused.fingerprint == first.fingerprint
    assert reused.skipped == first.skipped
    assert reused.skipped.counts == {"invalid JSON": 1}
    assert np.array_equal(reused.train.tokens, first.train.tokens)
    assert reused.train.num_bytes == first.train.num_bytes


def test_changed_data_has_another_fingerprint_and_directory(texts: Path, tmp_path: Path) -> None:
    first = prepare_texts(texts, tmp_path / "data")
    os.utime(texts, ns=(1, 1))
    touched = prepare_texts(texts, tmp_path / "data")
    assert (touched.directory != first.directory, touched.fingerprint == first.fingerprint) == (True, True)
    write_jsonl(texts, *({"text": text} for text in [*TEXTS[:-1], "changed"]))
    changed = prepare_texts(texts, tmp_path / "data")
    assert changed.fingerprint != first.fingerprint
    assert len({first.directory, touched.directory, changed.directory}) == 3
    other_tokenizer = train_bpe(TEXTS, 300)
    other = prepare_data([text_source(texts)], other_tokenizer, tmp_path / "data", validation_split=0.2, seed=7)
    assert other.fingerprint != changed.fingerprint


def test_saved_tokenizer_has_the_same_fingerprint(texts: Path, tmp_path: Path) -> None:
    trained = train_bpe(TEXTS, 300)
    trained.save(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert loaded is not None
    one, two = (
        prepare_data([text_source(texts)], tokenizer, tmp_path / "data", validation_split=0.2, seed=0)
        for tokenizer in (trained, loaded)
    )
    assert one.fingerprint == two.fingerprint


def test_fingerprint_is_independent_of_chunks(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare_texts(texts, tmp_path / "one")
    monkeypatch.setattr(tokenize, "CHUNK_DOCUMENTS", 7)
    second = prepare_texts(texts, tmp_path / "two")
    assert second.fingerprint == first.fingerprint
    assert np.array_equal(second.train.offsets, first.train.offsets)


def test_large_ids_are_stored_as_uint32(tmp_path: Path, texts: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_tokens([f"<{number}>" for number in range(65_400)])
    write_jsonl(texts, {"text": "<65399>"})
    data = prepare_data([text_source(texts)], tokenizer, tmp_path / "data", validation_split=0, seed=0)
    assert data.train.tokens.dtype == np.uint32
    assert data.train.tokens.tolist() == [65_399 + 259, EOS_ID]
    assert data.validation.num_documents == len(data.validation.tokens) == 0


@pytest.mark.parametrize(
    ("contents", "validation_split", "message"),
    [
        ([], 0.1, "no documents"),
        ([b"broken"], 0.1, "1 × invalid JSON"),
        ([{"text": "one"}], 0.001, "validation split has none of the 1 documents"),
        ([{"text": "one"}], 0.999, "training split has none of the 1 documents"),
    ],
)
def test_data_without_documents_is_an_error(
    contents: list[Any], validation_split: float, message: str, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", *contents)
    with pytest.raises(InputError, match=message):
        prepare_texts(path, tmp_path / "data", validation_split)
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").iterdir())


def test_texts_and_pairs_cannot_be_prepared_together(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="for some sources only"):
        prepare_data(
            [text_source(texts), text_source(texts, target_column="en")],
            BYTES,
            tmp_path / "data",
            validation_split=0.1,
            seed=0,
        )


def test_parallel_tokenization_equals_serial(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(texts, *({"text": f"{text} <|eos|> é"} for text in TEXTS))
    tokenizer = byte_tokenizer()
    tokenizer.backend.encode_special_tokens = True
    serial = prepare_data([text_source(texts)], tokenizer, tmp_path / "one", validation_split=0.2, seed=7)
    monkeypatch.setattr(prepare, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(prepare, "num_cores", lambda: 2)
    monkeypatch.setattr(tokenize, "CHUNK_DOCUMENTS", 7)
    calls_in_this_process: list[int] = []
    monkeypatch.setattr(tokenize, "encode_documents", lambda *_: calls_in_this_process.append(1))
    parallel = prepare_data([text_source(texts)], tokenizer, tmp_path / "two", validation_split=0.2, seed=7)
    assert not calls_in_this_process
    assert parallel.fingerprint == serial.fingerprint
    assert np.array_equal(parallel.train.tokens, serial.train.tokens)
    assert (serial.train.tokens == EOS_ID).sum() == serial.train.num_documents  # <|eos|> in the text is plain text


def test_workers_do_not_run_the_main_program_again(texts: Path, tmp_path: Path) -> None:
    """Even without an `if __name__ == "__main__"` guard."""
    program = tmp_path / "program.py"
    program.write_text("""
import sys
from pathlib import Path
from cutaway.tokenizer import byte_tokenizer
from cutaway.train.data import prepare, tokenize
from cutaway.train.recipe.schema import DataConfig, Seq2SeqConfig, SourceConfig
print("started")
prepare.MIN_PARALLEL_BYTES, tokenize.CHUNK_DOCUMENTS, prepare.num_cores = 0, 7, lambda: 2
tokenize.encode_documents = None
sources = [SourceConfig(path=sys.argv[1])]
print(prepare.prepare_data(sources, byte_tokenizer(), sys.argv[2], validation_split=0.2, seed=7).fingerprint)
""")
    command = [sys.executable, str(program), str(texts), str(tmp_path / "data")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["started", prepare_texts(texts, tmp_path / "one").fingerprint]
    assert not result.stderr


def test_chunks_of_dead_workers_are_encoded_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class DyingExecutor:
        """Encodes the first chunk, dies in the second, and accepts no more."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.num_submitted = 0

        def submit(self, _: Any, chunk: tokenize.Chunk) -> Any:
            self.num_submitted += 1
            if self.num_submitted > 2:
                raise BrokenProcessPool
            return SimpleNamespace(
                result=lambda: tokenize.encode_documents(BYTES, chunk) if self.num_submitted == 1 else self.die()
            )

        def die(self) -> None:
            raise BrokenProcessPool

        def shutdown(self, cancel_futures: bool) -> None: ...

    chunks = [[Document(text)] for text in TEXTS]
    monkeypatch.setattr(tokenize, "ProcessPoolExecutor", DyingExecutor)
    ids = [encoded.ids.tolist() for encoded in tokenize.encode_chunks(chunks, BYTES, 2)]
    assert ids == [[*BYTES.encode(text), EOS_ID] for text in TEXTS]


def test_killed_preparation_leaves_only_temporary_directories(texts: Path, tmp_path: Path) -> None:
    """Killed after the last document was read, and before the rename."""
    code = """
import os, signal, sys
from pathlib import Path
from cutaway.tokenizer import byte_tokenizer
from cutaway.train.data import prepare, tokenize
from cutaway.train.recipe.schema import DataConfig, Seq2SeqConfig, SourceConfig
tokenize.CHUNK_DOCUMENTS = 5
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
path, directory, when = sys.argv[1:]
if when == "before-rename": Path.rename = die
else: prepare.SplitWriter.finalize = die
prepare.prepare_data([SourceConfig(path=path)], byte_tokenizer(), directory, validation_split=0.2, seed=7)
"""
    directory = tmp_path / "data"
    for when in ("after-read", "before-rename"):
        command = [sys.executable, "-c", code, str(texts), str(directory), when]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert [".saving-" in path.name for path in directory.iterdir()] == [True]  # the first one has been removed
    data = prepare_texts(texts, directory)
    assert sorted(decode_documents(data.train) + decode_documents(data.validation)) == sorted(TEXTS)
    assert [path for path in directory.iterdir() if path.name.startswith(".")] == []


def test_damaged_data_is_prepared_again(texts: Path, tmp_path: Path) -> None:
    first = prepare_texts(texts, tmp_path / "data")
    expected = np.array(first.train.tokens)
    for name, size in [("train.tokens.npy", 300), ("validation.offsets.npy", 10), ("data.json", 20)]:
        os.truncate(first.directory / name, size)
        assert np.array_equal(prepare_texts(texts, tmp_path / "data").train.tokens, expected)
    for name in ("train.tokens.npy", "validation.tokens.npy", "train.offsets.npy"):
        path = first.directory / name
        data = bytearray(path.read_bytes())
        data[-7] ^= 8  # another token, or another document boundary
        path.write_bytes(data)
        again = prepare_texts(texts, tmp_path / "data")
        assert np.array_equal(again.train.tokens, expected)
        assert (again.fingerprint, path.read_bytes() != data) == (first.fingerprint, True)
    (first.directory / "train.offsets.npy").unlink()
    assert np.array_equal(prepare_texts(texts, tmp_path / "data").train.tokens, expected)


def test_full_disk_is_an_error_and_leaves_no_files(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memmap.NpyAppender, "finalize", fail)
    with pytest.raises(InputError, match="No space left on device"):
        prepare_texts(texts, tmp_path / "data")
    assert not list((tmp_path / "data").iterdir())


def test_files_that_change_during_reading_are_an_error(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_file_and_write(*args: Any) -> Iterator[Document]:
        yield from documents.read_file(*args)
        with texts.open("a") as file:
            file.write('{"text": "late"}\n')

    monkeypatch.setattr(prepare, "read_file", read_file_and_write)
    with pytest.raises(InputError, match="changed while they were read"):
        prepare_texts(texts, tmp_path / "data")


# Datasets


@pytest.fixture
def split(texts: Path, tmp_path: Path) -> memmap.TokenSplit:
    return prepare_texts(texts, tmp_path / "data").train


def test_concatenated_sequences_are_the_tokens(split: memmap.TokenSplit) -> None:
    data = PackedDataset(split, 16, 0, shuffle=False)
    tokens = data.get_batch(0, data.num_sequences).tokens
    assert data.num_sequences == (len(split.tokens) - 1) // 16
    assert tokens.shape == (data.num_sequences, 17)
    assert torch.equal(tokens[1:, 0], tokens[:-1, -1])
    concatenated = torch.cat([tokens[0, :1], tokens[:, 1:].flatten()])
    assert concatenated.tolist() == split.tokens[: len(concatenated)].tolist()
    assert len(split.tokens) - len(concatenated) < 16


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_token_is_a_target_once_per_epoch(split: memmap.TokenSplit, epoch: int) -> None:
    numbered = memmap.TokenSplit(np.arange(len(split.tokens), dtype=np.uint32), split.offsets, None, 0)
    data = PackedDataset(numbered, 7, 3)
    targets = data.get_batch(epoch * data.num_sequences, data.num_sequences).tokens[:, 1:].flatten()
    assert targets.sort().values.tolist() == list(range(1, data.num_sequences * 7 + 1))
    assert targets.tolist() != sorted(targets.tolist())


def test_document_ids_change_at_document_boundaries(split: memmap.TokenSplit) -> None:
    for seq_len in (1, 5, 64):
        data = PackedDataset(split, seq_len, 0, shuffle=False)
        document_of_token = np.repeat(np.arange(split.num_documents), np.diff(split.offsets))
        for position, row in enumerate(data.get_batch(0, data.num_sequences).document_ids.tolist()):
            expected = document_of_token[position * seq_len : (position + 1) * seq_len + 1]
            assert row == (expected - expected[0]).tolist()


def test_batch_is_a_function_of_positions(split: memmap.TokenSplit) -> None:
    data = PackedDataset(split, 9, 5)
    single_rows = [data.get_batch(position, 1) for position in range(3 * data.num_sequences)]
    new_dataset = PackedDataset(split, 9, 5)
    for first, count in [(2 * data.num_sequences - 3, 10), (0, 4), (data.num_sequences, 1), (17, 30)]:
        batch = new_dataset.get_batch(first, count)
        for field in (0, 1):
            assert torch.equal(batch[field], torch.cat([row[field] for row in single_rows[first : first + count]]))
    assert not torch.equal(data.get_batch(0, 20).tokens, data.get_batch(data.num_sequences, 20).tokens)
    assert not torch.equal(data.get_batch(0, 20).tokens, PackedDataset(split, 9, 6).get_batch(0, 20).tokens)


@pytest.mark.parametrize(("first", "count", "world_size"), [(0, 8, 2), (24, 12, 3), (7, 9, 4)])
def test_batches_of_ranks_are_the_batch(split: memmap.TokenSplit, first: int, count: int, world_size: int) -> None:
    data = PackedDataset(split, 9, 5)
    expected = data.get_batch(first, count).tokens
    gathered = torch.empty_like(expected)
    for rank in range(world_size):
        positions = rank_positions(first, count, rank, world_size)
        gathered[[position - first for position in positions]] = data.get_batch_at(positions).tokens
    assert torch.equal(gathered, expected)


def test_batch_without_rows_is_empty(split: memmap.TokenSplit) -> None:
    assert PackedDataset(split, 9, 5).get_batch(0, 0).tokens.shape == (0, 10)
    assert len(rank_positions(0, 1, 0, 2)) == 0


def test_invalid_dataset_arguments_are_errors(split: memmap.TokenSplit) -> None:
    four, five = PackedDataset(split, 4, 0), PackedDataset(split, 5, 0)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("but one sequence of seq_len", lambda: PackedDataset(split, 10**6, 0)),
        ("positions start at 0", lambda: four.get_batch(-1, 2)),
        ("no targets", lambda: Seq2SeqDataset(split, 0, start_id=1)),
        ("must have the same kind", lambda: MixtureDataset([(four, 1.0), (five, 1.0)], 0)),
        ("must have the same kind", lambda: MixtureDataset([], 0)),
        ("must be positive", lambda: MixtureDataset([(four, 0.0)], 0)),
    ]
    for message, call in cases:
        with pytest.raises(InputError, match=message):
            call()


def test_pairs_are_complete_and_padded(pairs: Path, tmp_path: Path) -> None:
    prepared = prepare_data([text_source(pairs, "de", "en")], BYTES, tmp_path / "data", validation_split=0.2, seed=1)
    start_id, pad_id = BYTES.bos_token_id, BYTES.pad_token_id
    assert start_id is not None
    assert pad_id is not None
    data = Seq2SeqDataset(prepared.train, 4, start_id=start_id, pad_id=pad_id)
    assert data.num_sequences + prepared.validation.num_documents == 20
    batch = data.get_batch(0, data.num_sequences)
    assert (batch.source[~batch.source_mask] == pad_id).all()
    assert (batch.target[~batch.target_mask] == pad_id).all()
    decoded = []
    for source, source_mask, target, target_mask in zip(*batch, strict=True):
        target_ids = target[target_mask].tolist()
        assert (target_ids[0], target_ids[-1]) == (start_id, EOS_ID)
        decoded.append((BYTES.decode(source[source_mask].tolist()), BYTES.decode(target_ids)))
        assert source[source_mask].tolist() == BYTES.encode(decoded[-1][0])  # encoded like a prompt, without EOS
    all_pairs = {(f"Wort {n}", "w" * (n + 1)) for n in range(20)}
    assert len(set(decoded)) == len(decoded)
    assert set(decoded) < all_pairs
    assert prepared.train.num_bytes == sum(len(target) for _, target in decoded)
    with pytest.raises(InputError, match="trains on plain text"):
        PackedDataset(prepared.train, 4, 0)


def test_pair_at_a_position_is_independent_of_its_batch(pairs: Path, tmp_path: Path) -> None:
    split = prepare_data([text_source(pairs, "de", "en")], BYTES, tmp_path / "data", validation_split=0, seed=1).train
    data = Seq2SeqDataset(split, 4, start_id=1)
    batch = data.get_batch(15, 10)
    for row, position in enumerate(range(15, 25)):
        one = data.get_batch(position, 1)
        assert torch.equal(batch.source[row][batch.source_mask[row]], one.source[0])
        assert torch.equal(batch.target[row][batch.target_mask[row]], one.target[0])


def test_long_pairs_are_skipped_and_counted(pairs: Path, tmp_path: Path) -> None:
    split = prepare_data([text_source(pairs, "de", "en")], BYTES, tmp_path / "data", validation_split=0, seed=1).train
    data = Seq2SeqDataset(split, 4, start_id=1, max_len=11)  # ten letters and EOS
    assert (data.num_sequences, data.num_skipped) == (10, 10)
    assert data.get_batch(0, 10).target.shape == (10, 12)
    with pytest.raises(InputError, match="longer than 2 tokens"):
        Seq2SeqDataset(split, 4, start_id=1, max_len=2)
    messages: list[str] = []
    config = DataConfig(sources=(text_source(pairs, "de", "en"),), seq_len=11, validation_split=0.5)
    base_info: Any = SimpleNamespace(decoder_start_token_id=lambda tokenizer: 1)
    load_training_data(config, Seq2SeqConfig(), BYTES, base_info, ct.config("tiny-gpt"), 0, messages.append)
    assert messages == ["skipped source-target pairs: 10 are longer than data.seq_len 11"]


def test_start_token_from_the_tokenizer_is_not_repeated() -> None:
    def batch_target(*target: int) -> list[int]:
        tokens = np.array([9, *target], np.uint16)
        split = memmap.TokenSplit(tokens, np.array([0, len(tokens)]), np.array([1]), 0)
        return Seq2SeqDataset(split, 0, start_id=2).get_batch(0, 1).target[0].tolist()

    assert batch_target(5, 6, 2) == [2, 5, 6, 2]
    assert batch_target(2, 5, 6, 3) == [2, 5, 6, 3]
    assert batch_target(2) == [2, 2]


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0), (0.5, 0.2, 0.3), (1e-6, 1.0, 1e6)])
def test_mixture_is_proportional_and_skips_nothing(split: memmap.TokenSplit, weights: tuple[float, ...]) -> None:
    mixture = MixtureDataset([(PackedDataset(split, 8, seed), weight) for seed, weight in enumerate(weights)], 2)
    locations = [mixture.locate(position) for position in range(4000)]
    for index, weight in enumerate(weights):
        positions = [position for dataset, position in locations if dataset == index]
        assert positions == list(range(len(positions)))
        for first in range(0, 4000, 250):  # in every interval, not only from the start
            count = sum(dataset == index for dataset, _ in locations[first : first + 250])
            assert abs(count - 250 * weight / sum(weights)) <= len(weights)
    far = 10**15 + 7
    assert abs(mixture.locate(far)[1] - far * weights[mixture.locate(far)[0]] / sum(weights)) < 1e-8 * far + 1


def test_batch_of_a_mixture_has_rows_of_its_datasets(split: memmap.TokenSplit) -> None:
    datasets = [PackedDataset(split, 8, seed) for seed in range(3)]
    mixture = MixtureDataset(list(zip(datasets, (2.0, 1.0, 1.0), strict=True)), 5)
    batch = mixture.get_batch(13, 40)
    for row, position in enumerate(range(13, 53)):
        index, position_in_dataset = mixture.locate(position)
        expected: PackedBatch = datasets[index].get_batch(position_in_dataset, 1)
        assert torch.equal(batch.tokens[row], expected.tokens[0])
        assert torch.equal(batch.document_ids[row], expected.document_ids[0])
    nested = MixtureDataset([(mixture, 1.0), (datasets[0], 1.0)], 0)
    assert nested.get_batch_at([5, 3]).tokens.shape == (2, 9)


def test_preparing_data_does_not_import_torch() -> None:
    code = "import sys; from cutaway.train.data import prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
