"""Pretrained models shipped with the package: `tiny-python`."""

from pathlib import Path

PRETRAINED_DIR = Path(__file__).parent
ABLATIONS_FILE = PRETRAINED_DIR / "ablations.json"
"""Results of the shipped ablation study: components removed after training, and models trained without them."""


def list_pretrained() -> list[str]:
    """Names of the pretrained models."""
    return sorted(path.name for path in PRETRAINED_DIR.iterdir() if (path / "config.json").is_file())


def find_pretrained(name: str) -> Path | None:
    """Directory of a pretrained model, or None."""
    return PRETRAINED_DIR / name if name in list_pretrained() else None
