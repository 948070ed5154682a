"""From documents to batches: nothing lost, nothing twice, the same whatever came before."""

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

from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from cutaway.train.data import documents, memmap, prepare, tokenize
from cutaway.train.data.datasets import MixtureDataset, PackedBatch, PackedDataset, Seq2SeqDataset
from cutaway.train.data.documents import Document, SkippedDocuments, TextSource, read_documents
from cutaway.train.data.prepare import PreparedData, prepare_data
from cutaway.train.data.shuffle import shuffle_index, shuffle_indices
from cutaway.train.data.sources import list_source_files
from cutaway.train.distributed.process_group import rank_positions

BYTES = byte_tokenizer()
END = BYTES.eos_token_id
TEXTS = [f"document {number}: " + "xyzé"[number % 4] * (number % 23) for number in range(60)]


def rows(path: Path, *contents: Any) -> Path:
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in contents]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return rows(tmp_path / "texts.jsonl", *({"text": text} for text in TEXTS))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return rows(tmp_path / "pairs.jsonl", *({"de": f"Wort {n}", "en": "w" * (n + 1)} for n in range(20)))


def prepared(path: Path, into: Path, validation_split: float = 0.2, seed: int = 7, **rest: Any) -> PreparedData:
    return prepare_data([TextSource(path)], BYTES, into, validation_split=validation_split, seed=seed, **rest)


def texts_of(split: memmap.TokenSplit, tokenizer: Tokenizer = BYTES) -> list[str]:
    cut = np.split(split.tokens, split.offsets[1:-1])
    assert all(piece[-1] == tokenizer.eos_token_id for piece in cut)
    return [tokenizer.decode(piece.tolist()) for piece in cut]


# The order


def test_a_shuffle_leaves_nothing_out_and_takes_nothing_twice() -> None:
    for size in range(1, 301):
        assert sorted(shuffle_indices(np.arange(size), size, 3, size % 5).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2**31 + 1, 10**12, 2**62 + 12345])
def test_a_shuffle_of_very_many(size: int) -> None:
    places = np.linspace(0, size - 1, 20_001).astype(np.int64).clip(0, size - 1)
    places = np.unique(np.concatenate([places, np.arange(1000)]))
    found = shuffle_indices(places, size, 1, 0)
    assert len(np.unique(found)) == len(places)
    assert 0 <= found.min() <= found.max() < size
    assert np.histogram(found / size, 10, (0, 1))[0].min() > 0.9 * len(places) / 10


def test_one_index_is_shuffled_as_among_others() -> None:
    together = shuffle_indices(np.arange(97), 97, 5, 2)
    assert [shuffle_index(index, 97, 5, 2) for index in range(97)] == together.tolist()


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(shuffle_indices(np.arange(100), 100, seed, epoch)) for seed in range(4) for epoch in range(8)]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("size", [3, 5, 8])
def test_every_pair_of_places_is_about_as_likely(size: int) -> None:
    cells = dict.fromkeys(permutations(range(size), 2), 0)
    each = 60
    for epoch in range(each * len(cells)):
        first, second = shuffle_indices(np.array([0, 1]), size, 11, epoch).tolist()
        cells[first, second] += 1
    surplus = sum((count - each) ** 2 / each for count in cells.values())
    freedom = len(cells) - 1
    assert abs(surplus - freedom) < 4 * (2 * freedom) ** 0.5  # four standard deviations of χ²


@pytest.mark.parametrize("size", [5000, 4096, 2**40 + 1])
def test_neighbours_are_sent_anywhere(size: int) -> None:
    found = shuffle_indices(np.arange(4001), size, 1, 9) * 8 // size
    cells = np.bincount(found[:-1] * 8 + found[1:], minlength=64)
    assert abs(((cells - 62.5) ** 2 / 62.5).sum() - 63) < 4 * 126**0.5


def test_an_index_outside_is_refused() -> None:
    for index, size in [(5, 5), (-1, 5), (0, 0)]:
        with pytest.raises(InputError, match="outside"):
            shuffle_index(index, size, 0, 0)


# Documents


