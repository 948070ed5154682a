"""Training of task heads: equal to transformers step by step, micro-batches, resume, padding, adapters, whole runs."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.cli_runner import CliRunner
from support.nightly import nightly_except
from support.tiny_runs import read_metrics, run_digest
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from torch.nn import functional as F

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.evaluate.confidence_interval import proportion_confidence_interval
from cutaway.families.replace_head import replace_head
from cutaway.generate.classify import Classification
from cutaway.tokenizer import Tokenizer, train_bpe
from cutaway.train.checkpoint.saved_models import load_newest_model
from cutaway.train.data.task_dataset import TaskBatch
from cutaway.train.logging.callbacks import Callback
from cutaway.train.objectives.task import TaskObjective
from cutaway.train.optim.lr_scheduler import lr_factor
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume, train
from cutaway.train.trainer.train_step import build_micro_batch, metrics_to_python
from cutaway.train.trainer.trainer import Trainer

STEPS, LR = 25, 2e-3
GOOD, BAD = ("good", "fine", "lovely", "great"), ("bad", "poor", "awful", "dull")
NAMES = ("Anna", "Ben", "Carla", "Dan")


def rows_of(task: str, count: int = 48) -> list[dict[str, Any]]:
    """Records of a task that a small model can learn. Texts have different lengths."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for index in range(count):
        is_good = rng.random() < 0.5
        word = rng.choice(GOOD if is_good else BAD)
        text = f"the film {'of the day ' * rng.randrange(3)}was {word} {index}"
        name, other = rng.choice(NAMES), rng.choice(("Rome", "Oslo"))
        match task:
            case "classification":
                rows.append({"text": text, "label": "pos" if is_good else "neg"})
            case "pairs":
                rows.append({"sentence1": text, "sentence2": f"it was {word}", "label": int(is_good)})
            case "multi-label":
                rows.append({"text": text, "labels": [*(["good"] if is_good else []), *(["even"] * (index % 2 == 0))]})
            case "regression":
                rows.append({"text": text, "label": 0.25 + 2 * is_good})
            case "token-classification":
                words = ["so", name, "went", *["there"] * rng.randrange(3), "to", other]
                tags = ["O", "B-PER", "O", *["O"] * (len(words) - 5), "O", "B-LOC"]
                rows.append({"tokens": words, "ner_tags": tags})
            case "multiple-choice":
                choices = [rng.choice(GOOD), rng.choice(BAD), *([rng.choice(BAD)] if index % 3 else [])]
                rng.shuffle(choices)
                answer = next(i for i, choice in enumerate(choices) if choice in GOOD)
                rows.append({"question": text, "choices": choices, "label": answer})
            case "embedding":
                rows.append(
                    {"anchor": f"{name} {index}", "positive": f"here is {name} {index}", "negative": f"{other}"}
                )
            case "similarity":
                rows.append({"sentence1": text, "sentence2": f"so {word}", "score": float(is_good)})
    return rows


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [" ".join(str(value) for value in row.values()) for row in rows_of("classification")]
    special = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
    trained = train_bpe(texts, 300, special_tokens=special)
    backend = trained.backend
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    names = {"pad_token": "[PAD]", "mask_token": "[MASK]", "eos_token": "[SEP]"}
    return Tokenizer(backend, special_tokens_map=names, model_max_length=64)


