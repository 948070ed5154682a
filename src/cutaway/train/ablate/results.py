"""From what came of each run to what can be said: results.json, from which table and drawings are made."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cutaway.train.ablate.confidence_interval import ConfidenceInterval, mean_confidence_interval, paired_difference
from cutaway.train.ablate.launcher import RunOutcomes
from cutaway.train.ablate.metrics import METRICS
from cutaway.train.ablate.plan import AblationPlan

RESULTS_FILE = "results.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class MetricRef:
    """A metric of a variant: of its whole run, or under one condition."""

    variant: str
    metric: str = "loss"
    condition: str | None = None

    @property
    def label(self) -> str:
        return self.variant if self.condition is None else f"{self.variant}, {self.condition}"


@dataclass(frozen=True)
class Comparison:
    """One thing against another of the same metric; against zero where it is a difference already, or just told."""

    value: MetricRef
    baseline: MetricRef | None = None
    label: str | None = None
    """What the one is called in the sentence."""
    baseline_label: str | None = None
    report_only: bool = False


class Results:
    """What every run came to, by variant and seed."""

    def __init__(self, plan: AblationPlan, outcomes: RunOutcomes) -> None:
        self.plan, self.outcomes = plan, outcomes
        self.variant_names = [variant.name for variant in plan.variants]
        tokenizers = {variant.recipe.data.tokenizer for variant in plan.variants}
        self.metric = "loss" if len(tokenizers) == 1 else "bits_per_byte"
        """Losses a token compare only models with the same tokens."""

    def outcome(self, variant: str, seed: int) -> dict[str, Any]:
        return self.outcomes[variant, seed]

    def failures(self, variant: str) -> list[str]:
        runs = (self.outcome(variant, seed) for seed in self.plan.seeds)
        return [run["failed"] for run in runs if "failed" in run]

    def values_by_seed(self, ref: MetricRef) -> dict[int, float]:
        """By seed, as they are averaged; runs that came to no end have none."""
        scale = METRICS[ref.metric].transform
        found: dict[int, float] = {}
        for seed in self.plan.seeds:
            run = self.outcome(ref.variant, seed)
            rows = [run] if ref.condition is None else run.get("measurements", [])
            for row in rows:
                if ref.metric in row and (ref.condition is None or row["condition"] == ref.condition):
                    found[seed] = scale(row[ref.metric])
        return found

    def confidence_interval(self, ref: MetricRef) -> ConfidenceInterval | None:
        values = self.values_by_seed(ref)
        return mean_confidence_interval(list(values.values())) if values else None

    def compare(self, comparison: Comparison) -> ConfidenceInterval | None:
        if comparison.baseline is None:
            return self.confidence_interval(comparison.value)
        return paired_difference(self.values_by_seed(comparison.value), self.values_by_seed(comparison.baseline))

    def describe(self, comparison: Comparison) -> str | None:
        """What the interval allows to say; None where a run came to no end."""
        found, metric = self.compare(comparison), METRICS[comparison.value.metric]
        if found is None:
            return None
        name = comparison.label or comparison.value.label
        if comparison.report_only:
            alone = ", from one seed: no interval" if found.half_width is None else ""
            return f"{name}: {metric.title} {metric.format_interval(found)}{alone}"
        if comparison.baseline is None:
            return metric.describe_against_zero(name, found)
        return metric.describe_difference(name, comparison.baseline_label or comparison.baseline.label, found)

    def peak_memory(self, variant: str) -> int | None:
        """Bytes of a step; measured from one seed."""
        found = [self.outcome(variant, seed).get("peak_memory") for seed in self.plan.seeds]
        return next((each for each in found if each is not None), None)

    def conditions(self) -> list[str]:
        """What there are measurements of, in order."""
        runs = (run.get("measurements", []) for run in self.outcomes.values())
        return list(dict.fromkeys(row["condition"] for rows in runs for row in rows))


def compare_to_first(results: Results) -> list[Comparison]:
    """Every other variant's loss against the first one's."""
    first = results.variant_names[0]
    return [
        Comparison(MetricRef(name, results.metric), MetricRef(first, results.metric))
        for name in results.variant_names[1:]
    ]


def build_findings(results: Results, comparisons: Iterable[Comparison]) -> list[str]:
    """Sentences, computed from the intervals; what did not come to an end first."""
    said = []
    for name in results.variant_names:
        if failed := results.failures(name):
            said.append(f"{name}: {len(failed)} of {len(results.plan.seeds)} runs came to no end ({failed[0]})")
    return said + [sentence for each in comparisons if (sentence := results.describe(each)) is not None]


def results_to_dict(results: Results, findings: Sequence[str]) -> dict[str, Any]:
    """Everything, in plain values."""
    plan = results.plan
    return {
        "format": FORMAT_VERSION,
        "name": plan.name,
        "match": plan.match,
        "metric": results.metric,
        "seeds": list(plan.seeds),
        "variants": [_variant_row(results, name) for name in results.variant_names],
        "measurements": list(_measurement_rows(results)),
        "findings": list(findings),
        "runs": [{"variant": variant, "seed": seed, **run} for (variant, seed), run in results.outcomes.items()],
    }


def _variant_row(results: Results, name: str) -> dict[str, Any]:
    """One variant, as the table has it."""
    variant = results.plan.variants[results.variant_names.index(name)]
    first, metric = results.variant_names[0], results.metric

    def shown(metric: str) -> dict[str, Any] | None:
        found = results.confidence_interval(MetricRef(name, metric))
        return None if found is None else METRICS[metric].interval_to_dict(found)

    against = None if name == first else results.compare(Comparison(MetricRef(name, metric), MetricRef(first, metric)))
    return {
        "variant": name,
        "changes": list(variant.changes),
        **asdict(variant.cost),
        "failed": len(results.failures(name)),
        metric: shown(metric),
        "difference": None if against is None else METRICS[metric].interval_to_dict(against),
        "seconds": shown("seconds"),
        "step_seconds": shown("step_seconds"),
        "peak_memory": results.peak_memory(name),
    }


def _measurement_rows(results: Results) -> Iterable[dict[str, Any]]:
    for name in results.variant_names:
        for condition in results.conditions():
            for key, metric in METRICS.items():
                found = results.confidence_interval(MetricRef(name, key, condition))
                if found is not None:
                    yield {"variant": name, "condition": condition, "metric": key, **metric.interval_to_dict(found)}


def write_results(data: dict[str, Any], output_dir: Path) -> Path:
    draft, path = output_dir / f".{RESULTS_FILE}", output_dir / RESULTS_FILE
    draft.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
    return path