def test_files_rows_and_directories_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes(b"zwei\r\n")
    (tmp_path / "a.py").write_bytes(b"\xef\xbb\xbfone = 1\n")
    rows(tmp_path / "c.jsonl", {"text": "three"}, b"", {"text": "four", "more": [1]})
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    assert list(read_documents(TextSource(tmp_path))) == [
        Document(text) for text in ("one = 1\n", "zwei\r\n", "three", "four")
    ]
    assert list(read_documents(TextSource(tmp_path / "b" / "two.txt"))) == [Document("zwei\r\n")]


def test_bad_rows_are_counted_with_an_example_and_passed_over(tmp_path: Path) -> None:
    path = rows(
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
    assert [document.text for document in read_documents(TextSource(path), skipped)] == ["good", "good too"]
    assert skipped.counts == {"invalid JSON": 2, "missing column": 3, "invalid UTF-8": 2, "empty": 1}
    assert skipped.examples["invalid JSON"].startswith(f"{path} line 2: ")
    assert skipped.total == 8
    assert "2 × invalid JSON" in str(skipped)


def test_bad_files_are_counted_too(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\x00")
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "never")
    os.mkfifo(tmp_path / "pipe.txt")
    skipped = SkippedDocuments()
    assert list(read_documents(TextSource(tmp_path), skipped)) == [Document("good")]
    assert skipped.counts == {"unreadable file": 2, "invalid UTF-8": 1, "empty": 1}


def test_pairs_need_both_columns(tmp_path: Path) -> None:
    path = rows(tmp_path / "x.jsonl", {"de": "eins", "en": "one"}, {"de": "zwei"}, {"de": "drei", "en": ""})
    (tmp_path / "notes.txt").write_text("no pair")
    skipped = SkippedDocuments()
    assert list(read_documents(TextSource(path.parent, "de", "en"), skipped)) == [Document("eins", "one")]
    assert skipped.counts == {"text file without target column": 1, "missing column": 1, "empty": 1}


def test_a_long_file_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARS", 50)
    text = "".join(f"line {number} é\n" * (number % 4) for number in range(40)) + "x" * 130
    (tmp_path / "x.txt").write_text(text)
    found = [document.text for document in read_documents(TextSource(tmp_path / "x.txt"))]
    assert "".join(found) == text
    assert len(found) > 5
    assert all(len(piece) <= 100 for piece in found)
    assert all(piece.endswith("\n") for piece in found[:-3])


def test_parquet_without_pyarrow_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="pip install pyarrow"):
        list(read_documents(TextSource(tmp_path / "x.parquet")))


