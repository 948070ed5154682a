"""Activation datasets equal traces, do not depend on packing, and are equal bit for bit after a kill and a resume."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.tracing import count_hooks

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens import trace
from cutaway.lens.activations import ActivationDataset, collect_activations
from cutaway.model import Transformer

SITES = ("blocks.1.resid_post", "blocks.0.attn.z")


def random_sequences(count: int = 23, vocab_size: int = 200) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return ct.build("tiny-llama", seed=0)


@pytest.mark.parametrize("packing", [False, True])
def test_activations_equal_a_trace_of_each_sequence(model: Transformer, tmp_path: Path, packing: bool) -> None:
    sequences = random_sequences()
    dataset = collect_activations(
        model,
        sequences,
        *SITES,
        directory=tmp_path / "a",
        seq_len=64,
        batch_size=2,
        packing=packing,
        tokens_per_shard=70,
    )
    assert count_hooks(model) == 0
    assert len(dataset) == sum(map(len, sequences))
    assert len(dataset.index.shards) > 2
    everything = dataset[:]
    for number, ids in enumerate(sequences):
        at = everything.sequences == number
        if packing and int((everything.positions[at] == 0).sum()) > 1:
            continue  # the sequence is divided at the end of a row
        assert everything.tokens[at].tolist() == ids
        assert everything.positions[at].tolist() == list(range(len(ids)))
        with torch.no_grad(), trace(model, *SITES) as t:
            model(torch.tensor([ids]))
        for site in SITES:
            torch.testing.assert_close(everything[site][at], torch.Tensor(t[site])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["causal", "masked"])
def test_transformers_model_equals_the_loaded_model(tmp_path: Path, form: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    peer: torch.nn.Module
    if form == "causal":
        peer = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=48)).eval()
    else:
        peer = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=48)).eval()
    peer.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    checkpoint = ct.load(tmp_path / "model")
    site = "blocks.1.resid_post"
    first, second = (
        collect_activations(each, random_sequences(), site, directory=tmp_path / name, batch_size=4)
        for each, name in ((peer, "peer"), (checkpoint, "cutaway"))
    )
    torch.testing.assert_close(first[:][site], second[:][site], rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="packing needs a mask"):
        collect_activations(peer, random_sequences(), site, directory=tmp_path / "packed", packing=True)


def test_texts_and_text_files(tmp_path: Path) -> None:
    checkpoint = ct.load("tiny-english")
    texts = ["The cat sat.", "A dog\nran home.", "Once upon a time"]
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n\n".join(texts) + "\n", encoding="utf-8")
    assert checkpoint.tokenizer is not None
    datasets = [
        collect_activations(checkpoint, corpus, "blocks.0.resid_post", directory=tmp_path / str(number))
        for number, corpus in enumerate((texts, path, [checkpoint.tokenizer.encode(text) for text in texts]))
    ]
    first, *others = (dataset[:] for dataset in datasets)
    assert first["blocks.0.resid_post"].dtype == torch.bfloat16
    for other in others:
        assert torch.equal(first.tokens, other.tokens)
        assert torch.equal(first["blocks.0.resid_post"], other["blocks.0.resid_post"])


def shard_contents(directory: Path) -> tuple[dict[str, bytes], object]:
    files = {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}
    return files, json.loads((directory / "index.json").read_text())


def test_interrupted_run_is_resumed_bit_for_bit(model: Transformer, tmp_path: Path) -> None:
    sequences = random_sequences()
    arguments = {"batch_size": 2, "tokens_per_shard": 40, "packing": True, "seq_len": 16}
    collect_activations(model, sequences, *SITES, directory=tmp_path / "one", **arguments)  # type: ignore[arg-type]

    def fail_after(count: int) -> Iterator[list[int]]:
        yield from sequences[:count]
        raise KeyboardInterrupt

    for count in (0, 5, 6, 14, 22):
        with pytest.raises(KeyboardInterrupt):
            collect_activations(
                model,
                fail_after(count),
                *SITES,
                directory=tmp_path / "two",
                **arguments,  # type: ignore[arg-type]
            )
        assert count_hooks(model) == 0
    ActivationDataset(tmp_path / "two").verify()
    dataset = collect_activations(model, sequences, *SITES, directory=tmp_path / "two", **arguments)  # type: ignore[arg-type]
    assert dataset.index.complete
    assert shard_contents(tmp_path / "one") == shard_contents(tmp_path / "two")


class InterruptedRenameError(Exception):
    """Raised instead of a rename, which is the last operation of every write."""


def test_run_interrupted_before_any_rename_is_resumed_bit_for_bit(
    model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renames are the only operations that change what a resumed run reads."""

    def collect(name: str) -> None:
        sequences = random_sequences(10)
        collect_activations(model, sequences, SITES[0], directory=tmp_path / name, batch_size=4, tokens_per_shard=48)

    collect("whole")
    replace = os.replace
    for number in range(1, 20):
        renames = [0]

        def replace_or_fail(source: Path, target: Path, number: int = number, renames: list[int] = renames) -> None:
            renames[0] += 1
            if renames[0] == number:
                raise InterruptedRenameError
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace_or_fail)
            try:
                collect(f"interrupted {number}")
            except InterruptedRenameError:
                assert renames[0] == number
        if renames[0] < number:
            break
        collect(f"interrupted {number}")
        assert shard_contents(tmp_path / f"interrupted {number}") == shard_contents(tmp_path / "whole")
    assert number == 2 + 2 * len(ActivationDataset(tmp_path / "whole").index.shards) + 1


