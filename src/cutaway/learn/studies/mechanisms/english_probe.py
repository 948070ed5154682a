"""Linear probe of tiny-english: is a token inside a quotation?

The text is sampled from the model. The label of a token is whether the number of quotation marks up to it is odd, which
a token alone does not tell. A probe is a ridge regression of the label on the residual stream, after the embedding and
after each block; its accuracy is measured on stories that it was not trained on.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import cutaway as ct
from cutaway.learn.studies.mechanisms.english_prompts import get_tokenizer, load_model
from cutaway.learn.studies.study import Estimate, estimate
from cutaway.lens.trace import trace
from cutaway.model import Transformer, build

OPENINGS = ("Once upon a time, there was a", "One day,", "Tom and Lily were", '"Look at this!" said')
NUM_STORIES, NUM_TRAIN, STORY_LEN = 96, 64, 160
"""Stories of this number of new tokens, the first of which train the probe."""
RIDGE = 1.0
SEED = 0


@dataclass(frozen=True)
class Story:
    ids: Tensor
    is_quoted: Tensor
    """Whether the number of quotation marks up to each token, with it, is odd."""


def sample_stories(device: str) -> list[Story]:
    """Stories of the model itself."""
    prompts = [OPENINGS[index % len(OPENINGS)] for index in range(NUM_STORIES)]
    outputs = ct.generate(load_model(device), prompts, max_new_tokens=STORY_LEN, temperature=1.0, seed=SEED)
    tokenizer, stories = get_tokenizer(), []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokenizer.encode(f"{prompt}{output.text}")
        marks = torch.tensor([tokenizer.decode([token]).count('"') for token in ids])
        stories.append(Story(torch.tensor([ids], device=device), (marks.cumsum(0) % 2 == 1).to(device)))
    return stories


@torch.no_grad()
def record_residual(model: Transformer, story: Story) -> Tensor:
    """(depths, T, d): residual stream after the embedding and after each block."""
    with trace(model, "embed", "resid_post") as t:
        model(story.ids)
    names = ["embed", *(f"blocks.{layer}.resid_post" for layer in range(len(t) - 1))]
    return torch.stack([t[name].as_subclass(Tensor)[0] for name in names]).double()


def probe_accuracy(model: Transformer, stories: list[Story]) -> list[list[float]]:
    """Accuracy on each held-out story, by depth."""
    train, test = stories[:NUM_TRAIN], stories[NUM_TRAIN:]
    features = torch.cat([record_residual(model, story) for story in train], 1)  # (depths, tokens, d)
    labels = torch.cat([story.is_quoted for story in train]).double()
    mean, scale = features.mean(1, keepdim=True), features.std(1, keepdim=True) + 1e-9
    x, offset = (features - mean) / scale, labels.mean()
    gram = x.mT @ x + RIDGE * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    weights = torch.linalg.solve(gram, x.mT @ (labels - offset)[:, None])  # (depths, d, 1)
    accuracies = []
    for story in test:
        predicted = ((record_residual(model, story) - mean) / scale @ weights).squeeze(-1) + offset > 1 / 2
        accuracies.append((predicted == story.is_quoted).double().mean(1).tolist())
    return [list(row) for row in zip(*accuracies, strict=True)]


def measure_quotation_probe(device: str) -> dict[str, Estimate]:
    """Accuracy of a linear probe for tokens inside a quotation, by depth, of the model and of an untrained one."""
    stories, model = sample_stories(device), load_model(device).model
    torch.manual_seed(SEED)
    untrained = build(model.config).to(device).eval()
    test_labels = [story.is_quoted.double().mean().item() for story in stories[NUM_TRAIN:]]
    estimates = {"most-frequent": estimate([1 - share for share in test_labels])}
    for prefix, each in (("", model), ("untrained/", untrained)):
        for depth, values in enumerate(probe_accuracy(each, stories)):
            estimates[f"{prefix}{depth}"] = estimate(values)
    return {f"english/quotation-probe/{key}": value for key, value in estimates.items()}
