"""Weights & Biases logger of a run's metrics."""

import secrets
from pathlib import Path
from typing import Any

from cutaway.errors import InputError
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.logging.tensorboard import iter_scalars
from cutaway.train.recipe.schema import WandbConfig


def check_wandb_installed() -> None:
    """Raise InputError if wandb is not installed. Called before a run starts, not after its first step."""
    from importlib.util import find_spec

    spec = find_spec("wandb")
    if spec is None or spec.origin is None:  # without an origin, it is a directory `wandb` with the files of runs
        raise InputError(
            "logging.wandb needs the package wandb, which is not installed; pip install 'cutaway[wandb]', or remove the"
            " setting"
        )


class WandbLogger:
    """Writes metrics to Weights & Biases. A resumed run continues the run with the id in wandb/run_id.

    The x-axis is the metric `step`, because wandb drops rows of steps that a resumed run repeats from its own step.
    """

    def __init__(self, config: WandbConfig, directory: Path, recipe: dict[str, Any]) -> None:
        self.config, self.directory, self.recipe = config, directory, recipe
        self.run: Any = None

    def log(self, metrics: Metrics) -> None:
        if self.run is None:  # the run is created with the first row
            self.run = self._init_run()
        row: dict[str, object] = dict(iter_scalars(metrics))
        if "sample" in metrics:
            row["eval/sample"] = metrics["sample"]
        if row:
            self.run.log(row | {"step": metrics["step"]})

    def _init_run(self) -> Any:
        import wandb

        id_file = self.directory / "wandb" / "run_id"
        id_file.parent.mkdir(exist_ok=True)
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        run = wandb.init(
            project=self.config.project,
            name=self.config.name or self.directory.name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(self.directory),
            config=self.recipe,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def flush(self) -> None:
        """Do nothing: wandb writes in a process of its own."""

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