def test_parquet_is_read_as_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for the few names that are used of pyarrow."""
    table = {"text": ["one", None, "", "two"], "other": [1, 2, 3, 4]}

    class ParquetFile:
        def __init__(self, path: Path) -> None:
            if not path.read_bytes().startswith(b"PAR1"):
                raise ValueError("no magic bytes")
            self.schema_arrow = SimpleNamespace(names=list(table))

        def iter_batches(self, batch_size: int, columns: list[str]) -> Iterator[Any]:
            every = [dict(zip(columns, row, strict=True)) for row in zip(*(table[c] for c in columns), strict=True)]
            yield SimpleNamespace(to_pylist=lambda: every)

    package, module = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    module.ParquetFile = ParquetFile  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "y.parquet").write_bytes(b"else")
    skipped = SkippedDocuments()
    assert [document.text for document in read_documents(TextSource(tmp_path), skipped)] == ["one", "two"]
    assert skipped.counts == {"missing column": 1, "empty": 1, "invalid parquet": 1}
    skipped = SkippedDocuments()
    assert list(read_documents(TextSource(tmp_path / "x.parquet", "absent"), skipped)) == []
    assert skipped.counts == {"missing column": 1}


def test_the_standard_library_is_text_without_tests() -> None:
    found = list_source_files(TextSource(None))
    names = [file.name for file in found]
    assert {"heapq.py", "asyncio/tasks.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    assert 5e6 < sum(file.size for file in found) < 50e6


def test_sources_that_are_not_there_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(InputError, match=r"does not exist|holds no files"):
            list(read_documents(TextSource(path)))
    with pytest.raises(InputError, match="weight"):
        TextSource(tmp_path, weight=0)


# Ids on the disk


def test_every_document_is_in_one_split_and_ends_with_eos(texts: Path, tmp_path: Path) -> None:
    found = prepared(texts, tmp_path / "data")
    train, kept = texts_of(found.train), texts_of(found.validation)
    assert sorted(train + kept) == sorted(TEXTS)
    assert [text for text in TEXTS if text in train] == train  # in their order
    assert 4 <= len(kept) <= 22
    assert found.train.tokens.dtype == np.uint16
    sizes = [sum(len(text.encode()) for text in part) for part in (train, kept)]
    assert found.num_bytes == {"train": sizes[0], "validation": sizes[1]}
    assert not found.skipped.total


def test_more_files_do_not_reshuffle_the_others(texts: Path, tmp_path: Path) -> None:
    before = texts_of(prepared(texts, tmp_path / "data").validation)
    both = [TextSource(rows(tmp_path / "more.jsonl", {"text": "m"})), TextSource(texts)]
    after = prepare_data(both, BYTES, tmp_path / "data", validation_split=0.2, seed=7)
    assert [text for text in texts_of(after.validation) if text != "m"] == before
    assert texts_of(prepared(texts, tmp_path / "data", seed=8).validation) != before


def test_what_is_there_is_not_read_again(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(texts, *({"text": text} for text in TEXTS), b"broken")
    first = prepared(texts, tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "read_file", lambda *_: pytest.fail("read again"))
        again = prepared(texts, tmp_path / "data")
    assert again.directory == first.directory
    assert again.fingerprint == first.fingerprint
    assert again.skipped == first.skipped
    assert again.skipped.counts == {"invalid JSON": 1}
    assert np.array_equal(again.train.tokens, first.train.tokens)
    assert again.num_bytes == first.num_bytes


def test_changed_data_has_another_fingerprint_and_folder(texts: Path, tmp_path: Path) -> None:
    first = prepared(texts, tmp_path / "data")
    os.utime(texts, ns=(1, 1))
    touched = prepared(texts, tmp_path / "data")
    assert (touched.directory != first.directory, touched.fingerprint == first.fingerprint) == (True, True)
    rows(texts, *({"text": text} for text in [*TEXTS[:-1], "changed"]))
    changed = prepared(texts, tmp_path / "data")
    assert changed.fingerprint != first.fingerprint
    assert len({first.directory, touched.directory, changed.directory}) == 3
    other = prepare_data([TextSource(texts)], train_bpe(TEXTS, 300), tmp_path / "data", validation_split=0.2, seed=7)
    assert other.fingerprint != changed.fingerprint


def test_a_tokenizer_that_was_saved_gives_the_same_fingerprint(texts: Path, tmp_path: Path) -> None:
    made = train_bpe(TEXTS, 300)
    made.save(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert loaded is not None
    both = [
        prepare_data([TextSource(texts)], t, tmp_path / "data", validation_split=0.2, seed=0) for t in (made, loaded)
    ]
    assert both[0].fingerprint == both[1].fingerprint


def test_the_fingerprint_does_not_tell_how_documents_were_grouped(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(texts, tmp_path / "one")
    monkeypatch.setattr(tokenize, "CHUNK_DOCUMENTS", 7)
    second = prepared(texts, tmp_path / "two")
    assert second.fingerprint == first.fingerprint
    assert np.array_equal(second.train.offsets, first.train.offsets)


def test_large_ids_have_room(tmp_path: Path, texts: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_tokens([f"<{number}>" for number in range(65_400)])
    rows(texts, {"text": "<65399>"})
    found = prepare_data([TextSource(texts)], tokenizer, tmp_path / "data", validation_split=0, seed=0)
    assert found.train.tokens.dtype == np.uint32
    assert found.train.tokens.tolist() == [65_399 + 259, END]
    assert found.validation.num_documents == len(found.validation.tokens) == 0


@pytest.mark.parametrize(
    ("contents", "validation_split", "message"),
    [
        ([], 0.1, "no documents"),
        ([b"broken"], 0.1, "1 × invalid JSON"),
        ([{"text": "one"}], 0.001, "none fell to validation"),
        ([{"text": "one"}], 0.999, "none fell to training"),
        ([{"text": "one"}], 1.0, "validation_split is 1.0"),
    ],
)
def test_nothing_to_learn_from_is_refused(
    contents: list[Any], validation_split: float, message: str, tmp_path: Path
) -> None:
    path = rows(tmp_path / "x.jsonl", *contents)
    with pytest.raises(InputError, match=message):
        prepared(path, tmp_path / "data", validation_split)
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").iterdir())


def test_texts_and_pairs_are_not_prepared_together(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="some have none"):
        prepare_data(
            [TextSource(texts), TextSource(texts, target_column="en")],
            BYTES,
            tmp_path / "data",
            validation_split=0.1,
            seed=0,
        )


def test_processes_give_what_one_gives(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(texts, *({"text": f"{text} <|eos|> é"} for text in TEXTS))
    tokenizer = byte_tokenizer()
    tokenizer.backend.encode_special_tokens = True
    alone = prepare_data([TextSource(texts)], tokenizer, tmp_path / "one", validation_split=0.2, seed=7)
    monkeypatch.setattr(prepare, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(prepare, "num_cores", lambda: 2)
    monkeypatch.setattr(tokenize, "CHUNK_DOCUMENTS", 7)
    here: list[int] = []
    monkeypatch.setattr(tokenize, "encode_documents", lambda *_: here.append(1))
    many = prepare_data([TextSource(texts)], tokenizer, tmp_path / "two", validation_split=0.2, seed=7)
    assert not here
    assert many.fingerprint == alone.fingerprint
    assert np.array_equal(many.train.tokens, alone.train.tokens)
    assert (alone.train.tokens == END).sum() == alone.train.num_documents  # those in the text were read as text


def test_a_program_is_not_run_again_by_its_processes(texts: Path, tmp_path: Path) -> None:
    """Even if it does not ask whether it is the main one."""
    program = tmp_path / "program.py"
    program.write_text("""
