"""What a change does: the same text in the model as it is and in the changed one, and what was trained that way."""

import json
import math
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.lens.readings.ablation import BEST
from cutaway.measure import equations
from cutaway.model import EncoderOnly
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.kept import Kept
from cutaway.serve.inspect.question import OfText, Place, Question
from cutaway.serve.inspect.wire import Answer
from cutaway.shipped import ABLATIONS
from cutaway.train.ablate.studies import WHOLE

ROWS = 32
"""Tokens whose logits are made at once: of a large vocabulary, whole texts would take gigabytes."""
COMPARED: WeakKeyDictionary[Kept, dict[str, Any]] = WeakKeyDictionary()
"""What was worked out for passes that are kept, as long as they are."""
AS_IS = "as it is"


class Broken(OfText):
    """What a token would say before and after, how long the stream is; then every token's KL and loss, as they come."""

    at: Place

    def answer(self, of: Inspector, job: Job) -> Answer:
        plain, changed = of.kept(self.look.plain, job), of.kept(self.look, job)
        names = points(of)
        lengths = {
            "norms_before": torch.stack([plain[name].float().norm(dim=-1) for name in names]),
            "norms_after": torch.stack([changed[name].float().norm(dim=-1) for name in names]),
        }
        facts: dict[str, Any] = {"points": names}
        if getattr(of.model, "head", None) is None:
            return Answer(facts, lengths)
        at = min(self.at, len(self.look.tokens) - 1)
        facts["top"] = both_tops(of, said(of, plain, at, at + 1)[0], said(of, changed, at, at + 1)[0])
        if changed not in COMPARED:
            job.part(Answer(facts, lengths))
            COMPARED[changed] = compared(of, plain, changed, job)
        told = COMPARED[changed]
        return Answer(facts | told["facts"], lengths | told["arrays"])


def points(of: Inspector) -> list[str]:
    """Of the stream that becomes logits: behind the embedding and each block."""
    prefix = "decoder." if len(of.model.stacks) > 1 else ""
    return [name for name in of.sites if name == f"{prefix}embed" or is_behind(name, prefix)]


def is_behind(name: str, prefix: str) -> bool:
    return name.startswith(f"{prefix}blocks.") and name.endswith(".resid_post")


def said(of: Inspector, kept: Kept, low: int, high: int) -> Tensor:
    """Logits of some tokens, (n, V)."""
    prefix = "decoder." if len(of.model.stacks) > 1 else ""
    return of.logits(kept.values[f"{prefix}final_norm"][:, low:high])[0]


def both_tops(of: Inspector, before: Tensor, after: Tensor) -> list[dict[str, Any]]:
    """The likeliest five of each, with both shares: exact, over the whole vocabulary."""
    shares = before.softmax(-1), after.softmax(-1)
    count = min(BEST, len(before))
    best = [each.topk(count).indices.tolist() for each in shares]
    every = dict.fromkeys(best[0] + best[1])
    return [
        {
            "token": token,
            "text": of.words.of(token),
            "before": finite(shares[0][token]),
            "after": finite(shares[1][token]),
            "rank_before": best[0].index(token) if token in best[0] else None,
            "rank_after": best[1].index(token) if token in best[1] else None,
        }
        for token in every
    ]


def compared(of: Inspector, plain: Kept, changed: Kept, job: Job) -> dict[str, Any]:
    """KL and loss by token, slice by slice; what `lens.readings.ablation` averages."""
    tokens = torch.tensor(plain.look.tokens, device=of.model.device)
    length = len(tokens)
    next_ones = not isinstance(of.model, EncoderOnly) and length > 1
    found: dict[str, list[Tensor]] = {"kl": [], "kept": [], "loss_before": [], "loss_after": []}
    for low in range(0, length, ROWS):
        high = min(low + ROWS, length)
        job.progress(low, length, "comparing what is said")
        before, after = said(of, plain, low, high), said(of, changed, low, high)
        told, was = after.log_softmax(-1), before.log_softmax(-1)
        kl = equations.kl(was.exp(), was, told)
        count = min(BEST, before.shape[-1])
        mine, theirs = after.topk(count).indices, before.topk(count).indices
        found["kl"].append(kl)
        found["kept"].append((mine[:, :, None] == theirs[:, None, :]).any(-1).float().mean(-1))
        if next_ones:
            targets = tokens[low + 1 : high + 1]
            found["loss_before"].append(F.nll_loss(was[: len(targets)], targets, reduction="none"))
            found["loss_after"].append(F.nll_loss(told[: len(targets)], targets, reduction="none"))
        job.part(Answer({"from": low}, {"kl": kl}))
    arrays = {name: torch.cat(each) for name, each in found.items() if each}
    facts = {name: finite(each.mean()) for name, each in arrays.items()}
    return {"facts": {"loss_before": None, "loss_after": None} | facts, "arrays": arrays}


def finite(value: Tensor) -> float | None:
    """JSON has no other numbers."""
    number = float(value)
    return number if math.isfinite(number) else None


PAIRS = (
    ("skip", "a block fewer", "without a middle block", "a block fewer", AS_IS),
    ("swap", "FFN first", "FFN first", "FFN first", AS_IS),
    ("final_norm", "no final norm", "without the final norm", "no final norm", AS_IS),
    ("positions", "no positions", "without positions", "no positions", AS_IS),
    ("head", "a head fewer", "without a middle block's greatest head", "a head fewer", AS_IS),
    ("mask", "no mask", "without mask", "no mask", "with the mask"),
)
"""What is taken away: a sign for it, its name, the reading of surgery, the variant that was trained so, its reading."""
NOT_TRAINED = (("no_residual", "no residual"),)


class Trained(Question):
    """Parts taken out of trained weights, beside models trained without them: results that come with cutaway."""

    def answer(self, of: Inspector, job: Job) -> Answer:
        return Answer(side_by_side(shipped_results()))


@cache
def shipped_results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ABLATIONS.read_text(encoding="utf-8"))
    return found


def side_by_side(results: dict[str, Any]) -> dict[str, Any]:
    """Both losses of each part, on the same text, with their intervals over seeds."""
    losses = {(row["variant"], row["what"]): row for row in results["readings"] if row["metric"] == "loss"}

    def told(variant: str, what: str) -> dict[str, Any]:
        row = losses[variant, what]
        return {name: row[name] for name in ("mean", "half", "count")}

    rows: list[dict[str, Any]] = [
        {"sign": sign, "part": part, "surgery": told(WHOLE, cut), "trained": told(variant, what)}
        for sign, part, cut, variant, what in PAIRS
    ]
    rows += [{"sign": sign, "part": part, "surgery": None, "trained": None} for sign, part in NOT_TRAINED]
    model, training = results["recipe"]["model"], results["recipe"]["training"]
    return {
        "whole": told(WHOLE, AS_IS),
        "rows": rows,
        "leak": told("no mask", AS_IS),
        "seeds": results["seeds"],
        "layers": model["decoder"]["layers"],
        "d_model": model["d_model"],
        "steps": training["steps"],
        "command": results["command"],
        "findings": results["findings"],
    }
