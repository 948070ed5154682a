"""Models of transformers, small and random: those that the tests of families compare with, one after another."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from support.family_parity import PeerModel, randomize_weights

FAMILY_TESTS_DIR = Path(__file__).parents[1] / "families" / "tables"
FAMILIES = sorted(path.stem.removeprefix("test_") for path in FAMILY_TESTS_DIR.glob("test_*.py"))
FAMILIES.remove("all_families")
sys.path.append(str(FAMILY_TESTS_DIR))


class PeerFoundError(Exception):
    """The peer is known: the rest of the test is not wanted."""


def find_peers(family: str, seed: int = 0) -> list[PeerModel]:
    """What the tests of a family would compare with, for one seed."""
    found: list[PeerModel] = []
    module = import_module(f"test_{family}")
    plain = getattr(module, "check_family", None)

    def keep(peer: PeerModel, *_: Any) -> None:
        found.append(peer)
        raise PeerFoundError

    module.check_family = keep  # type: ignore[attr-defined]
    try:
        for name, test in inspect.getmembers(module, inspect.isfunction):
            wants = list(inspect.signature(test).parameters)
            if name.startswith("test_") and wants in (["seed", "tmp_path"], ["tmp_path", "seed"]):
                with suppress(PeerFoundError):
                    test(seed=seed, tmp_path=Path("unused"))
    finally:
        module.check_family = plain  # type: ignore[attr-defined]
    return found


def build_transformers_model(peer: PeerModel, seed: int = 0, *, kernel: str | None = None) -> Any:
    """A model of transformers with weights that keep every part alive, as it is: what a test mends in it is not."""
    torch.manual_seed(seed)
    first = kernel or ("sdpa" if peer.skip_eager else "eager")
    model = peer.auto_class.from_config(peer.config, attn_implementation=first).float().eval()
    randomize_weights(model, seed, peer.frozen)
    return model


def iterate_peers(seed: int = 0) -> Iterator[tuple[str, PeerModel]]:
    """Every family's."""
    for family in FAMILIES:
        for n, peer in enumerate(find_peers(family, seed)):
            yield f"{family}{'' if n == 0 else f' {n}'}", peer
