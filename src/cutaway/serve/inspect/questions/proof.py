"""The proofs beside the picture, each as the largest difference found; and where a token's attention comes from."""

import torch
from torch import Tensor

from cutaway.lens.equations import is_added, only_adds
from cutaway.lens.pattern import given
from cutaway.model import EncoderDecoder, EncoderOnly
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.kept import Kept
from cutaway.serve.inspect.question import OfText, Place
from cutaway.serve.inspect.questions.stage import final, of_attention
from cutaway.serve.inspect.wire import Answer

STEPS = 16
"""Tokens at the end of a text that are read one by one; those before them are read at once."""


class Glance(OfText):
    """For each layer, how much a token takes from each other one: its row of the pattern, averaged over heads."""

    at: Place

    def answer(self, of: Inspector, job: Job) -> Answer:
        kept = of.with_values(self.look, [name for name in of.sites if name.endswith(".q")], job)
        at = of.place(self.look, self.at)
        rows: dict[str, list[Tensor]] = {"attn": [], "cross": []}
        writer = of.writer
        with of.alone, torch.no_grad():
            for name in kept.calls:
                if of.sites[f"{name}.q"].stack is writer:
                    row = of_attention(kept, f"{name}.pattern", at)[0].mean(0)
                    rows[name.rsplit(".", 1)[-1]].append(row)
        return Answer({}, {kind: torch.stack(found) for kind, found in rows.items() if found})


class Proof(OfText):
    """embedding + Σ additions = stream; rows of patterns sum to 1; with a cache = without."""

    def answer(self, of: Inspector, job: Job) -> Answer:
        kept = of.with_values(self.look, [name for name in of.sites if name.endswith(".q")], job)
        job.progress(0, 3, "adding up the stream")
        sums = [apart for stack in of.model.stacks.values() if (apart := sum_apart(of, kept, stack)) is not None]
        job.progress(1, 3, "adding up attention")
        rows = rows_apart(of, kept, job)
        job.progress(2, 3, "reading again, token after token")
        steps = steps_apart(of, kept, job)
        whole = len(sums) == len(of.model.stacks)
        return Answer(
            {
                "sum": max(sums) if whole else None,
                "rows": rows,
                "steps": steps[0],
                "logit": steps[1],
                "eps": torch.finfo(of.model.dtype).eps,
            }
        )


def sum_apart(of: Inspector, kept: Kept, stack: object) -> float | None:
    """Over all tokens, relative to the stream; None where norms stand on the stream, which is then no sum."""
    own = [name for name, site in of.sites.items() if site.stack is stack]
    blocks = of.sites[own[0]].stack
    assert blocks is not None
    if kept.look.edits or not all(only_adds(block) for block in blocks.blocks):
        return None
    total = kept[next(name for name in own if name.endswith("embed"))]
    for name in own:
        total = total + kept[name] if is_added(name) else total
    last = kept[next(name for name in reversed(own) if name.endswith("resid_post"))]
    return float((total - last).abs().max() / last.abs().max().clamp(min=1e-30))


def rows_apart(of: Inspector, kept: Kept, job: Job) -> float | None:
    """Of all patterns, made layer by layer; None where sinks take a share everywhere."""
    worst = None
    with of.alone, torch.no_grad():
        for name, (_, args) in kept.calls.items():
            job.check()
            if given(args)[-1] is None:
                apart = float((kept.seen(name).pattern().float().sum(-1) - 1).abs().max())
                worst = apart if worst is None else max(worst, apart)
    return worst


def steps_apart(of: Inspector, kept: Kept, job: Job) -> tuple[float | None, float | None]:
    """The last tokens' logits, each in a step of its own with a cache, against one pass; and the largest logit."""
    look, model = kept.look, of.model
    if isinstance(model, EncoderOnly) or getattr(model, "head", None) is None:
        return None, None
    tokens = torch.tensor([look.tokens], device=model.device)
    source = None if look.source is None else torch.tensor([look.source], device=model.device)
    length = tokens.shape[1]
    alone = max(1, length - STEPS)
    whole = of.logits(kept[final(of)][alone - 1 :])
    worst, cache = 0.0, model.new_cache(1, length)
    for at in range(alone - 1, length):
        job.check()
        with of.changed(look):  # between steps others may ask
            piece = tokens[:, :alone] if at == alone - 1 else tokens[:, at : at + 1]
            first = source if at == alone - 1 else None
            given_now = (first, piece) if isinstance(model, EncoderDecoder) else (piece,)
            said = model(*given_now, cache=cache)[0, -1].float()
            worst = max(worst, float((said - whole[at - alone + 1]).abs().max()))
    return worst, float(whole.abs().max())
