"""Pretrained models shipped with the package: two decoders, an encoder, an encoder-decoder, and trained variants."""

import json
from pathlib import Path
from typing import Any

PRETRAINED_DIR = Path(__file__).parent
ABLATIONS_FILE = PRETRAINED_DIR / "ablations.json"
"""Results of the shipped ablation study: components removed after training, and models trained without them."""
VARIANTS_DIR = PRETRAINED_DIR / "variants"
"""Small story models that differ from `variants/base` in one component, and their losses (`results.json`)."""
DEFAULT_MODEL = "tiny-english"
"""Model of the commands whose SOURCE is optional."""
EXAMPLE_TEXTS = {
    "tiny-english": "The cat sat on the",
    "tiny-english-encoder": "The [MASK] sat on the mat.",
    "tiny-dates": "March 3rd, 2021",
    "tiny-python": "for name in sorted(os.",
}
"""An input text of each model, for which its prediction is good."""


def list_pretrained() -> list[str]:
    """Names of the pretrained models."""
    return sorted(path.name for path in PRETRAINED_DIR.iterdir() if (path / "config.json").is_file())


def list_variants() -> list[str]:
    """Names of the trained variants, such as "variants/alibi"."""
    return sorted(f"{VARIANTS_DIR.name}/{path.name}" for path in VARIANTS_DIR.iterdir() if path.is_dir())


def find_pretrained(name: str) -> Path | None:
    """Directory of a pretrained model or of a trained variant, or None."""
    return PRETRAINED_DIR / name if name in list_pretrained() or name in list_variants() else None


def load_examples(name: str) -> list[dict[str, Any]]:
    """Examples of a pretrained model for the web page: inputs and edits that show its mechanisms."""
    directory = find_pretrained(name)
    path = None if directory is None else directory / "examples.json"
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else []


def example_text(name: str) -> str:
    """The input text of a pretrained model, or of the default model for other names."""
    return EXAMPLE_TEXTS.get(name, EXAMPLE_TEXTS[DEFAULT_MODEL])