def bert_config(tokenizer: Tokenizer, **options: Any) -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
        **options,
    )


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A random BERT without head, saved by transformers."""
    directory = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    transformers.BertModel(bert_config(tokenizer)).save_pretrained(directory)
    tokenizer.save(directory)
    return directory


def write_rows(directory: Path, rows: list[dict[str, Any]], name: str = "data.jsonl") -> Path:
    path = directory / name
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def recipe(base: Path, records: Path, kind: str, **sections: dict[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "model": {"checkpoint": str(base)},
        "data": {"sources": [{"path": str(records)}], "seq_len": 24, "validation_split": 0.25},
        "objective": {"kind": kind},
        "optimizer": {"lr": LR, "weight_decay": 0.01, "betas": [0.9, 0.999]},
        "schedule": {"kind": "linear", "warmup_ratio": 0.1, "min_lr_ratio": 0.0},
        "training": {"max_steps": STEPS, "batch_size": 6, "compile": False},
        "eval": {"interval": 10, "num_sequences": 20},
        "checkpoint": {"interval": 3},
    }
    return {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}


HEADS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "classification": ("classification", transformers.BertForSequenceClassification, {"num_labels": 2}),
    "pairs": ("classification", transformers.BertForSequenceClassification, {"num_labels": 2}),
    "multi-label": (
        "classification",
        transformers.BertForSequenceClassification,
        {"num_labels": 2, "problem_type": "multi_label_classification"},
    ),
    "regression": (
        "classification",
        transformers.BertForSequenceClassification,
        {"num_labels": 1, "problem_type": "regression"},
    ),
    "token-classification": ("token-classification", transformers.BertForTokenClassification, {"num_labels": 3}),
    "multiple-choice": ("multiple-choice", transformers.BertForMultipleChoice, {}),
}
LABELS = {
    "classification": ["neg", "pos"],
    "pairs": ["0", "1"],
    "multi-label": ["even", "good"],
    "token-classification": ["B-LOC", "B-PER", "O"],
}


def model_inputs(batch: TaskBatch, *, has_choices: bool) -> dict[str, Tensor]:
    tensors = {"input_ids": batch.tokens, "attention_mask": batch.mask.long()}
    if batch.token_types is not None:
        tensors["token_type_ids"] = batch.token_types
    return tensors if has_choices else {name: tensor[:, 0] for name, tensor in tensors.items()}


def reference_loss(reference: nn.Module, batch: TaskBatch, task: str) -> Tensor:
    """Loss that transformers computes from the labels."""
    outputs = reference(
        **model_inputs(batch, has_choices=task == "multiple-choice"), labels=reference_labels(batch, task)
    )
    loss: Tensor = outputs.loss
    return loss


def reference_labels(batch: TaskBatch, task: str) -> Tensor:
    if task in ("multi-label", "token-classification"):
        return batch.labels
    return batch.labels[:, 0]


@pytest.mark.parametrize("task", nightly_except(["classification", "token-classification", "multiple-choice"], HEADS))
def test_training_equals_transformers(task: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Losses of each step within 1e-5, with the same data, order and optimizer."""
    kind, model_class, options = HEADS[task]
    torch.manual_seed(0)
    config = bert_config(tokenizer, **options)
    if task in LABELS:
        config.id2label = dict(enumerate(LABELS[task]))
        config.label2id = {label: index for index, label in enumerate(LABELS[task])}
    model_class(config).save_pretrained(tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    rows = rows_of(task)
    if task == "multiple-choice":  # transformers needs the same number of choices in all records
        rows = [row | {"choices": row["choices"][:2], "label": row["label"] % 2} for row in rows]
    data = write_rows(tmp_path, rows)
    messages: list[str] = []
    callback = Callback(on_message=messages.append)
    settings = load_recipe(recipe(tmp_path / "base", data, kind))
    trainer = prepare_trainer(settings, tmp_path / "run", device="cpu", callback=callback)
    assert any("trained further" in message for message in messages)
    reference = model_class.from_pretrained(tmp_path / "base").train()
    trainer.model.train()
    decayed = [p for p in reference.parameters() if p.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": 0.01},
        {"params": [p for p in reference.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: lr_factor(trainer.recipe.schedule, n, STEPS))
    losses = []
    for step in range(STEPS):
        batch = trainer.data.train.get_batch(step * 6, 6)
        metrics = metrics_to_python(trainer.train_step(step))
        loss = reference_loss(reference, batch, task)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5), step
    assert losses[-1] < losses[0], "the loss does not decrease, so the comparison is not meaningful"


def loss_and_gradients(trainer: Trainer, objectives: list[TaskObjective]) -> tuple[float, dict[str, Tensor]]:
    module = trainer.training_module
    module.eval()
    module.zero_grad()
    weight = sum(float(objective.weights.sum()) for objective in objectives)
    total = 0.0
    for objective in objectives:
        loss = module(objective).loss / weight
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("task", nightly_except(["classification", "similarity"], [*HEADS, "similarity"]))
def test_micro_batches_have_the_same_loss_and_gradient(task: str, bert: Path, tmp_path: Path) -> None:
    kind = HEADS[task][0] if task in HEADS else "embedding"
    objective = {"loss": "cosine-similarity"} if task == "similarity" else {}
    settings = recipe(bert, write_rows(tmp_path, rows_of(task)), kind, objective={"kind": kind, **objective})
    trainer = prepare_trainer(load_recipe(settings), tmp_path / "run", device="cpu")

    def build(first: int, count: int) -> Any:
        return build_micro_batch(trainer.objective_fn, trainer.data.train, first, count)

    whole = loss_and_gradients(trainer, [build(0, 8)])
    split = loss_and_gradients(trainer, [build(0, 3), build(3, 1), build(4, 4)])
    assert split[0] == pytest.approx(whole[0], abs=1e-6)
    assert split[1].keys() == whole[1].keys()
    for name, gradient in split[1].items():
        torch.testing.assert_close(gradient, whole[1][name], atol=1e-6, rtol=1e-4)
    empty = build_micro_batch(trainer.objective_fn, trainer.data.train, 0, 0)
    assert trainer.training_module(empty).loss.item() == 0


def test_multiple_choice_with_different_numbers_of_choices(bert: Path, tmp_path: Path) -> None:
    """The loss is that of the cross-entropy over the choices of each record, alone."""
    data = write_rows(tmp_path, rows_of("multiple-choice"))
    trainer = prepare_trainer(load_recipe(recipe(bert, data, "multiple-choice")), tmp_path / "run", device="cpu")
    trainer.model.eval()
    rows = trainer.data.train.get_rows(range(6))
    assert len({len(row[0]) for row in rows}) == 2
    expected = 0.0
    for row in rows:
        batch = trainer.data.train.collate([row])
        assert batch.tokens.shape[1] == len(row[0])
        scores = trainer.model(batch.tokens, batch.mask, token_types=batch.token_types)
        expected += F.cross_entropy(scores, torch.tensor(row[3])).item()
    objective = build_micro_batch(trainer.objective_fn, trainer.data.train, 0, 6)
    assert objective.loss(trainer.model).loss.item() == pytest.approx(expected, abs=1e-5)


def stop_at(step: int, trainer: Trainer) -> Callable[[Any, Any], None]:
    return lambda row, timing: trainer.stop_requested.set() if row["step"] == step else None


@pytest.mark.parametrize(
    "task",
    nightly_except(["classification"], ["classification", "token-classification", "multiple-choice", "embedding"]),
)
def test_resumed_run_is_bit_equal(task: str, bert: Path, tmp_path: Path) -> None:
    settings = recipe(bert, write_rows(tmp_path, rows_of(task)), task)
    settings["training"] |= {"max_steps": 8, "ema_decay": 0.9}
    train(settings, tmp_path / "whole")
    for stop in (1, 5):
        name = f"stopped-{stop}"
        stopped = prepare_trainer(load_recipe(settings), tmp_path / name, device="cpu")
        event = stopped.stop_requested
        stopped.callback.on_step_end = lambda row, _, stop=stop, event=event: (
            event.set() if row["step"] == stop else None
        )  # type: ignore[method-assign]
        stopped.train()
        assert stopped.global_step == stop
        resume(tmp_path / name)
        assert run_digest(tmp_path / name) == run_digest(tmp_path / "whole")


def run_task(base: Path, directory: Path, task: str, kind: str, **sections: dict[str, Any]) -> tuple[Path, Path]:
    """Train on three quarters of the records. Returns the run and a file with the others."""
    rows = rows_of(task, 160)
    data, held_out = write_rows(directory, rows[:120]), write_rows(directory, rows[120:], "held-out.jsonl")
    settings = recipe(base, data, kind, **sections)
    settings["training"] |= {"max_steps": 60, "batch_size": 12}
    settings["optimizer"] |= {"lr": 5e-3}
    train(settings, directory / "run")
    return directory / "run", held_out


@pytest.fixture(scope="module")
def classifier_run(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return run_task(bert, tmp_path_factory.mktemp("classifier"), "classification", "classification")


def test_run_of_a_classifier(classifier_run: tuple[Path, Path], run_cli: CliRunner) -> None:
    """From training to export, use and evaluation. transformers opens the exported model."""
    run, held_out = classifier_run
    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    evaluations = [row for row in read_metrics(run) if "accuracy" in row]
    assert evaluations[0]["step"] == 0
    assert evaluations[-1]["accuracy"] > 0.9
    checkpoint = ct.load(run)
    texts, labels = [row["text"] for row in rows], [row["label"] for row in rows]
    results = ct.classify(checkpoint, texts)
    accuracy = sum(r.label == label for r, label in zip(results, labels, strict=True)) / len(rows)  # type: ignore[union-attr]
    assert accuracy == 1

    theirs = transformers.BertForSequenceClassification.from_pretrained(run / "model").eval()
    assert theirs.config.id2label == {0: "neg", 1: "pos"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    with torch.no_grad():
        logits = theirs(**tokenizer(texts, return_tensors="pt", padding=True)).logits
    for result, row in zip(results, logits.softmax(-1), strict=True):
        assert isinstance(result, Classification)
        assert list(result.probabilities.values()) == pytest.approx(row.tolist(), abs=1e-5)

    report = json.loads(run_cli("eval", run, "--data", held_out, "--json"))
    assert report["accuracy"] == pytest.approx(accuracy)
    assert report["accuracy_interval"] == pytest.approx(proportion_confidence_interval(len(rows), len(rows)))
    assert "precision" in run_cli("eval", run, "--data", held_out)
    predicted = json.loads(run_cli("generate", run, texts[0], "--json"))
    assert predicted["labels"] == [results[0].label]  # type: ignore[union-attr]
    assert results[0].label in run_cli("generate", run, texts[0])  # type: ignore[union-attr]
    assert "--temperature does not apply" in run_cli("generate", run, "x", "--temperature", "1", code=2)


def test_results_do_not_depend_on_padding_and_batch(classifier_run: tuple[Path, Path]) -> None:
    run, held_out = classifier_run
    checkpoint = ct.load(run)
    texts = ["short", *(json.loads(line)["text"] for line in held_out.read_text().splitlines()[:10])]
    together = ct.classify(checkpoint, texts)
    for batch_size in (1, 3):
        for a, b in zip(ct.classify(checkpoint, texts, batch_size=batch_size), together, strict=True):
            assert isinstance(a, Classification)
            assert isinstance(b, Classification)
            assert list(a.probabilities.values()) == pytest.approx(list(b.probabilities.values()), abs=1e-5)


def test_run_of_token_classification(bert: Path, tmp_path: Path, run_cli: CliRunner) -> None:
    run, held_out = run_task(bert, tmp_path, "token-classification", "token-classification")
    report = json.loads(run_cli("eval", run, "--data", held_out, "--json"))
    assert report["entity_f1"] > 0.9
    rows = [json.loads(line)["tokens"] for line in held_out.read_text().splitlines()]
    expected = [[(words[1], "PER"), (words[-1], "LOC")] for words in rows]
    found = ct.classify(ct.load(run), [" ".join(words) for words in rows])
    spans = [[(span.text, span.label) for span in entities] for entities in found]  # type: ignore[union-attr]
    assert sum(a == b for a, b in zip(spans, expected, strict=True)) > 0.8 * len(rows)
    assert "PER" in run_cli("generate", run, " ".join(rows[0]))


@pytest.mark.parametrize(
    ("task", "kind", "metric"),
    [
        pytest.param("multi-label", "classification", "micro_f1", marks=pytest.mark.nightly),
        pytest.param("regression", "classification", "pearson", marks=pytest.mark.nightly),
        pytest.param("pairs", "classification", "accuracy", marks=pytest.mark.nightly),
        pytest.param("multiple-choice", "multiple-choice", "accuracy", marks=pytest.mark.nightly),
        ("embedding", "embedding", "accuracy_at_1"),
        pytest.param("similarity", "embedding", "spearman", marks=pytest.mark.nightly),
    ],
)
def test_runs_of_other_tasks_learn(
    task: str, kind: str, metric: str, bert: Path, tmp_path: Path, run_cli: CliRunner
) -> None:
    run, held_out = run_task(bert, tmp_path, task, kind)
    before = json.loads(run_cli("eval", bert, "--data", held_out, "--json"))[metric] if task == "embedding" else 0.5
    after = json.loads(run_cli("eval", run, "--data", held_out, "--json"))[metric]
    assert after > max(before, 0.5)
    if kind == "embedding":
        vectors = ct.embed(ct.load(run), ["so Anna", "Anna was here too", "x"])
        torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(3))


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        ([{"text": "a"}, {"text": "b"}], "classification", "no record has a text and a label.*no label"),
        ([{"text": f"a{i}", "label": "x"} for i in range(9)], "classification", "at least two classes"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": ["x"]}], "classification", "different types"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], "multiple-choice", "no valid record.*no choices"),
        ([{"tokens": ["a"], "tags": ["O"]}, {"tokens": ["b"], "tags": ["O"]}], "token-classification", "at least two"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], "embedding", "anchor and positive"),
    ],
)
def test_hostile_data_is_refused(
    rows: list[dict[str, Any]], kind: str, message: str, bert: Path, tmp_path: Path
) -> None:
    with pytest.raises(CutawayError, match=message):
        train(recipe(bert, write_rows(tmp_path, rows), kind), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_invalid_records_are_left_out_and_counted(bert: Path, tmp_path: Path) -> None:
    rows = rows_of("classification")
    rows[3]["label"], rows[5]["text"], rows[7]["text"], rows[9]["text"] = None, "", "y" * 500, "\ud800"
    messages: list[str] = []
    data: list[dict[str, Any]] = []
    callback = Callback(on_message=messages.append, on_data=data.append)
    settings = load_recipe(recipe(bert, write_rows(tmp_path, rows), "classification"))
    trainer = prepare_trainer(settings, tmp_path / "run", device="cpu", callback=callback)
    log = "\n".join(messages)
    assert "1 × no label" in log
    assert "1 × empty text" in log
    assert "1 × invalid UTF-8" in log
    assert "1 records have more than 24 tokens" in log
    [summary] = data
    assert sum(summary["statistics"]["labels"].values()) == trainer.data.num_sequences
    assert summary["examples"][0]["segments"][-1]["text"] in ("neg", "pos")


def test_unknown_label_in_evaluation_data_is_counted(
    classifier_run: tuple[Path, Path], tmp_path: Path, run_cli: CliRunner
) -> None:
    rows = [{"text": "a good film", "label": "pos"}, {"text": "b", "label": "other"}, {"text": "", "label": "pos"}]
    report = json.loads(run_cli("eval", classifier_run[0], "--data", write_rows(tmp_path, rows), "--json"))
    assert report["num_examples"] == 1
    assert report["skipped"] == {"empty text": 1, "unknown label": 1}


@pytest.mark.parametrize("task", nightly_except(["classification"], ["classification", "token-classification"]))
def test_adapter_with_a_head(task: str, bert: Path, tmp_path: Path) -> None:
    """LoRA on the body, and the head trained fully: PEFT opens the export, and a resumed run is bit-equal."""
    adapter = {"checkpoint": str(bert), "adapter": {"rank": 4, "targets": ["attn.q", "attn.v"]}}
    settings = recipe(bert, write_rows(tmp_path, rows_of(task)), task, model=adapter)
    settings["training"] |= {"max_steps": 8}
    run = train(settings, tmp_path / "whole")
    stopped = prepare_trainer(load_recipe(settings), tmp_path / "stopped", device="cpu")
    stopped.callback.on_step_end = stop_at(5, stopped)  # type: ignore[method-assign]
    stopped.train()
    resume(tmp_path / "stopped")
    assert run_digest(tmp_path / "stopped") == run_digest(tmp_path / "whole")

    loaded = ct.load(run.directory)
    names = loaded.model.config.head.label_names  # type: ignore[union-attr]
    assert names == tuple(LABELS[task])
    body = {name for name, p in stopped.model.named_parameters() if p.requires_grad}
    assert any(name.startswith("head.") for name in body)
    base_class = HEADS[task][1]
    base = base_class.from_pretrained(bert, num_labels=len(names))
    opened = peft.PeftModel.from_pretrained(base, run.model_directory).eval()
    tokens = torch.arange(5, 45).view(2, 20)
    with torch.no_grad():
        expected = opened(tokens).logits
        torch.testing.assert_close(loaded.model(tokens), expected, atol=1e-5, rtol=1e-5)
        merged = ct.load(ct.save(loaded, tmp_path / "merged"))
        torch.testing.assert_close(merged.model(tokens), expected, atol=1e-5, rtol=1e-5)
        opened.save_pretrained(tmp_path / "theirs")
        again = ct.load(bert, adapters=tmp_path / "theirs")  # PEFT writes no names of labels
        torch.testing.assert_close(again.model(tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("task", ["classification", "embedding"])
def test_head_on_a_frozen_body_in_16_bits_is_trained_in_fp32(task: str, bert: Path, tmp_path: Path) -> None:
    """The evaluations in training, the snapshots and the exported adapter have this head."""
    adapter = {"checkpoint": str(bert), "adapter": {"rank": 4, "targets": ["attn.q"]}}
    settings = recipe(bert, write_rows(tmp_path, rows_of(task)), task, model=adapter)
    settings["training"] |= {"max_steps": 3, "precision": "bf16"}
    trainer = prepare_trainer(load_recipe(settings), tmp_path / "run", device="cpu")
    assert trainer.model.dtype == torch.bfloat16
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    assert load_newest_model(trainer.run_directory)[1] == 0
    trainer.train()
    assert load_newest_model(trainer.run_directory)[1] > 0
    weights = load_file(trainer.run_directory.model_directory / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_columns_and_formats(bert: Path, tmp_path: Path) -> None:
    """CSV with other column names, and numbers as labels, in the order of the numbers."""
    rows = [f'"a {word}, film {i}",{stars}' for i in range(8) for word, stars in (("good", 10), ("bad", 2))]
    (tmp_path / "a.csv").write_text("\n".join(["Body,Stars", *rows]))
    source = {"path": str(tmp_path / "a.csv"), "text_column": "Body", "target_column": "Stars"}
    settings = recipe(bert, tmp_path / "a.csv", "classification", data={"sources": [source]})
    trainer = prepare_trainer(load_recipe(settings), tmp_path / "run", device="cpu")
    assert trainer.model.config.head.label_names == ("2", "10")  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save(directory)
    return directory


def test_reward_model(llama: Path, tmp_path: Path) -> None:
    """Loss of each step equal to that of transformers with TRL's formula; the reward prefers the chosen answers."""
    rng = random.Random(0)
    rows = [
        {"prompt": f"film {i}: ", "chosen": f"{rng.choice(GOOD)} {i}", "rejected": f"{rng.choice(BAD)} of the day"}
        for i in range(80)
    ]
    settings = recipe(llama, write_rows(tmp_path, rows), "reward")
    trainer = prepare_trainer(load_recipe(settings), tmp_path / "run", device="cpu")
    ct.save(trainer.build_checkpoint(torch.device("cpu")), tmp_path / "initial")  # type: ignore[arg-type]
    reference = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "initial").train()
    assert reference.num_labels == 1
    trainer.model.train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in reference.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.999),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: lr_factor(trainer.recipe.schedule, n, STEPS))
    for step in range(10):
        answers = trainer.data.train.get_batch(step * 6, 6).answers
        metrics = metrics_to_python(trainer.train_step(step))
        rewards = reference(answers.tokens, attention_mask=answers.is_token.long()).logits[:, 0]
        loss = -F.logsigmoid(rewards[:6] - rewards[6:]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5), step
    settings["training"] |= {"max_steps": 40}
    train(settings, tmp_path / "trained")
    accuracies = [row["accuracy"] for row in read_metrics(tmp_path / "trained") if "accuracy" in row]
    assert accuracies[-1] > 0.9
    good, bad = ct.classify(ct.load(tmp_path / "trained"), ["film 3: good 3", "film 3: poor of the day"])
    assert good.score > bad.score  # type: ignore[union-attr]


@pytest.mark.nightly
def test_a_decoder_can_be_a_classifier(llama: Path, tmp_path: Path) -> None:
    """The last token that is not padding is classified, as in transformers."""
    run, held_out = run_task(llama, tmp_path, "classification", "classification")
    texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()]
    theirs = transformers.LlamaForSequenceClassification.from_pretrained(run / "model").eval()
    reference = transformers.AutoTokenizer.from_pretrained(run / "model")
    inputs = reference(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = theirs(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    for result, row in zip(ct.classify(ct.load(run), texts), logits.softmax(-1), strict=True):
        assert isinstance(result, Classification)
        assert list(result.probabilities.values()) == pytest.approx(row.tolist(), abs=1e-5)


def test_prompts_of_sentence_transformers_are_kept(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    base = replace_head(ct.load("tiny-english-encoder"), "embedding")
    ct.save(replace(base, sentence_transformers_config=prompts), tmp_path / "base")
    rows = [{"anchor": f"A cat {number}.", "positive": f"Cat {number}."} for number in range(8)]
    data = write_rows(tmp_path, rows)
    overrides = ["training.max_steps=1", "training.batch_size=2"]
    run = train("embed", tmp_path / "run", base=tmp_path / "base", texts=[data], overrides=overrides, device="cpu")
    assert ct.load(run.directory).sentence_transformers_config == prompts
