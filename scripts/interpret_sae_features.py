"""Train a sparse autoencoder on the model tiny-english, and test three of its features by edits.

python scripts/interpret_sae_features.py [--directory DIR] [--json FILE]

1. The model writes stories (temperature 1, fixed seeds). Stories of odd number are held out.
2. The activations after block 2 are collected, and a TopK autoencoder is trained on them.
3. For each of the CLASSES of next tokens, one feature is selected: the one whose activity on the training stories
   agrees best (F1) with the class being next. The classes were chosen with an autoencoder of other stories, before.
4. On the held-out stories, the feature is set to its mean where it is not active, and set to zero where it is. The
   measured effect is the change of log p(class), in nats, with a 95 % interval over stories. The control is the mean of
   the same edits of random features, scaled to the same activation.

A feature is confirmed if both effects have the predicted sign and exceed those of the control, with their intervals.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import cutaway as ct
from cutaway.evaluate.confidence_interval import ConfidenceInterval, mean_confidence_interval
from cutaway.lens.activations import ActivationDataset, collect_activations
from cutaway.lens.sae import (
    SAEConfig,
    SparseAutoencoder,
    attach_sae,
    evaluate_sae,
    feature_report,
    load_sae,
    save_sae,
    train_sae,
)

SITE = "blocks.2.resid_post"
PROMPTS = ("Once upon a time", "One day,", "Tom and", "Lily")
STORIES_PER_PROMPT, STORY_TOKENS = 96, 140
CONFIG = SAEConfig("topk", d_in=256, d_sae=1024, k=16, site=SITE)
NUM_STEPS, LR, SEED = 400, 2e-3, 0
NUM_TEST_STORIES, TEST_TOKENS = 64, 64
"""Number of held-out stories in which features are edited, and the number of their first tokens that are used."""
MAX_POSITIONS = 3
"""Maximum number of positions of each story at which a feature is edited."""
NUM_CONTROLS = 3
CLASSES = {
    "names of persons": "Lily Tim Timmy Tom Max Sue Mia Sam Ben Anna Lucy Sara Jack Jane Emma Amy Mary Bob",
    "members of the family": "mom mommy dad daddy mother father brother sister grandma grandpa parents family",
    "speech verbs": "said asked replied shouted cried answered told yelled",
    "places": "park house forest garden beach store room kitchen yard tree school farm zoo",
    "animals": "dog cat bird bunny rabbit bear fish mouse duck frog squirrel lion",
    "female pronouns": "she her",
}
"""Classes of next tokens. All are reported."""


@dataclass
class FeatureTest:
    """A selected feature with its effects on log p(class) in held-out stories."""

    name: str
    feature: int
    f1: float
    set_effect: ConfidenceInterval
    set_control: ConfidenceInterval
    zero_effect: ConfidenceInterval
    zero_control: ConfidenceInterval

    @property
    def is_confirmed(self) -> bool:
        return _exceeds(self.set_effect, self.set_control, 1) and _exceeds(self.zero_effect, self.zero_control, -1)

    def __str__(self) -> str:
        verdict = "confirmed" if self.is_confirmed else "not confirmed"
        return (
            f"{self.name:22} feature {self.feature:4}  F1 {self.f1:.2f}  "
            f"set {_format(self.set_effect)}, control {_format(self.set_control)}  "
            f"zero {_format(self.zero_effect)}, control {_format(self.zero_control)}  {verdict}"
        )


def _exceeds(effect: ConfidenceInterval, control: ConfidenceInterval, sign: int) -> bool:
    """Whether the effect has this sign, and its interval is beyond 0 and beyond the interval of the control."""
    low = sign * effect.mean - (effect.half_width or 0)
    return low > max(0.0, sign * control.mean + (control.half_width or 0))


def _format(interval: ConfidenceInterval) -> str:
    return f"{interval.mean:+.2f} ± {interval.half_width or 0:.2f}"


def write_stories(checkpoint: ct.Checkpoint) -> list[str]:
    """Return stories by the model, which depend only on the seeds."""
    stories = []
    for seed, prompt in enumerate(PROMPTS):
        completions = ct.generate(
            checkpoint,
            [prompt],
            n=STORIES_PER_PROMPT,
            max_new_tokens=STORY_TOKENS,
            temperature=1.0,
            seed=seed,
            max_num_seqs=STORIES_PER_PROMPT,
        )
        stories += [prompt + completion.text for completion in completions]
    return stories


@torch.no_grad()
def select_feature(sae: SparseAutoencoder, dataset: ActivationDataset, class_ids: Tensor) -> tuple[int, float, float]:
    """Return the feature that agrees best with the class being next, its F1, and its mean where it is active."""
    d_sae = sae.cfg.d_sae
    both, active, total, sums = (torch.zeros(d_sae) for _ in range(4))
    everything = dataset.read(torch.arange(len(dataset)), [])
    follows = torch.isin(everything.tokens.roll(-1), class_ids) & (
        everything.sequences == everything.sequences.roll(-1)
    )
    start = 0
    for batch in dataset.batches(4096, shuffle=False):
        acts, is_next = sae.encode(batch[SITE]), follows[start : start + len(batch)]
        start += len(batch)
        both += (acts[is_next] > 0).sum(0)
        active += (acts > 0).sum(0)
        total += is_next.sum()
        sums += acts.sum(0)
    f1 = 2 * both / (active + total)
    feature = int(f1.argmax())
    return feature, float(f1[feature]), float(sums[feature] / active[feature])


@torch.no_grad()
def measure_feature(
    checkpoint: ct.Checkpoint,
    sae: SparseAutoencoder,
    stories: list[list[int]],
    class_ids: Tensor,
    feature: int,
    mean: float,
) -> dict[str, list[float]]:
    """Return the change of log p(class) per story: `set` where the feature is not active, `zero` where it is.

    `set control` and `zero control` are the mean changes by NUM_CONTROLS random features, to which the same step is
    added at the same positions.
    """
    generator = torch.Generator().manual_seed(SEED)
    controls = torch.randperm(sae.cfg.d_sae, generator=generator)[:NUM_CONTROLS].tolist()
    changes: dict[str, list[float]] = {"set": [], "set control": [], "zero": [], "zero control": []}
    for ids in stories:
        tokens = torch.tensor([ids])
        with attach_sae(checkpoint, sae) as site, ct.trace(checkpoint, site) as t:
            plain = checkpoint.model(tokens)
        acts = t[site].as_subclass(Tensor)[0]  # (T, F)
        for operation, is_active in (("set", False), ("zero", True)):
            at = ((acts[:, feature] > 0) == is_active).nonzero()[:, 0]
            at = at[torch.randperm(len(at), generator=generator)[:MAX_POSITIONS]]
            if not len(at):
                continue
            old = acts[at, feature]
            step = mean - old if operation == "set" else -old  # (positions,)
            own, *others = _log_prob_changes(checkpoint, sae, tokens, plain, at, step, [feature, *controls], class_ids)
            changes[operation].append(own)
            changes[f"{operation} control"].append(sum(others) / len(others))
    return changes


def _log_prob_changes(
    checkpoint: ct.Checkpoint,
    sae: SparseAutoencoder,
    tokens: Tensor,
    plain: Tensor,
    positions: Tensor,
    step: Tensor,
    features: list[int],
    class_ids: Tensor,
) -> list[float]:
    """Return the mean change of log p(class), if `step` is added to each feature, at one position at a time."""
    # One row of the batch for each pair of a feature and a position.
    row_positions, row_steps = positions.repeat(len(features)), step.repeat(len(features))
    row_features = torch.tensor(features).repeat_interleave(len(positions))
    rows = torch.arange(len(row_features))

    def add_step(acts: Tensor) -> Tensor:
        acts[rows, row_positions, row_features] += row_steps
        return acts

    with attach_sae(checkpoint, sae) as site, ct.edit(checkpoint, {site: add_step}):
        edited = checkpoint.model(tokens.expand(len(rows), -1))
    after = edited[rows, row_positions].log_softmax(-1)[:, class_ids].logsumexp(-1)
    before = plain[0, row_positions].log_softmax(-1)[:, class_ids].logsumexp(-1)
    return (after - before).view(len(features), -1).mean(1).tolist()


def token_ids(checkpoint: ct.Checkpoint, words: str) -> Tensor:
    """Return the ids of the words that are one token with a leading space."""
    assert checkpoint.tokenizer is not None
    encoded = [checkpoint.tokenizer.encode(f" {word}", add_special_tokens=False) for word in words.split()]
    return torch.tensor([ids[0] for ids in encoded if len(ids) == 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory", help="for the stories, the activations and the autoencoder; existing ones are used"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        results = run(Path(args.directory or temporary))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


def run(directory: Path) -> dict[str, object]:
    start = time.perf_counter()
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    assert checkpoint.tokenizer is not None
    directory.mkdir(parents=True, exist_ok=True)
    stories_file = directory / "stories.json"
    if not stories_file.exists():
        stories_file.write_text(json.dumps(write_stories(checkpoint)))
    stories = [checkpoint.tokenizer.encode(text) for text in json.loads(stories_file.read_text())]
    train, test = stories[::2], stories[1::2]
    print_line(f"{len(stories)} stories, {sum(map(len, stories)):,} tokens  ({time.perf_counter() - start:.0f} s)")
    dataset = collect_activations(
        checkpoint, train, SITE, directory=directory / "activations", batch_size=32, packing=True
    )
    if not (directory / "sae").exists():
        save_sae(train_sae(dataset, CONFIG, num_steps=NUM_STEPS, lr=LR, seed=SEED), directory / "sae")
    sae = load_sae(directory / "sae")
    metrics = evaluate_sae(checkpoint, sae, test)
    print_line(f"{metrics}  ({time.perf_counter() - start:.0f} s)\n")
    tests = []
    for name, words in CLASSES.items():
        class_ids = token_ids(checkpoint, words)
        feature, f1, mean = select_feature(sae, dataset, class_ids)
        short = [ids[:TEST_TOKENS] for ids in test[:NUM_TEST_STORIES]]
        changes = measure_feature(checkpoint, sae, short, class_ids, feature, mean)
        intervals = [mean_confidence_interval(changes[key]) for key in ("set", "set control", "zero", "zero control")]
        tests.append(FeatureTest(name, feature, f1, *intervals))
        print_line(tests[-1])
    for each in tests:
        (report,) = feature_report(checkpoint, sae, dataset, each.feature, num_examples=5)
        print_line(f"\n{each.name}: {report}")
    print_line(
        f"\n{sum(each.is_confirmed for each in tests)} of {len(tests)} features are confirmed "
        f"({time.perf_counter() - start:.0f} s)"
    )
    return {
        "explained_variance": metrics.explained_variance,
        "l0": metrics.l0,
        "dead_fraction": metrics.dead_fraction,
        "loss_recovered": metrics.loss_recovered,
        "features": [
            vars(each) | {key: vars(getattr(each, key)) for key in vars(each) if "_" in key} for each in tests
        ],
    }


def print_line(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