import sys
from pathlib import Path
from cutaway.tokenizer import byte_tokenizer
from cutaway.train.data import prepare, tokenize
from cutaway.train.data.documents import TextSource
print("begun")
prepare.MIN_PARALLEL_BYTES, tokenize.CHUNK_DOCUMENTS, prepare.num_cores = 0, 7, lambda: 2
tokenize.encode_documents = None
sources = [TextSource(Path(sys.argv[1]))]
print(prepare.prepare_data(sources, byte_tokenizer(), sys.argv[2], validation_split=0.2, seed=7).fingerprint)
""")
    command = [sys.executable, str(program), str(texts), str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["begun", prepared(texts, tmp_path / "one").fingerprint]
    assert not done.stderr


def test_work_of_processes_that_die_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        """The first chunk is encoded, the second dies, and then no more are taken."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.taken = 0

        def submit(self, _: Any, chunk: tokenize.Chunk) -> Any:
            self.taken += 1
            if self.taken > 2:
                raise BrokenProcessPool
            return SimpleNamespace(
                result=lambda: tokenize.encode_documents(BYTES, chunk) if self.taken == 1 else self.die()
            )

        def die(self) -> None:
            raise BrokenProcessPool

        def shutdown(self, cancel_futures: bool) -> None: ...

    chunks = [[Document(text)] for text in TEXTS]
    monkeypatch.setattr(tokenize, "ProcessPoolExecutor", Dying)
    found = [encoded.ids.tolist() for encoded in tokenize.encode_chunks(chunks, BYTES, 2)]
    assert found == [[*BYTES.encode(text), END] for text in TEXTS]


