"""The trained model that comes with cutaway, so that every verb has one at once: `tiny-python`."""

from pathlib import Path

HERE = Path(__file__).parent
ABLATIONS = HERE / "ablations.json"
"""What `cutaway ablate take-away --seeds 3` came to: parts taken out of trained weights, and models trained so."""


def shipped() -> list[str]:
    """The names."""
    return sorted(path.name for path in HERE.iterdir() if (path / "config.json").is_file())


def where(name: str) -> Path | None:
    """The directory of the model that has this name, if there is one."""
    return HERE / name if name in shipped() else None