LONG_RUN = """
import sys
import threading
import cutaway as ct
from cutaway.lens.activations import collect_activations
sequences = [[number % 100, 3, 4, number % 7] for number in range(1000)]
collect_activations(
    ct.build("tiny-llama", seed=0), sequences, "blocks.1.resid_post",
    directory=sys.argv[1], batch_size=4, tokens_per_shard=48,
)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("num_shards", [1, 7, 30])
def test_killed_process_is_resumed_bit_for_bit(model: Transformer, tmp_path: Path, num_shards: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_RUN, str(tmp_path / "killed")], env=os.environ | {"JAXTYPING_DISABLE": "1"}
    )
    while len(list((tmp_path / "killed").glob("*.safetensors"))) < num_shards:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not ActivationDataset(tmp_path / "killed").index.complete
    sequences = [[number % 100, 3, 4, number % 7] for number in range(1000)]
    for name in ("killed", "whole"):
        collect_activations(
            model, sequences, "blocks.1.resid_post", directory=tmp_path / name, batch_size=4, tokens_per_shard=48
        )
    assert shard_contents(tmp_path / "killed") == shard_contents(tmp_path / "whole")


def test_resume_needs_the_same_arguments(model: Transformer, tmp_path: Path) -> None:
    sequences = random_sequences(24)

    def interrupted() -> Iterator[list[int]]:
        yield from sequences[:10]
        raise KeyboardInterrupt

    def collect(corpus: object, batch_size: int = 2, used: Transformer = model) -> None:
        collect_activations(
            used,
            corpus,
            SITES[0],
            directory=tmp_path / "a",
            batch_size=batch_size,
            tokens_per_shard=20,  # type: ignore[arg-type]
        )

    with pytest.raises(KeyboardInterrupt):
        collect(interrupted())
    with pytest.raises(InputError, match=r"batch_size = 2, not 3.*pass the same batch_size"):
        collect(sequences, batch_size=3)
    with pytest.raises(InputError, match=r"with model = .*pass the same model"):
        collect(sequences, used=ct.build("tiny-llama", seed=1))
    with pytest.raises(InputError, match="are not those of the corpus"):
        collect([[7, 7, *ids] for ids in sequences])
    collect(sequences)
    assert ActivationDataset(tmp_path / "a").index.complete
    collect(sequences)
    with pytest.raises(InputError, match="of a shorter corpus"):
        collect([*sequences, [1, 2, 3]])


def test_later_blocks_are_not_computed(model: Transformer, tmp_path: Path) -> None:
    calls = []
    handles = [
        block.register_forward_hook(lambda *_, number=number: calls.append(number))
        for number, block in enumerate(model.get_submodule("decoder.blocks").children())
    ]
    collect_activations(model, [[1, 2, 3]], "blocks.0.attn.z", "blocks.1.resid_post", directory=tmp_path / "a")
    for handle in handles:
        handle.remove()
    assert calls == [0, 1]


def test_max_tokens_and_dtype(model: Transformer, tmp_path: Path) -> None:
    def endless() -> Iterator[list[int]]:
        while True:
            yield [1, 2, 3, 4]

    dataset = collect_activations(
        model, endless(), SITES[0], directory=tmp_path / "a", batch_size=2, max_tokens=20, dtype=torch.float16
    )
    assert len(dataset) == 24
    assert dataset[0][SITES[0]].dtype == torch.float16
    stored = load_file(dataset.directory / dataset.index.shards[0].file)
    assert stored.keys() == {SITES[0], "tokens", "positions", "sequences"}


def test_errors(model: Transformer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no fixed size per token"):
        collect_activations(model, [[1]], "attn.pattern", directory=tmp_path / "a")
    with pytest.raises(InputError, match="no tokenizer"):
        collect_activations(model, ["text"], SITES[0], directory=tmp_path / "b")
    with pytest.raises(InputError, match="corpus has no tokens"):
        collect_activations(model, [], SITES[0], directory=tmp_path / "c")
    with pytest.raises(InputError, match="item 1 of the corpus"):
        collect_activations(model, [[1], None], SITES[0], directory=tmp_path / "d")  # type: ignore[list-item]
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "notes.txt").write_text("x")
    with pytest.raises(InputError, match="has other files"):
        collect_activations(model, [[1]], SITES[0], directory=tmp_path / "e")
    with pytest.raises(InputError, match="encoder-decoder"):
        collect_activations(ct.build("tiny-t5", seed=0), [[1]], "decoder.embed", directory=tmp_path / "f")


def test_forward_passes_of_other_threads_are_not_stopped(model: Transformer, tmp_path: Path) -> None:
    """Collecting ends its own forward passes after the last site. Another thread gets its logits meanwhile."""
    tokens, outputs = torch.tensor([[1, 2, 3]]), list[torch.Tensor]()
    expected = model(tokens)

    def sequences() -> Iterator[list[int]]:
        for sequence in random_sequences(6):
            thread = threading.Thread(target=lambda: outputs.append(model(tokens)))
            thread.start()
            thread.join()
            yield sequence

    collect_activations(model, sequences(), "blocks.0.resid_post", directory=tmp_path, batch_size=2)
    assert len(outputs) == 6
    assert all(torch.equal(output, expected) for output in outputs)