def test_killed_half_way_leaves_nothing_that_is_taken_for_whole(texts: Path, tmp_path: Path) -> None:
    """Killed when the last document has been read, and when all is written but has no name yet."""
    code = """
import os, signal, sys
from pathlib import Path
from cutaway.tokenizer import byte_tokenizer
from cutaway.train.data import prepare, tokenize
from cutaway.train.data.documents import TextSource
tokenize.CHUNK_DOCUMENTS = 5
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
path, into, when = sys.argv[1:]
if when == "named": Path.rename = die
prepare.prepare_data([TextSource(Path(path))], byte_tokenizer(), into, validation_split=0.2, seed=7,
                     progress=lambda done, total: die() if done == total and when == "read" else None)
"""
    into = tmp_path / "data"
    for when in ("read", "named"):
        command = [sys.executable, "-c", code, str(texts), str(into), when]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert [path.name[:5] for path in into.iterdir()] == [".tmp-"] * len(list(into.iterdir()))
    assert len(list(into.iterdir())) == 2
    assert sorted(texts_of(prepared(texts, into).train) + texts_of(prepared(texts, into).validation)) == sorted(TEXTS)
    for stale in into.glob(".tmp-*"):
        for path in [*stale.iterdir(), stale]:
            os.utime(path, (0, 0))
    prepared(texts, into, seed=8)
    assert not list(into.glob(".tmp-*"))


def test_a_damaged_folder_is_made_again(texts: Path, tmp_path: Path) -> None:
    first = prepared(texts, tmp_path / "data")
    expected = np.array(first.train.tokens)
    for name, damage in [("train.tokens.npy", 300), ("validation.offsets.npy", 10), ("data.json", 20)]:
        os.truncate(first.directory / name, damage)
        assert np.array_equal(prepared(texts, tmp_path / "data").train.tokens, expected)
    (first.directory / "train.offsets.npy").unlink()
    assert np.array_equal(prepared(texts, tmp_path / "data").train.tokens, expected)


def test_a_full_disk_is_said_and_leaves_nothing(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memmap.NpyAppender, "finalize", full)
    with pytest.raises(InputError, match="No space left on device"):
        prepared(texts, tmp_path / "data")
    assert not list((tmp_path / "data").iterdir())


def test_files_that_change_while_they_are_read_are_refused(texts: Path, tmp_path: Path) -> None:
    def write(done: int, total: int) -> None:
        with texts.open("a") as file:
            file.write('{"text": "late"}\n')

    with pytest.raises(InputError, match="changed while they were read"):
        prepared(texts, tmp_path / "data", progress=write)


