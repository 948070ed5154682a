"""Results of an ablation: confidence intervals, comparisons and findings, written to results.json."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cutaway.evaluate.confidence_interval import ConfidenceInterval, mean_confidence_interval, paired_difference
from cutaway.train.ablate.launcher import RunOutcomes
from cutaway.train.ablate.metrics import METRICS, IntervalTable
from cutaway.train.ablate.plan import AblationPlan

RESULTS_FILE = "results.json"
FORMAT_VERSION = 1
ResultsTable = dict[str, Any]
"""Contents of results.json."""


@dataclass(frozen=True)
class MetricRef:
    """Reference to a metric of a variant. `condition` is the condition of a measurement, e.g. 'trained', or None."""

    variant: str
    metric: str = "loss"
    condition: str | None = None

    @property
    def label(self) -> str:
        return self.variant if self.condition is None else f"{self.variant}, {self.condition}"


@dataclass(frozen=True)
class Comparison:
    """Comparison of a value with a baseline of the same metric.

    Without a baseline, the value is compared with zero or, if `report_only` is set, only reported.
    """

    value: MetricRef
    baseline: MetricRef | None = None
    label: str | None = None
    """Name of the value in the sentence about the comparison."""
    baseline_label: str | None = None
    report_only: bool = False


class Results:
    """Outcomes of all runs by variant and seed."""

    def __init__(self, plan: AblationPlan, outcomes: RunOutcomes) -> None:
        self.plan, self.outcomes = plan, outcomes
        self.variant_names = [variant.name for variant in plan.variants]
        tokenizers = {variant.recipe.data.tokenizer for variant in plan.variants}
        self.metric = "loss" if len(tokenizers) == 1 else "bits_per_byte"
        """Metric by which variants are compared: loss, or bits per byte if variants have different tokenizers, because
        losses per token are comparable only with the same tokenizer."""

    def failures(self, variant: str) -> list[str]:
        """Error messages of the failed runs of a variant."""
        runs = (self.outcomes[variant, seed] for seed in self.plan.seeds)
        return [run["failed"] for run in runs if "failed" in run]

    def values_by_seed(self, ref: MetricRef) -> dict[int, float]:
        """Values of a metric by seed, as returned by `Metric.transform`. Seeds whose run failed are left out."""
        transform = METRICS[ref.metric].transform
        values: dict[int, float] = {}
        for seed in self.plan.seeds:
            run = self.outcomes[ref.variant, seed]
            rows = [run] if ref.condition is None else run.get("measurements", [])
            for row in rows:
                if ref.metric in row and (ref.condition is None or row["condition"] == ref.condition):
                    values[seed] = transform(row[ref.metric])
        return values

    def confidence_interval(self, ref: MetricRef) -> ConfidenceInterval | None:
        values = self.values_by_seed(ref)
        return mean_confidence_interval(list(values.values())) if values else None

    def compare(self, comparison: Comparison) -> ConfidenceInterval | None:
        if comparison.baseline is None:
            return self.confidence_interval(comparison.value)
        return paired_difference(self.values_by_seed(comparison.value), self.values_by_seed(comparison.baseline))

    def describe(self, comparison: Comparison) -> str | None:
        """Sentence about a comparison. None if there is no seed for which all compared runs succeeded."""
        interval, metric = self.compare(comparison), METRICS[comparison.value.metric]
        if interval is None:
            return None
        name = comparison.label or comparison.value.label
        if comparison.report_only:
            note = " (one seed, no interval)" if interval.half_width is None else ""
            return f"{name}: {metric.title} {metric.format_interval(interval)}{note}"
        if comparison.baseline is None:
            return metric.describe_against_zero(name, interval)
        return metric.describe_difference(name, comparison.baseline_label or comparison.baseline.label, interval)

    def peak_memory(self, variant: str) -> int | None:
        """Peak memory of a training step of a variant in bytes, measured with one seed. None if not measured."""
        values = [self.outcomes[variant, seed].get("peak_memory") for seed in self.plan.seeds]
        return next((value for value in values if value is not None), None)

    def conditions(self) -> list[str]:
        """Names of the conditions under which the trained models were measured, in the order of measurement."""
        runs = (run.get("measurements", []) for run in self.outcomes.values())
        return list(dict.fromkeys(row["condition"] for rows in runs for row in rows))


def compare_to_first(results: Results) -> list[Comparison]:
    """Comparisons of each later variant with the first variant, by `results.metric` (loss or bits per byte)."""
    first = results.variant_names[0]
    return [
        Comparison(MetricRef(name, results.metric), MetricRef(first, results.metric))
        for name in results.variant_names[1:]
    ]


def build_findings(results: Results, comparisons: Iterable[Comparison]) -> list[str]:
    """Sentences about the results: first about failed runs, then about the comparisons."""
    findings = []
    for name in results.variant_names:
        if failures := results.failures(name):
            findings.append(f"{name}: {len(failures)} of {len(results.plan.seeds)} runs failed ({failures[0]})")
    return findings + [sentence for comparison in comparisons if (sentence := results.describe(comparison)) is not None]


def results_to_dict(results: Results, findings: Sequence[str]) -> ResultsTable:
    """Contents of results.json."""
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


def _variant_row(results: Results, name: str) -> dict[str, object]:
    """Row of a variant in the table `variants` of results.json."""
    variant = results.plan.variants[results.variant_names.index(name)]
    first, metric = results.variant_names[0], results.metric

    def interval(metric: str, baseline: MetricRef | None = None) -> IntervalTable | None:
        value = results.compare(Comparison(MetricRef(name, metric), baseline))
        return None if value is None else METRICS[metric].interval_to_dict(value)

    baseline = MetricRef(first, metric)
    return {
        "variant": name,
        "changes": list(variant.changes),
        **asdict(variant.cost),
        "failed": len(results.failures(name)),
        metric: interval(metric),
        "difference": None if name == first else interval(metric, baseline),
        "seconds": interval("seconds"),
        "step_seconds": interval("step_seconds"),
        "peak_memory": results.peak_memory(name),
    }


def _measurement_rows(results: Results) -> Iterable[dict[str, object]]:
    for name in results.variant_names:
        for condition in results.conditions():
            for key, metric in METRICS.items():
                interval = results.confidence_interval(MetricRef(name, key, condition))
                if interval is not None:
                    yield {"variant": name, "condition": condition, "metric": key, **metric.interval_to_dict(interval)}
