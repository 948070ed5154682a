"""Reward functions of a recipe: load them from the user's Python files, and call them with checks of their results."""

import importlib.util
import inspect
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from cutaway.errors import ConfigError, InputError
from cutaway.train.recipe.grpo import RewardFunctionConfig
from cutaway.train.rollouts.builtin_rewards import BUILTIN_REWARDS

GIVEN_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of a reward function besides the columns of the records."""
CONFIG_FILES = ("cutaway.json", "adapter_config.json", "run.json")
WEIGHT_FILES = ("*.safetensors", "*.gguf")
"""Files of a model or run directory, from which no code is loaded."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its weight, and the arguments that it accepts."""

    name: str
    function: Callable[..., Any]
    weight: float
    parameters: tuple[str, ...]
    required: tuple[str, ...]
    accepts_all: bool
    """Whether the function has **kwargs."""

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise InputError if the function has a parameter without default that no record has as a column."""
        available = {*GIVEN_ARGUMENTS, *columns}
        missing = [name for name in self.required if name not in available]
        if missing:
            near = get_close_matches(missing[0], available, n=1)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
            raise InputError(
                f"reward function {self.name} has the parameter '{missing[0]}'{hint}, but the records have the columns"
                f" {', '.join(sorted(columns)) or '(none)'}; rename the parameter, or add the column to the data"
            )

    def __call__(
        self,
        prompts: Sequence[object],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[object]],
    ) -> list[float]:
        """One reward per completion. NaN stands for None, i.e. for a completion that the function does not reward."""
        arguments = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        if not self.accepts_all:
            arguments = {name: value for name, value in arguments.items() if name in self.parameters}
        try:
            rewards = self.function(**arguments)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise InputError(
                f"reward function {self.name} raised {type(error).__name__}: {error} ({frame.filename} line"
                f" {frame.lineno}); it must return a number for every completion, also for an empty or wrong one"
            ) from error
        return self._check_rewards(rewards, completions)

    def _check_rewards(self, rewards: object, completions: Sequence[str]) -> list[float]:
        values = rewards.tolist() if hasattr(rewards, "tolist") else rewards
        if not isinstance(values, list | tuple):
            raise InputError(
                f"reward function {self.name} returned a {type(rewards).__name__}, but a list with one number per"
                " completion is needed; return a list"
            )
        if len(values) != len(completions):
            raise InputError(
                f"reward function {self.name} returned {len(values)} rewards for {len(completions)} completions;"
                " return one number per completion, in their order"
            )
        return [self._check_reward(value, text) for value, text in zip(values, completions, strict=True)]

    def _check_reward(self, value: object, completion: str) -> float:
        if value is None:
            return math.nan
        try:
            reward = float(value)  # type: ignore[arg-type]  # NumPy and torch scalars have __float__ too
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise InputError(
                f"reward function {self.name} returned {value!r:.80} for the completion {completion!r:.80}; return a"
                " finite number, or None to exclude a completion"
            )
        return reward


def load_reward_functions(rewards: Sequence[RewardFunctionConfig]) -> list[RewardFunction]:
    """Load the reward functions of a recipe. Each has a different name, which is also that of its metric."""
    loaded = [_load(reward) for reward in rewards]
    names = [each.name for each in loaded]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"objective.reward has two functions named '{twice[0]}', whose metrics could not be told apart; rename one"
        )
    return loaded


def compute_rewards(
    functions: Sequence[RewardFunction],
    prompts: Sequence[object],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[object]],
) -> Float64[Tensor, "N F"]:
    """Rewards of each completion by function. NaN: the function does not reward the completion."""
    rewards = [function(prompts, completions, completion_ids, columns) for function in functions]
    return torch.tensor(rewards, dtype=torch.float64).T.reshape(len(completions), len(functions))


def _load(reward: RewardFunctionConfig) -> RewardFunction:
    path, separator, name = reward.function.rpartition(":")
    function = _load_from_file(Path(path).expanduser(), name) if separator else _load_builtin(name)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        parameters = inspect.signature(lambda completions, **kwargs: None).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return RewardFunction(
        name,
        function,
        reward.weight,
        tuple(each.name for each in named),
        tuple(each.name for each in named if each.default is each.empty),
        any(each.kind is each.VAR_KEYWORD for each in parameters),
    )


def _load_builtin(name: str) -> Callable[..., Any]:
    if name in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[name]
    if name.endswith(".py"):
        raise ConfigError(
            f"objective.reward '{name}' names a file, but not a function in it; write '{name}:FUNCTION', e.g."
            f" '{name}:reward'"
        )
    near = get_close_matches(name, BUILTIN_REWARDS, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise ConfigError(
        f"objective.reward '{name}' is not a built-in reward{hint}; use one of {', '.join(BUILTIN_REWARDS)}, or a"
        " function of yours as 'rewards.py:FUNCTION'"
    )


def _is_model_directory(directory: Path, file: Path) -> bool:
    """Whether a directory above a file is the directory of a model or a run.

    Weights without a configuration, as a download leaves them in a home directory, say this of the directory
    that has both the weights and the file, and not of all directories below. A .gguf file may also be in the
    directory in which the user works.
    """
    if any((directory / name).exists() for name in CONFIG_FILES):
        return True
    if directory != file.parent and not (directory / "config.json").exists():
        return False
    is_workplace = Path.cwd().is_relative_to(directory)
    return any(any(directory.glob(weights)) for weights in WEIGHT_FILES if not (is_workplace and weights == "*.gguf"))


def _load_from_file(path: Path, name: str) -> Callable[..., Any]:
    """Run a Python file of the user, and return a function of it."""
    where = f"objective.reward '{path}:{name}'"
    if not path.is_file():
        near = sorted(str(each) for each in path.parent.glob("*.py")) if path.parent.is_dir() else []
        hint = f" (there is {', '.join(near[:3])})" if near else ""
        raise ConfigError(f"{where}: there is no file '{path}'{hint}; pass the path of a Python file")
    file = path.resolve()
    marked = [each for each in file.parents if _is_model_directory(each, file)]
    if marked:
        raise ConfigError(
            f"{where}: the file is in '{marked[0]}', a model or run directory, and code is never loaded from these;"
            " check the file, and move it to a directory of yours"
        )
    spec = importlib.util.spec_from_file_location(f"cutaway_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: '{path}' is not a Python file; pass a file whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"{where}: the file cannot be loaded, because it raised {type(error).__name__}: {error}; fix it"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        near = get_close_matches(name, functions, n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise ConfigError(
            f"{where}: the file has no function '{name}'{hint}; use one of {', '.join(functions) or '(none)'}"
        )
    return function