def test_progress_goes_to_the_end(texts: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    prepared(texts, tmp_path / "data", progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (texts.stat().st_size,) * 2


# Batches


@pytest.fixture
def split(texts: Path, tmp_path: Path) -> memmap.TokenSplit:
    return prepared(texts, tmp_path / "data").train


def test_sequences_end_to_end_are_the_text(split: memmap.TokenSplit) -> None:
    data = PackedDataset(split, 16, 0, shuffle=False)
    tokens = data.get_batch(0, data.num_sequences).tokens
    assert data.num_sequences == (len(split.tokens) - 1) // 16
    assert tokens.shape == (data.num_sequences, 17)
    assert torch.equal(tokens[1:, 0], tokens[:-1, -1])
    whole = torch.cat([tokens[0, :1], tokens[:, 1:].flatten()])
    assert whole.tolist() == split.tokens[: len(whole)].tolist()
    assert len(split.tokens) - len(whole) < 16


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_token_is_a_target_once_an_epoch(split: memmap.TokenSplit, epoch: int) -> None:
    numbered = memmap.TokenSplit(np.arange(len(split.tokens), dtype=np.uint32), split.offsets, None, 0)
    data = PackedDataset(numbered, 7, 3)
    targets = data.get_batch(epoch * data.num_sequences, data.num_sequences).tokens[:, 1:].flatten()
    assert targets.sort().values.tolist() == list(range(1, data.num_sequences * 7 + 1))
    assert targets.tolist() != sorted(targets.tolist())


def test_documents_are_counted_at_their_borders(split: memmap.TokenSplit) -> None:
    for length in (1, 5, 64):
        data = PackedDataset(split, length, 0, shuffle=False)
        owner = np.repeat(np.arange(split.num_documents), np.diff(split.offsets))
        for position, row in enumerate(data.get_batch(0, data.num_sequences).document_ids.tolist()):
            of = owner[position * length : position * length + length + 1]
            assert row == (of - of[0]).tolist()


def test_a_batch_is_the_same_whatever_came_before(split: memmap.TokenSplit) -> None:
    data = PackedDataset(split, 9, 5)
    one_by_one = [data.get_batch(position, 1) for position in range(3 * data.num_sequences)]
    fresh = PackedDataset(split, 9, 5)
    for first, count in [(2 * data.num_sequences - 3, 10), (0, 4), (data.num_sequences, 1), (17, 30)]:
        batch = fresh.get_batch(first, count)
        for part in (0, 1):
            assert torch.equal(batch[part], torch.cat([each[part] for each in one_by_one[first : first + count]]))
    assert not torch.equal(data.get_batch(0, 20).tokens, data.get_batch(data.num_sequences, 20).tokens)
    assert not torch.equal(data.get_batch(0, 20).tokens, PackedDataset(split, 9, 6).get_batch(0, 20).tokens)


@pytest.mark.parametrize(("first", "count", "world_size"), [(0, 8, 2), (24, 12, 3), (7, 9, 4)])
def test_ranks_together_see_what_one_sees(split: memmap.TokenSplit, first: int, count: int, world_size: int) -> None:
    data = PackedDataset(split, 9, 5)
    alone = data.get_batch(first, count).tokens
    together = torch.empty_like(alone)
    for rank in range(world_size):
        positions = rank_positions(first, count, rank, world_size)
        together[[position - first for position in positions]] = data.get_batch_at(positions).tokens
    assert torch.equal(together, alone)


def test_no_rows_make_an_empty_batch(split: memmap.TokenSplit) -> None:
    assert PackedDataset(split, 9, 5).get_batch(0, 0).tokens.shape == (0, 10)
    assert len(rank_positions(0, 1, 0, 2)) == 0


def test_bad_questions_of_data_are_refused(split: memmap.TokenSplit) -> None:
    questions: list[tuple[str, Callable[[], Any]]] = [
        ("at least 1", lambda: PackedDataset(split, 0, 0)),
        ("no sequence", lambda: PackedDataset(split, 10**6, 0)),
        ("before the data", lambda: PackedDataset(split, 4, 0).get_batch(-1, 2)),
        ("no targets", lambda: Seq2SeqDataset(split, 0, start_id=1)),
        ("rank 2", lambda: rank_positions(0, 4, 2, 2)),
        ("one kind", lambda: MixtureDataset([(PackedDataset(split, 4, 0), 1.0), (PackedDataset(split, 5, 0), 1.0)], 0)),
        ("one kind", lambda: MixtureDataset([], 0)),
        ("above 0", lambda: MixtureDataset([(PackedDataset(split, 4, 0), 0.0)], 0)),
    ]
    for message, call in questions:
        with pytest.raises(InputError, match=message):
            call()


def test_pairs_come_whole_and_padded(pairs: Path, tmp_path: Path) -> None:
    found = prepare_data([TextSource(pairs, "de", "en")], BYTES, tmp_path / "data", validation_split=0.2, seed=1)
    start, pad = BYTES.bos_token_id, BYTES.pad_token_id
    assert start is not None
    assert pad is not None
    data = Seq2SeqDataset(found.train, 4, start_id=start, pad_id=pad)
    assert data.num_sequences + found.validation.num_documents == 20
    batch = data.get_batch(0, data.num_sequences)
    assert (batch.source[~batch.source_mask] == pad).all()
    assert (batch.target[~batch.target_mask] == pad).all()
    seen = []
    for source, real, target, true in zip(*batch, strict=True):
        whole = target[true].tolist()
        assert (whole[0], whole[-1]) == (start, END)
        seen.append((BYTES.decode(source[real].tolist()), BYTES.decode(whole)))
        assert source[real].tolist() == BYTES.encode(seen[-1][0])  # as a prompt will be, without an end
    every = {(f"Wort {n}", "w" * (n + 1)) for n in range(20)}
    assert len(set(seen)) == len(seen)
    assert set(seen) < every
    assert found.num_bytes["train"] == sum(len(target) for _, target in seen)
    with pytest.raises(InputError, match="not packed"):
        PackedDataset(found.train, 4, 0)


def test_pairs_at_a_position_are_the_same_beside_any_others(pairs: Path, tmp_path: Path) -> None:
    found = prepare_data([TextSource(pairs, "de", "en")], BYTES, tmp_path / "data", validation_split=0, seed=1).train
    data = Seq2SeqDataset(found, 4, start_id=1)
    batch = data.get_batch(15, 10)
    for row, position in enumerate(range(15, 25)):
        one = data.get_batch(position, 1)
        assert torch.equal(batch.source[row][batch.source_mask[row]], one.source[0])
        assert torch.equal(batch.target[row][batch.target_mask[row]], one.target[0])


def test_long_pairs_are_left_out_and_counted(pairs: Path, tmp_path: Path) -> None:
    found = prepare_data([TextSource(pairs, "de", "en")], BYTES, tmp_path / "data", validation_split=0, seed=1).train
    data = Seq2SeqDataset(found, 4, start_id=1, max_len=11)  # ten letters and the end
    assert (data.num_sequences, data.num_skipped) == (10, 10)
    assert data.get_batch(0, 10).target.shape == (10, 12)
    with pytest.raises(InputError, match="none has at most 2 tokens"):
        Seq2SeqDataset(found, 4, start_id=1, max_len=2)


def test_a_start_that_the_tokenizer_has_set_is_not_doubled() -> None:
    def of(*target: int) -> list[int]:
        tokens = np.array([9, *target], np.uint16)
        split = memmap.TokenSplit(tokens, np.array([0, len(tokens)]), np.array([1]), 0)
        return Seq2SeqDataset(split, 0, start_id=2).get_batch(0, 1).target[0].tolist()

    assert of(5, 6, 2) == [2, 5, 6, 2]
    assert of(2, 5, 6, 3) == [2, 5, 6, 3]
    assert of(2) == [2, 2]


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0), (0.5, 0.2, 0.3), (1e-6, 1.0, 1e6)])
def test_a_mixture_is_in_proportion_and_skips_nothing(split: memmap.TokenSplit, weights: tuple[float, ...]) -> None:
    mixture = MixtureDataset([(PackedDataset(split, 8, seed), weight) for seed, weight in enumerate(weights)], 2)
    places = [mixture.locate(position) for position in range(4000)]
    for which, weight in enumerate(weights):
        own = [position for part, position in places if part == which]
        assert own == list(range(len(own)))
        share_of = weight / sum(weights)
        for first in range(0, 4000, 250):  # anywhere, not only from the beginning
            inside = sum(part == which for part, _ in places[first : first + 250])
            assert abs(inside - 250 * share_of) <= len(weights)
    far = 10**15 + 7
    assert abs(mixture.locate(far)[1] - far * weights[mixture.locate(far)[0]] / sum(weights)) < 1e-8 * far + 1


def test_a_mixtures_batch_is_its_parts_rows(split: memmap.TokenSplit) -> None:
    parts = [PackedDataset(split, 8, seed) for seed in range(3)]
    mixture = MixtureDataset(list(zip(parts, (2.0, 1.0, 1.0), strict=True)), 5)
    batch = mixture.get_batch(13, 40)
    for row, position in enumerate(range(13, 53)):
        which, at = mixture.locate(position)
        alone: PackedBatch = parts[which].get_batch(at, 1)
        assert torch.equal(batch.tokens[row], alone.tokens[0])
        assert torch.equal(batch.document_ids[row], alone.document_ids[0])
    nested = MixtureDataset([(mixture, 1.0), (parts[0], 1.0)], 0)
    assert nested.get_batch_at([5, 3]).tokens.shape == (2, 9)


def test_data_is_prepared_without_torch() -> None:
    code = "import sys; from cutaway.train.data import prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
