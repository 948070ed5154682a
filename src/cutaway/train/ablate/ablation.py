"""An ablation from beginning to end: planned, carried out, and its results written down and drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutaway.errors import InputError
from cutaway.train.ablate.budget import BudgetKind
from cutaway.train.ablate.launcher import ProgressFn, run_jobs
from cutaway.train.ablate.plan import AblationPlan, build_plan, combine_variations
from cutaway.train.ablate.plot import plot_results
from cutaway.train.ablate.results import Results, build_findings, compare_to_first, results_to_dict, write_results
from cutaway.train.ablate.studies import STUDIES, Study
from cutaway.train.ablate.vary import parse_variation
from cutaway.train.recipe.load import load_recipe

DEFAULT_NUM_SEEDS = 3


@dataclass(frozen=True)
class Ablation:
    """What is to be done, and where."""

    plan: AblationPlan
    output_dir: Path
    study: Study | None = None

    def run(
        self, *, num_workers: int | None = None, device: str | None = None, on_progress: ProgressFn = lambda *_: None
    ) -> dict[str, Any]:
        """All of it; what was done before is not done again. The same as is in results.json."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        outcomes = run_jobs(self.plan, self.output_dir, num_workers=num_workers, device=device, on_progress=on_progress)
        results = Results(self.plan, outcomes)
        compare = compare_to_first if self.study is None else self.study.compare
        data = results_to_dict(results, build_findings(results, compare(results)))
        write_results(data, self.output_dir)
        plot_results(data, self.output_dir)
        return data


def build_ablation(
    source: Any,
    vary: Sequence[str] = (),
    *,
    output_dir: Path | str | None = None,
    match: BudgetKind | None = None,
    num_seeds: int | None = None,
    overrides: Sequence[str] = (),
) -> Ablation:
    """Variants of a recipe (a shipped one's name, a file, a dict), or a study by its name; 'a.b=value' changes all."""
    named = source if isinstance(source, str) and source in STUDIES else None
    where = Path(output_dir) if output_dir is not None else Path("runs") / f"ablate-{named or _source_name(source)}"
    num_seeds = DEFAULT_NUM_SEEDS if num_seeds is None else num_seeds
    if named is not None:
        if vary or match is not None:
            raise InputError(
                f"the study '{named}' varies what it varies; leave --vary and --match out, or give a recipe"
            )
        study = STUDIES[named]()
        plan = build_plan(
            named,
            load_recipe(study.recipe, overrides),
            study.variants,
            where,
            num_seeds=num_seeds,
            match=study.match,
            measurement=study.measurement,
        )
        return Ablation(plan, where, study)
    specs = combine_variations([parse_variation(each) for each in vary])
    recipe = load_recipe(source, overrides)
    plan = build_plan(_source_name(source), recipe, specs, where, num_seeds=num_seeds, match=match or "tokens")
    return Ablation(plan, where)


def _source_name(source: Any) -> str:
    return Path(source).stem if isinstance(source, str | Path) else "recipe"
