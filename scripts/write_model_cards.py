"""Evaluate a pretrained model and write its model card, training log, loss curve and examples for the web page.

python scripts/write_model_cards.py tiny-english --run runs/tiny-english --data data
python scripts/write_model_cards.py --render         # all cards, from the stored evaluations

A card is a template in scripts/model_cards/ with values of evaluation.json in braces, and results of the study
`mechanisms` as ${mechanisms:KEY}. With --run, the training log and the loss curve are written too; --data has the
held-out text (examples/tiny-english, examples/tiny-dates).
"""

import argparse
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib import rc_context

import cutaway as ct
from cutaway.evaluate import evaluate_masked_lm, evaluate_seq2seq
from cutaway.families.checkpoint import Checkpoint
from cutaway.generate.fill_mask import fill_mask
from cutaway.learn.notebooks.figures import FIGURE_STYLE
from cutaway.learn.studies.mechanisms.english import NUM_HEADS
from cutaway.learn.studies.study import Estimate, StudyResults, load_results
from cutaway.lens.analysis import head_scores
from cutaway.pretrained import PRETRAINED_DIR
from cutaway.tokenizer import Tokenizer
from cutaway.train.data.prepare import prepare_data
from cutaway.train.recipe.load import load_recipe
from cutaway.train.seeds import derive_seed

ROOT = Path(__file__).parents[1]
TEMPLATES = Path(__file__).parent / "model_cards"
LOG_ROWS = 400
"""The shipped training log has each evaluation, and this number of steps or a few more."""
NUM_STORIES, NUM_PAIRS, NUM_SAMPLES = 500, 2000, 5
NUM_JUDGED = 20
"""Samples of tiny-english whose grammar the card judges. evaluation.json has all, the card the first NUM_SAMPLES."""
Evaluation = dict[str, Any]


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    assert checkpoint.tokenizer is not None
    return checkpoint.tokenizer


