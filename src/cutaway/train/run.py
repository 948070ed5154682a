"""A run's directory, which describes itself: the recipe, the tokenizer, the logs, the checkpoints, the model."""

import json
from pathlib import Path
from typing import Any

from cutaway.errors import InputError
from cutaway.text import Tokenizer, tokenizer_from_directory
from cutaway.train.origin import Origin
from cutaway.train.recipe import Recipe, recipe

ABOUT = "run.json"
FORMAT = 1


class Run:
    """Where a run keeps what it makes."""

    def __init__(self, directory: Path, recipe: Recipe, fingerprint: str, origin: Origin) -> None:
        self.directory, self.recipe, self.fingerprint, self.origin = directory, recipe, fingerprint, origin

    @classmethod
    def begin(cls, directory: Path, recipe: Recipe, tokenizer: Tokenizer, fingerprint: str, origin: Origin) -> "Run":
        """A new directory; one that exists must be empty."""
        check_new(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(directory / "tokenizer")
        about = {"format": FORMAT, "data": fingerprint, "recipe": recipe.model_dump(mode="json", exclude_none=True)}
        about |= {"origin": origin.as_data()} if origin.config is not None else {}
        draft = directory / f".{ABOUT}"
        draft.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        draft.replace(directory / ABOUT)  # what has it is whole
        return cls(directory, recipe, fingerprint, origin)

    @classmethod
    def open(cls, directory: Path) -> "Run":
        try:
            about: Any = json.loads((directory / ABOUT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(
                f"'{directory}' has no {ABOUT}, so it is no run; give a directory that train made"
            ) from None
        except (OSError, ValueError) as error:
            raise InputError(f"'{directory / ABOUT}' cannot be read: {error}; restore it, or begin anew") from None
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise InputError(f"'{directory / ABOUT}' is of another format than {FORMAT}; update cutaway")
        return cls(directory, recipe(about["recipe"]), str(about["data"]), Origin(**about.get("origin", {})))

    @property
    def tokenizer(self) -> Tokenizer:
        found = tokenizer_from_directory(self.directory / "tokenizer")
        if found is None:
            raise InputError(f"'{self.directory / 'tokenizer'}' holds no tokenizer; restore it, or begin anew")
        return found

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def model(self) -> Path:
        return self.directory / "model"


def check_new(directory: Path) -> None:
    """Nothing is ever written over, but what a run left that was killed before it had begun."""
    begun = {"tokenizer", f".{ABOUT}"}
    if directory.exists() and not directory.is_dir():
        raise InputError(f"'{directory}' is a file, and a run needs a directory; name another")
    if directory.exists() and {each.name for each in directory.iterdir()} - begun:
        raise InputError(f"'{directory}' is not empty; resume what is there with --resume, or name another")
