"""Query: losses of the shipped ablation study, with a component ablated after training or left out in training."""

import json
from functools import cache
from typing import Any

from cutaway.pretrained import ABLATIONS_FILE
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult
from cutaway.train.ablate.studies import FULL_MODEL

BASELINE = "baseline"
ABLATION_PAIRS = (
    ("skip", "one block fewer", "without a middle block", "one block fewer", BASELINE),
    ("swap", "FFN before attention", "FFN before attention", "FFN before attention", BASELINE),
    ("final_norm", "no final norm", "without the final norm", "no final norm", BASELINE),
    ("positions", "no positions", "without positions", "no positions", BASELINE),
    ("head", "one head fewer", "without the most important head of a middle block", "one head fewer", BASELINE),
    ("mask", "no mask", "without mask", "no mask", "with the mask"),
)
"""Rows of five names: the edit on the page, the component, the condition in which the full model is measured with the
component ablated, the variant trained without the component, and the condition in which that variant is measured."""
NOT_RETRAINED = ("no_residual", "no residual")


class AblationResults(Query):
    """Losses of a trained model with a component ablated, beside losses of models trained without that component."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        return QueryResult(_pair_ablated_and_retrained(load_ablation_results()))


@cache
def load_ablation_results() -> dict[str, Any]:
    return json.loads(ABLATIONS_FILE.read_text(encoding="utf-8"))


def _pair_ablated_and_retrained(results: dict[str, Any]) -> dict[str, object]:
    """Return for each component the loss with the component ablated, and the loss after training without it.

    Both losses are measured on the same text and have confidence intervals over seeds.
    """
    losses = {(row["variant"], row["condition"]): row for row in results["measurements"] if row["metric"] == "loss"}

    def loss_interval(variant: str, condition: str) -> dict[str, float]:
        row = losses[variant, condition]
        return {name: row[name] for name in ("mean", "half_width", "count")}

    rows: list[dict[str, object]] = []
    for edit, component, ablated_condition, variant, condition in ABLATION_PAIRS:
        ablated, retrained = loss_interval(FULL_MODEL, ablated_condition), loss_interval(variant, condition)
        rows.append({"edit": edit, "component": component, "ablated": ablated, "retrained": retrained})
    edit, component = NOT_RETRAINED
    rows.append({"edit": edit, "component": component, "ablated": None, "retrained": None})
    model, training = results["recipe"]["model"], results["recipe"]["training"]
    return {
        "baseline": loss_interval(FULL_MODEL, BASELINE),
        "rows": rows,
        "unmasked_loss": loss_interval("no mask", BASELINE),
        "seeds": results["seeds"],
        "layers": model["decoder"]["layers"],
        "d_model": model["d_model"],
        "max_steps": training["max_steps"],
        "command": results["command"],
        "findings": results["findings"],
    }