def write_training_log(run: Path, directory: Path) -> Evaluation:
    """Write training_log.jsonl and loss.svg; return the cost of the run."""
    rows, timings = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "timings.jsonl")
    steps = [row for row in rows if "grad_norm" in row]
    evals = [row for row in rows if "eval_loss" in row]
    interval = max(1, len(steps) // LOG_ROWS)
    kept = [row for row in rows if "eval_loss" in row or ("grad_norm" in row and row["step"] % interval == 0)]
    lines = [json.dumps({key: round_value(value) for key, value in row.items()}) for row in kept]
    (directory / "training_log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with rc_context(FIGURE_STYLE):
        figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
        axes.plot(
            [row["step"] for row in kept if "loss" in row], [row["loss"] for row in kept if "loss" in row], lw=0.8
        )
        axes.plot([row["step"] for row in evals], [row["eval_loss"] for row in evals], "o-", ms=3)
        axes.set(xlabel="step", ylabel="cross-entropy (nats per token)", ylim=(0, min(4, steps[5]["loss"])))
        axes.legend(["training", "validation"], frameon=False)
        figure.savefig(directory / "loss.svg", metadata={"Date": None})
        plt.close(figure)
    return {
        "steps": steps[-1]["step"],
        "log_interval": interval,
        "tokens": sum(row["num_tokens"] for row in steps),
        "seconds": round(sum(row["seconds"] for row in timings)),
        "final_loss": steps[-1]["loss"],
        "final_eval": {key: value for key, value in evals[-1].items() if isinstance(value, float)},
    }


def round_value(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def evaluate_english(checkpoint: Checkpoint, data: Path) -> Evaluation:
    """Cloze prompts, bits per byte beside the teacher, samples, and attention heads by type."""
    stories = [row["text"] for row in read_jsonl(data / "heldout" / "stories.jsonl")[:NUM_STORIES]]
    teacher = ct.load(data / "stories15M", dtype=torch.float32)
    cloze = tomllib.loads((ROOT / "examples" / "tiny-english" / "cloze.toml").read_text(encoding="utf-8"))
    rows = [cloze_row(checkpoint, prompt, words.split()) for prompt, words in cloze.items()]
    completions = [
        ct.generate(checkpoint, "Once upon a time", max_new_tokens=120, temperature=0.8, seed=seed)[0].text
        for seed in range(NUM_JUDGED)
    ]
    return {
        "bits_per_byte": ct.evaluate(checkpoint, stories).bits_per_byte,
        "teacher_bits_per_byte": ct.evaluate(teacher, stories).bits_per_byte,
        "num_stories": len(stories),
        "cloze_correct": sum(row["rank"] is not None and row["rank"] <= 5 for row in rows),
        "cloze_total": len(rows),
        "cloze": rows,
        "samples": [f"Once upon a time{text}" for text in completions],
        "heads": list_heads(checkpoint),
    }


@torch.no_grad()
def cloze_row(checkpoint: Checkpoint, prompt: str, words: list[str]) -> Evaluation:
    """The most probable sensible word, its probability and its rank (None below 50), and the five most probable."""
    tokenizer = tokenizer_of(checkpoint)
    probabilities = checkpoint.model(torch.tensor([tokenizer.encode(prompt)]))[0, -1].softmax(-1)
    top = probabilities.topk(50)
    texts = [tokenizer.decode([token]).strip() for token in top.indices.tolist()]
    rank = next((index + 1 for index, text in enumerate(texts) if text in words), None)
    row: Evaluation = {"prompt": prompt, "rank": rank, "top": texts[:5]}
    return (
        row if rank is None else row | {"word": texts[rank - 1], "probability": round(float(top.values[rank - 1]), 4)}
    )


def list_heads(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """The three heads with the highest score of each type, as block.head (score)."""
    scores = head_scores(checkpoint)
    heads = {}
    for head_type in ("previous_token", "induction", "duplicate_token"):
        best = scores.select(head_type=head_type).top(3)
        heads[head_type] = [f"{layer}.{head} ({value:.2f})" for (layer, head), value in best]
    return heads


def evaluate_encoder(checkpoint: Checkpoint, data: Path) -> Evaluation:
    """Accuracy on masked tokens beside the most frequent token, and predictions for masks in held-out sentences."""
    stories = [row["text"] for row in read_jsonl(data / "heldout" / "stories.jsonl")[:NUM_STORIES]]
    tokenizer = tokenizer_of(checkpoint)
    counts = Counter(token for story in stories for token in tokenizer.encode(story))
    result = evaluate_masked_lm(checkpoint, stories)
    samples = []
    for index, story in enumerate(stories[:NUM_SAMPLES]):
        words = story.split(". ")[0].split(" ")
        masked = 1 + derive_seed(0, index) % (len(words) - 1)
        text = " ".join([*words[:masked], "[MASK]", *words[masked + 1 :]]) + "."
        [[fills]] = fill_mask(checkpoint.model, tokenizer, [text], top_k=3)
        predictions = ", ".join(f"{fill.token.strip()} {fill.probability:.0%}" for fill in fills)
        samples.append(f"{text} → {predictions} (text: {words[masked]})")
    [token], [count] = zip(*counts.most_common(1), strict=True)
    return {
        "accuracy": result.accuracy,
        "num_masked": result.num_tokens,
        "baseline_token": tokenizer.decode([token]).strip(),
        "baseline_accuracy": count / counts.total(),
        "num_stories": len(stories),
        "samples": samples,
    }


def evaluate_dates(checkpoint: Checkpoint, data: Path) -> Evaluation:
    """Exact match on dates of the validation split, which are in the training text in no language."""
    recipe = load_recipe("tiny-dates", texts=[data / "dates.jsonl"])
    tokenizer, split = tokenizer_of(checkpoint), recipe.data.validation_split
    prepared = prepare_data(recipe.data.sources, tokenizer, data / "cache", validation_split=split, seed=0).validation
    assert prepared.targets is not None
    edges = zip(prepared.offsets[:NUM_PAIRS], prepared.targets, prepared.offsets[1:], strict=False)
    tokens = prepared.tokens
    pairs = [(tokenizer.decode(tokens[a:b].tolist()), tokenizer.decode(tokens[b:c].tolist())) for a, b, c in edges]
    result = evaluate_seq2seq(checkpoint, pairs)
    outputs = ct.generate(checkpoint, [source for source, _ in pairs[:NUM_SAMPLES]])
    samples = [f"{source} → {output.text}" for (source, _), output in zip(pairs, outputs, strict=False)]
    return {"exact_match": result.accuracy, "num_pairs": len(pairs), "samples": samples}


EVALUATIONS: dict[str, Callable[[Checkpoint, Path], Evaluation]] = {
    "tiny-english": evaluate_english,
    "tiny-english-encoder": evaluate_encoder,
    "tiny-dates": evaluate_dates,
}


def render_card(name: str) -> str:
    """The card of a model: its template with the values of evaluation.json."""
    directory = PRETRAINED_DIR / name
    evaluation = json.loads((directory / "evaluation.json").read_text(encoding="utf-8"))
    values = evaluation | {
        "parameters": f"{ct.size(ct.config(name)).num_parameters / 1e6:.1f} million",
        "megabytes": f"{sum(path.stat().st_size for path in directory.iterdir()) / 1e6:.1f} MB",
        "samples": "\n\n".join(f"> {sample}".replace("\n", "\n> ") for sample in evaluation["samples"][:NUM_SAMPLES]),
        "max_steps": load_recipe(name).training.max_steps,
        "cloze_table": "\n".join(map(format_cloze, evaluation.get("cloze", []))),
        **{f"heads_{key}": ", ".join(heads) for key, heads in evaluation.get("heads", {}).items()},
    }
    template = (TEMPLATES / f"{name}.md").read_text(encoding="utf-8")
    template = insert_mechanisms(template)
    return re.sub(r"\{(\w+)(?::([^}]*))?\}", lambda match: format(values[match[1]], match[2] or ""), template)


def insert_mechanisms(text: str) -> str:
    """Insert results of the study `mechanisms`: ${mechanisms:KEY} with its interval, ${KEY} as an integer.

    ${change:KEY} is a decrease in words, such as "raises them by 0.5 (0.4 to 0.6) nats". ${edits:MECHANISM} are the
    edits of the web page that zero the selected heads.
    """
    results = load_results("mechanisms")
    text = re.sub(r"\$\{edits:([^}]+)\}", lambda match: format_edits(select_heads(results, match[1])), text)
    text = re.sub(r"\$\{change:([^}]+)\}", lambda match: describe_decrease(results.get(match[1])), text)
    text = re.sub(r"\$\{mechanisms:([^}]+)\}", lambda match: str(results.get(match[1])), text)
    return re.sub(r"\$\{([^}]+)\}", lambda match: f"{results.get(match[1]).mean:.0f}", text)


def describe_decrease(decrease: Estimate) -> str:
    """A decrease in nats in words: a negative one is an increase, one whose interval contains 0 a signed change."""
    if decrease.low > 0:
        return f"lowers them by {decrease} nats"
    increase = Estimate(-decrease.mean, -decrease.high, -decrease.low, decrease.count)
    return f"{'raises' if increase.low > 0 else 'changes'} them by {increase} nats"


def select_heads(results: StudyResults, mechanism: str) -> dict[int, list[int]]:
    """Selected heads of a mechanism, by layer."""
    heads: dict[int, list[int]] = {}
    for rank in range(NUM_HEADS):
        layer, head = (int(results.get(f"{mechanism}/head/{rank}/{part}").mean) for part in ("layer", "index"))
        heads.setdefault(layer, []).append(head)
    return heads


def format_edits(heads: dict[int, list[int]]) -> str:
    return ",".join(f"blocks.{layer}.attn.z:zero@{'.'.join(map(str, heads[layer]))}" for layer in sorted(heads))


def render_examples() -> dict[str, str]:
    """The examples of the web page as JSON, by model."""
    tables = tomllib.loads(insert_mechanisms((TEMPLATES / "examples.toml").read_text(encoding="utf-8")))
    return {name: json.dumps(examples, indent=1, ensure_ascii=False) + "\n" for name, examples in tables.items()}


def format_cloze(row: Evaluation) -> str:
    found = "no accepted word" if row["rank"] is None else f"{row['word']} {row['probability']:.1%}, rank {row['rank']}"
    return f"| {row['prompt']} | {found} | {', '.join(row['top'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=EVALUATIONS)
    parser.add_argument("--run", type=Path, help="run directory, for the training log")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--render", action="store_true", help="only render the cards")
    args = parser.parse_args()
    if not args.render:
        directory = PRETRAINED_DIR / args.name
        path = directory / "evaluation.json"
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        cost = stored if args.run is None else write_training_log(args.run, directory)
        evaluation = cost | EVALUATIONS[args.name](ct.load(args.name, dtype=torch.float32), args.data)
        path.write_text(json.dumps(evaluation, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, examples in render_examples().items():
        (PRETRAINED_DIR / name / "examples.json").write_text(examples, encoding="utf-8")
    for name in EVALUATIONS if args.render else [args.name]:
        (PRETRAINED_DIR / name / "README.md").write_text(render_card(name), encoding="utf-8")


if __name__ == "__main__":
    main()
