"""An ablation from beginning to end: planned, carried out, and its results written down and drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutaway.errors import InputError
from cutaway.train.ablate import results as told_results
from cutaway.train.ablate.carry_out import Told, carry_out
from cutaway.train.ablate.equal import Equal
from cutaway.train.ablate.plan import Plan, combinations, make
from cutaway.train.ablate.plot import draw
from cutaway.train.ablate.results import Results, against_first
from cutaway.train.ablate.studies import STUDIES, Study
from cutaway.train.ablate.varying import varied
from cutaway.train.recipe import recipe as read_recipe

SEEDS = 3


@dataclass(frozen=True)
class Ablation:
    """What is to be done, and where."""

    plan: Plan
    out: Path
    study: Study | None = None

    def carry_out(
        self, *, jobs: int | None = None, device: str | None = None, told: Told = lambda *_: None
    ) -> dict[str, Any]:
        """All of it; what was done before is not done again. The same as is in results.json."""
        self.out.mkdir(parents=True, exist_ok=True)
        outcomes = carry_out(self.plan, self.out, jobs=jobs, device=device, told=told)
        results = Results(self.plan, outcomes)
        compare = against_first if self.study is None else self.study.compare
        data = told_results.as_data(results, told_results.findings(results, compare(results)))
        told_results.write(data, self.out)
        draw(data, self.out)
        return data


def ablation(
    source: Any,
    vary: Sequence[str] = (),
    *,
    out: Path | str | None = None,
    equal: Equal | None = None,
    seeds: int | None = None,
    changes: Sequence[str] = (),
) -> Ablation:
    """Variants of a recipe (a shipped one's name, a file, a dict), or a study by its name; 'a.b=value' changes all."""
    named = source if isinstance(source, str) and source in STUDIES else None
    where = Path(out) if out is not None else Path("runs") / f"ablate-{named or called(source)}"
    how: Any = {"seeds": SEEDS if seeds is None else seeds}
    if named is not None:
        if vary or equal is not None:
            raise InputError(
                f"the study '{named}' varies what it varies; leave --vary and --equal out, or give a recipe"
            )
        study = STUDIES[named]()
        how |= {"equal": study.equal, "measure": study.measure}
        return Ablation(make(named, read_recipe(study.recipe, changes), study.variants, where, **how), where, study)
    asked = combinations([varied(each) for each in vary])
    recipe = read_recipe(source, changes)
    return Ablation(make(called(source), recipe, asked, where, equal=equal or "tokens", **how), where)


def called(source: Any) -> str:
    return Path(source).stem if isinstance(source, str | Path) else "recipe"
