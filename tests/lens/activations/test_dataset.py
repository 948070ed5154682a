"""Random access and shuffled batches of an activation dataset."""

from pathlib import Path

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens.activations import ActivationDataset, collect_activations

SITE = "blocks.0.resid_post"
NUM_TOKENS = 900


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ActivationDataset:
    sequences = torch.arange(NUM_TOKENS).remainder(200).view(-1, 18).tolist()
    model = ct.build("tiny-llama", seed=0)
    directory = tmp_path_factory.mktemp("activations")
    return collect_activations(model, sequences, SITE, directory=directory, tokens_per_shard=100, batch_size=3)


def test_random_access_equals_the_whole(dataset: ActivationDataset) -> None:
    everything = dataset[:]
    indices = torch.randint(-NUM_TOKENS, NUM_TOKENS, (50,), generator=torch.Generator().manual_seed(0))
    part = dataset[indices]
    assert torch.equal(part[SITE], everything[SITE][indices])
    assert torch.equal(part.sequences, everything.sequences[indices])
    assert torch.equal(dataset[5][SITE], everything[SITE][5:6])
    assert torch.equal(dataset[[3, 8]].tokens, everything.tokens[[3, 8]])
    assert torch.equal(everything.tokens, torch.arange(NUM_TOKENS).remainder(200))


@pytest.mark.parametrize(("batch_size", "buffer_tokens"), [(64, 65536), (64, 300), (7, 256), (900, 100), (1000, 10)])
def test_batches_have_each_token_once(dataset: ActivationDataset, batch_size: int, buffer_tokens: int) -> None:
    batches = list(dataset.batches(batch_size, seed=3, buffer_tokens=buffer_tokens))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    keys = torch.cat([batch.sequences * 18 + batch.positions for batch in batches])
    assert not torch.equal(keys, torch.arange(NUM_TOKENS))
    assert torch.equal(keys.sort().values, torch.arange(NUM_TOKENS))
    values, everything = torch.cat([batch[SITE] for batch in batches]), dataset[:]
    assert torch.equal(values, everything[SITE][keys])
    again = torch.cat([batch.tokens for batch in dataset.batches(batch_size, seed=3, buffer_tokens=buffer_tokens)])
    assert torch.equal(again, torch.cat([batch.tokens for batch in batches]))


def test_batches_in_order(dataset: ActivationDataset) -> None:
    tokens = torch.cat([batch.tokens for batch in dataset.batches(64, shuffle=False)])
    assert torch.equal(tokens, dataset[:].tokens)
    assert sum(len(batch) for batch in dataset.batches(64, drop_last=True)) == 896


def test_context_stays_in_the_sequence(dataset: ActivationDataset) -> None:
    ids, at = dataset.sequence_context(20, before=10, after=5)
    assert ids.tolist() == list(range(18, 26))
    assert ids[at] == 20


def test_damaged_shard_is_an_error(dataset: ActivationDataset, tmp_path: Path) -> None:
    dataset.verify()
    for path in dataset.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    copy = ActivationDataset(tmp_path)
    file = tmp_path / copy.index.shards[1].file
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(InputError, match="differs from its checksum"):
        copy.verify()


def test_errors(dataset: ActivationDataset, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pass 0 to 899"):
        dataset[900]
    with pytest.raises(InputError, match="not one of the dataset's sites"):
        dataset.resolve_site("attn.z")
    with pytest.raises(InputError, match="does not exist"):
        ActivationDataset(tmp_path / "none")
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(InputError, match="is not an index"):
        ActivationDataset(tmp_path)
