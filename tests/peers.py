"""Models of transformers, small and random: those that the tests of families compare with, one after another."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from family_parity import Peer, randomise

HOME = Path(__file__).parent / "families"
FAMILIES = sorted(path.stem.removeprefix("test_") for path in HOME.glob("test_*.py"))
sys.path.append(str(HOME))


class SeenError(Exception):
    """The peer is known: the rest of the test is not wanted."""


def peers(family: str, seed: int = 0) -> list[Peer]:
    """What the tests of a family would compare with, for one seed."""
    found: list[Peer] = []
    room = import_module(f"test_{family}")
    plain = getattr(room, "check_family", None)

    def keep(peer: Peer, *_: Any) -> None:
        found.append(peer)
        raise SeenError

    room.check_family = keep  # type: ignore[attr-defined]
    try:
        for name, test in inspect.getmembers(room, inspect.isfunction):
            wants = list(inspect.signature(test).parameters)
            if name.startswith("test_") and wants in (["seed", "tmp_path"], ["tmp_path", "seed"]):
                with suppress(SeenError):
                    test(seed=seed, tmp_path=Path("unused"))
    finally:
        room.check_family = plain  # type: ignore[attr-defined]
    return found


def model_of(peer: Peer, seed: int = 0, *, kernel: str | None = None) -> Any:
    """A model of transformers with weights that keep every part alive, as it is: what a test mends in it is not."""
    torch.manual_seed(seed)
    first = kernel or ("sdpa" if peer.skip_eager else "eager")
    model = peer.auto.from_config(peer.config, attn_implementation=first).float().eval()
    randomise(model, seed, peer.frozen)
    return model


def all_peers(seed: int = 0) -> Iterator[tuple[str, Peer]]:
    """Every family's."""
    for family in FAMILIES:
        for n, peer in enumerate(peers(family, seed)):
            yield f"{family}{'' if n == 0 else f' {n}'}", peer
