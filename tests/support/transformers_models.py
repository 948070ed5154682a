"""Small random transformers models: the reference models of the family tests."""

import inspect
import sys
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
    """Raised once the reference model is known, to skip the rest of the test."""


def find_peers(family: str, seed: int = 0) -> list[PeerModel]:
    """Collect the reference models of a family's tests for one seed."""
    peers: list[PeerModel] = []
    module = import_module(f"test_{family}")
    original = getattr(module, "check_family", None)

    def record_peer(peer: PeerModel, *_: Any) -> None:
        peers.append(peer)
        raise PeerFoundError

    module.check_family = record_peer  # type: ignore[attr-defined]
    try:
        for name, test in inspect.getmembers(module, inspect.isfunction):
            arguments = list(inspect.signature(test).parameters)
            if name.startswith("test_") and arguments in (["seed", "tmp_path"], ["tmp_path", "seed"]):
                with suppress(PeerFoundError):
                    test(seed=seed, tmp_path=Path("unused"))
    finally:
        module.check_family = original  # type: ignore[attr-defined]
    return peers


def supported_kernels(peer: PeerModel) -> list[str]:
    """Attention implementations of transformers that work for the reference model."""
    has_sdpa = peer.auto_class._model_mapping[type(peer.config)]._supports_sdpa
    return [kernel for kernel, works in (("eager", not peer.skip_eager), ("sdpa", has_sdpa)) if works]


def build_transformers_model(peer: PeerModel, seed: int = 0, *, kernel: str | None = None) -> Any:
    """Build a transformers model with random weights in all parameters, without the patches that family tests apply."""
    torch.manual_seed(seed)
    implementation = kernel or ("sdpa" if peer.skip_eager else "eager")
    model = peer.auto_class.from_config(peer.config, attn_implementation=implementation).float().eval()
    randomize_weights(model, seed, peer.frozen)
    return model
