"""From what came of each run to what can be said: results.json, from which table and drawings are made."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cutaway.train.ablate.carry_out import Outcomes
from cutaway.train.ablate.metrics import METRICS
from cutaway.train.ablate.plan import Plan
from cutaway.train.ablate.statistics import Interval, interval, paired

RESULTS = "results.json"
FORMAT = 1


@dataclass(frozen=True)
class Point:
    """A metric of a variant: of its whole run, or of one reading."""

    variant: str
    metric: str = "loss"
    what: str | None = None

    @property
    def name(self) -> str:
        return self.variant if self.what is None else f"{self.variant}, {self.what}"


@dataclass(frozen=True)
class Comparison:
    """One thing against another of the same metric; against zero where it is a difference already, or just told."""

    one: Point
    other: Point | None = None
    name: str | None = None
    """What the one is called in the sentence."""
    against: str | None = None
    told: bool = False


class Results:
    """What every run came to, by variant and seed."""

    def __init__(self, plan: Plan, outcomes: Outcomes) -> None:
        self.plan, self.outcomes = plan, outcomes
        self.names = [variant.name for variant in plan.variants]
        tokenizers = {variant.recipe.data.tokenizer for variant in plan.variants}
        self.metric = "loss" if len(tokenizers) == 1 else "bits_per_byte"
        """Losses a token compare only models with the same tokens."""

    def outcome(self, variant: str, seed: int) -> dict[str, Any]:
        return self.outcomes[variant, seed]

    def failed(self, variant: str) -> list[str]:
        runs = (self.outcome(variant, seed) for seed in self.plan.seeds)
        return [run["failed"] for run in runs if "failed" in run]

    def values(self, point: Point) -> dict[int, float]:
        """By seed, as they are averaged; runs that came to no end have none."""
        scale = METRICS[point.metric].scale
        found: dict[int, float] = {}
        for seed in self.plan.seeds:
            run = self.outcome(point.variant, seed)
            rows = [run] if point.what is None else run.get("readings", [])
            for row in rows:
                if point.metric in row and (point.what is None or row["what"] == point.what):
                    found[seed] = scale(row[point.metric])
        return found

    def interval(self, point: Point) -> Interval | None:
        values = self.values(point)
        return interval(list(values.values())) if values else None

    def compare(self, asked: Comparison) -> Interval | None:
        if asked.other is None:
            return self.interval(asked.one)
        return paired(self.values(asked.one), self.values(asked.other))

    def sentence(self, asked: Comparison) -> str | None:
        """What the interval allows to say; None where a run came to no end."""
        found, metric = self.compare(asked), METRICS[asked.one.metric]
        if found is None:
            return None
        name = asked.name or asked.one.name
        if asked.told:
            alone = ", from one seed: no interval" if found.half is None else ""
            return f"{name}: {metric.title} {metric.written(found)}{alone}"
        if asked.other is None:
            return metric.against_zero(name, found)
        return metric.compared(name, asked.against or asked.other.name, found)

    def memory(self, variant: str) -> int | None:
        """Bytes of a step; measured from one seed."""
        found = [self.outcome(variant, seed).get("memory") for seed in self.plan.seeds]
        return next((each for each in found if each is not None), None)

    def whats(self) -> list[str]:
        """What there are readings of, in order."""
        runs = (run.get("readings", []) for run in self.outcomes.values())
        return list(dict.fromkeys(row["what"] for rows in runs for row in rows))


def against_first(results: Results) -> list[Comparison]:
    """Every other variant's loss against the first one's."""
    first = results.names[0]
    return [Comparison(Point(name, results.metric), Point(first, results.metric)) for name in results.names[1:]]


def findings(results: Results, asked: Iterable[Comparison]) -> list[str]:
    """Sentences, computed from the intervals; what did not come to an end first."""
    said = []
    for name in results.names:
        if failed := results.failed(name):
            said.append(f"{name}: {len(failed)} of {len(results.plan.seeds)} runs came to no end ({failed[0]})")
    return said + [sentence for each in asked if (sentence := results.sentence(each)) is not None]


def as_data(results: Results, said: Sequence[str]) -> dict[str, Any]:
    """Everything, in plain values."""
    plan = results.plan
    return {
        "format": FORMAT,
        "name": plan.name,
        "equal": plan.equal,
        "metric": results.metric,
        "seeds": list(plan.seeds),
        "variants": [row(results, name) for name in results.names],
        "readings": list(readings(results)),
        "findings": list(said),
        "runs": [{"variant": variant, "seed": seed, **run} for (variant, seed), run in results.outcomes.items()],
    }


def row(results: Results, name: str) -> dict[str, Any]:
    """One variant, as the table has it."""
    variant = results.plan.variants[results.names.index(name)]
    first, metric = results.names[0], results.metric

    def shown(metric: str) -> dict[str, Any] | None:
        found = results.interval(Point(name, metric))
        return None if found is None else METRICS[metric].data(found)

    against = None if name == first else results.compare(Comparison(Point(name, metric), Point(first, metric)))
    return {
        "variant": name,
        "changed": list(variant.changed),
        **asdict(variant.cost),
        "failed": len(results.failed(name)),
        metric: shown(metric),
        "difference": None if against is None else METRICS[metric].data(against),
        "seconds": shown("seconds"),
        "step_seconds": shown("step_seconds"),
        "memory": results.memory(name),
    }


def readings(results: Results) -> Iterable[dict[str, Any]]:
    for name in results.names:
        for what in results.whats():
            for key, metric in METRICS.items():
                found = results.interval(Point(name, key, what))
                if found is not None:
                    yield {"variant": name, "what": what, "metric": key, **metric.data(found)}


def write(data: dict[str, Any], out: Path) -> Path:
    draft, path = out / f".{RESULTS}", out / RESULTS
    draft.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
    return path
