"""Ablations: build a plan, run its training runs, write and plot the results."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cutaway.errors import InputError
from cutaway.train.ablate.budget import BudgetKind
from cutaway.train.ablate.launcher import ProgressFn, run_jobs
from cutaway.train.ablate.plan import AblationPlan, build_plan, combine_variations
from cutaway.train.ablate.plot import plot_results
from cutaway.train.ablate.results import (
    RESULTS_FILE,
    Results,
    ResultsTable,
    build_findings,
    compare_to_first,
    results_to_dict,
)
from cutaway.train.ablate.studies import STUDIES, Study
from cutaway.train.ablate.vary import parse_variation
from cutaway.train.recipe.load import RecipeSource, load_recipe
from cutaway.user_files import write_text_atomically

DEFAULT_NUM_SEEDS = 3


@dataclass(frozen=True)
class Ablation:
    """An ablation plan, and the directory for runs and results. `study` is None for variants given by `vary`."""

    plan: AblationPlan
    output_dir: Path
    study: Study | None = None

    def run(
        self, *, num_workers: int | None = None, device: str | None = None, on_progress: ProgressFn = lambda *_: None
    ) -> ResultsTable:
        """Run all training runs that are not finished, write results.json and plots, and return the results."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        outcomes = run_jobs(self.plan, self.output_dir, num_workers=num_workers, device=device, on_progress=on_progress)
        results = Results(self.plan, outcomes)
        compare = compare_to_first if self.study is None else self.study.compare
        data = results_to_dict(results, build_findings(results, compare(results)))
        write_text_atomically(self.output_dir / RESULTS_FILE, json.dumps(data, indent=1) + "\n")
        plot_results(data, self.output_dir)
        return data


def build_ablation(
    source: RecipeSource,
    vary: Sequence[str] = (),
    *,
    output_dir: Path | str | None = None,
    match: BudgetKind | None = None,
    num_seeds: int | None = None,
    overrides: Sequence[str] = (),
) -> Ablation:
    """Build an ablation from a recipe (a preset name, a file, a dict) and `vary`, or from the name of a study.

    Each item of `vary` is 'KEY=a,b', and each override is 'key=value'. Overrides apply to all variants.
    """
    study = STUDIES[source]() if isinstance(source, str) and source in STUDIES else None
    name = Path(source).stem if isinstance(source, str | Path) else "recipe"
    if study is not None and (vary or match is not None):
        raise InputError(f"the study '{name}' has its own variants and budget; leave out --vary and --match")
    output_dir = Path("runs") / f"ablate-{name}" if output_dir is None else Path(output_dir)
    plan = build_plan(
        name,
        load_recipe(source if study is None else study.recipe, overrides),
        combine_variations([parse_variation(text) for text in vary]) if study is None else study.variants,
        output_dir,
        num_seeds=DEFAULT_NUM_SEEDS if num_seeds is None else num_seeds,
        match=match or ("tokens" if study is None else study.match),
        measurement=None if study is None else study.measurement,
    )
    return Ablation(plan, output_dir, study)
