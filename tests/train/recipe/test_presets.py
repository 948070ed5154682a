"""Preset recipes, seq2seq, masked-lm and prefix-lm training, and fine-tuning of checkpoints."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.tiny_runs import text_source
from torch.nn import functional as F

import cutaway as ct
from cutaway.cli import main
from cutaway.errors import CutawayError
from cutaway.evaluate import evaluate_seq2seq
from cutaway.generate.fill_mask import fill_mask
from cutaway.tokenizer import byte_tokenizer, train_bpe
from cutaway.tokenizer.train import DEFAULT_SPECIAL_TOKENS, MASK_TOKEN
from cutaway.train.checkpoint.pretrained_checkpoint import resolve_export_family
from cutaway.train.data.datasets import PrefixDataset
from cutaway.train.data.documents import Document, SkippedDocuments, read_documents
from cutaway.train.data.prepare import prepare_data
from cutaway.train.objectives import prefix_lm
from cutaway.train.recipe import list_recipes, load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume, resume_trainer, train

pytestmark = pytest.mark.usefixtures("skip_preflight")

BYTES = byte_tokenizer()
PAIRS = [(f"{a} and {b}", str(a + b)) for a in range(12) for b in range(12)]
SMALL: dict[str, Any] = {
    "data": {"seq_len": 32, "validation_split": 0.2},
    "schedule": {"warmup_steps": 2},
    "training": {"max_steps": 6, "batch_size": 4},
    "eval": {"interval": 3, "num_sequences": 8, "num_exact_match": 12},
    "checkpoint": {"interval": 3},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    rows = [json.dumps({"source": source, "target": target}) for source, target in PAIRS]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(rows))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "sums.txt"
    path.write_text("\n".join(f"{source} make {target}" for source, target in PAIRS * 3))
    return path


def seq2seq_recipe(path: Path, **sections: Any) -> dict[str, Any]:
    sources = [{"path": str(path), "text_column": "source", "target_column": "target"}]
    return SMALL | {"objective": {"kind": "seq2seq"}, "data": SMALL["data"] | {"sources": sources}} | sections


def read_evals(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval_loss" in row]


# Recipes


def test_preset_models_have_the_expected_sizes_and_families() -> None:
    assert load_recipe("gpt2-124m").data.seq_len == 1024
    recipes = {name: load_recipe(name) for name in list_recipes()}
    built = {
        name: ct.build(recipe.transformer_config, device="meta")
        for name, recipe in recipes.items()
        if recipe.purpose == "pretrain"
    }
    counts = {name: sum(each.numel() for each in model.parameters()) for name, model in built.items()}
    assert counts["gpt2-124m"] == sum(each.numel() for each in ct.build("gpt2", device="meta").parameters())
    assert counts["llama-1b"] == sum(each.numel() for each in ct.build("llama-3.2-1b", device="meta").parameters())
    families = {name: resolve_export_family(model.config, None) for name, model in built.items()}
    assert "cutaway" not in families.values()
    assert (
        families.items()
        >= {
            "tiny-dates": "pegasus",
            "tiny-english": "llama",
            "tiny-english-encoder": "modernbert",
            "fill-mask": "modernbert",
            "gpt2-124m": "gpt2",
            "llama-1b": "llama",
            "python-stdlib": "llama",
            "translate": "marian",
        }.items()
    )


def test_translate_has_the_learning_rate_of_the_2017_paper() -> None:
    from cutaway.train.optim.lr_scheduler import lr_factor

    recipe = load_recipe("translate")
    for step in (0, 1234, 3999, 4000, 50_000):
        n = step + 1
        paper = 512**-0.5 * min(n**-0.5, n * 4000**-1.5)
        lr = recipe.optimizer.lr * lr_factor(recipe.schedule, step, recipe.training.max_steps)
        assert lr == pytest.approx(paper, rel=1e-12)
    assert (recipe.optimizer.betas, recipe.optimizer.eps, recipe.optimizer.weight_decay) == ((0.9, 0.98), 1e-9, 0.0)  # type: ignore[union-attr]


SMALL_OVERRIDES = {
    "gpt2-124m": ["data.tokenizer.vocab_size=300", "model.d_model=24", "model.decoder.layers=1", "data.seq_len=16"],
    "llama-1b": [
        *("data.tokenizer.vocab_size=300", "model.d_model=64", "model.decoder.layers=1", "data.seq_len=16"),
        "model.decoder.block.ffn.hidden=32",
    ],
    "fill-mask": ["data.tokenizer.vocab_size=300", "model.d_model=24", "model.encoder.layers=1", "data.seq_len=16"],
    "translate": [
        *("data.tokenizer.vocab_size=300", "model.d_model=16", "model.encoder.layers=1", "model.decoder.layers=1"),
        *("model.encoder.block.ffn.hidden=32", "model.decoder.block.ffn.hidden=32", "eval.num_exact_match=4"),
    ],
}


@pytest.mark.parametrize("name", SMALL_OVERRIDES)
def test_small_preset_trains_and_opens_in_transformers(name: str, text: Path, sums: Path, tmp_path: Path) -> None:
    overrides = [
        *SMALL_OVERRIDES[name],
        "training.max_steps=2",
        "training.batch_size=4",
        "training.grad_accum_steps=2",
        "eval.num_sequences=4",
        "data.validation_split=0.3",
        "eval.sample_prompt=1 [MASK] 2" if name == "fill-mask" else "eval.sample_prompt=1 and 2",
    ]
    texts = [sums if name == "translate" else text]
    run = train(name, tmp_path / "run", overrides=overrides, texts=texts, device="cpu")
    assert read_evals(run.directory)[-1]["sample"]
    auto = {"translate": transformers.AutoModelForSeq2SeqLM, "fill-mask": transformers.AutoModelForMaskedLM}
    reference = auto.get(name, transformers.AutoModelForCausalLM).from_pretrained(run.model_directory).eval()
    model = ct.load(run.directory).model.eval()
    tokens = torch.tensor([[5, 40, 7, 99, 12]])
    with torch.no_grad():
        if name == "translate":
            expected = reference(input_ids=tokens, decoder_input_ids=tokens).logits
            torch.testing.assert_close(model(tokens, tokens), expected, rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=1e-4, atol=1e-5)


def test_recipe_without_text_is_an_error(tmp_path: Path) -> None:
    message = (
        r"no data \(.*\) \(.tsv or .jsonl, with a source and a target in each row\); .*: cutaway train RECIPE --data"
    )
    with pytest.raises(CutawayError, match=message):
        prepare_trainer(load_recipe("translate"), tmp_path / "run", device="cpu")


def test_overrides_of_list_items_and_texts() -> None:
    overridden = load_recipe("tiny-dates", ["data.sources.0.weight=2", "data.sources.0.path=mine.jsonl"])
    assert (overridden.data.sources[0].weight, overridden.data.sources[0].path) == (2.0, "mine.jsonl")
    listed = load_recipe("python-stdlib", ['data.sources=[{path="a"}, {path="b"}]'])
    assert [source.path for source in listed.data.sources] == ["a", "b"]
    with_texts = load_recipe("tiny-dates", texts=["a.jsonl", Path("b.jsonl")])
    assert [(source.path, source.target_column, source.group_column) for source in with_texts.data.sources] == [
        ("a.jsonl", "iso", "iso"),
        ("b.jsonl", "iso", "iso"),
    ]
    assert load_recipe({}, texts=["x"]).data.sources[0].path == "x"
    for override in ("data.sources.1.path=x", "data.sources.first.path=x"):
        with pytest.raises(CutawayError, match="is not an index of a list of 1 items; use an index"):
            load_recipe("tiny-dates", [override])


@pytest.mark.unchecked
def test_text_option(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = (
        *SMALL_OVERRIDES["gpt2-124m"],
        "training.max_steps=1",
        "training.batch_size=2",
        "data.validation_split=0.3",
    )
    options = [f"--set={override}" for override in overrides]
    arguments = ["train", "gpt2-124m", "--text", str(text), "--out", str(tmp_path / "run"), "--device", "cpu", *options]
    monkeypatch.setattr(sys, "argv", ["cutaway", *arguments, "--set=training.precision=fp32"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 0, capsys.readouterr().err
    metadata = json.loads((tmp_path / "run" / "run.json").read_text())
    assert metadata["recipe"]["data"]["sources"][0]["path"] == str(text)


def test_tsv_with_and_without_a_header(tmp_path: Path) -> None:
    plain, named = tmp_path / "plain.tsv", tmp_path / "named.tsv"
    plain.write_text("ein Haus\ta house\tx\r\nleer\t\nallein\nzwei\ttwo\n")
    named.write_text("id\ten\tde\n1\ta house\tein Haus\n2\ttwo\tzwei\n")
    expected = [Document("ein Haus", "a house"), Document("zwei", "two")]
    skipped = SkippedDocuments()
    assert list(read_documents(text_source(plain, "de", "en"), skipped)) == expected
    assert skipped.counts == {"empty": 1, "missing column": 1}
    assert list(read_documents(text_source(named, "de", "en"))) == expected


# Source-target pairs


def test_exact_match_equals_evaluate_seq2seq(sums: Path, tmp_path: Path) -> None:
    recipe = seq2seq_recipe(
        sums,
        model="tiny-t5",
        optimizer={"lr": 5e-3},
        training={"max_steps": 30, "batch_size": 16},
        eval={"interval": 30, "num_exact_match": 20},
    )
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    trainer.train()
    [metrics] = read_evals(tmp_path / "run")
    rows = trainer.data.validation.get_rows(range(20))
    pairs = [tuple(BYTES.decode(ids.tolist()) for ids in row) for row in rows]
    score = evaluate_seq2seq(ct.load(tmp_path / "run"), pairs)
    assert metrics["exact_match"] == pytest.approx(score.accuracy)
    assert metrics["sample"].splitlines()[0].startswith(f"{pairs[0][0]} → ")
    assert len(metrics["sample"].splitlines()) == 3


def test_transformers_generates_the_same_from_the_exported_model(sums: Path, tmp_path: Path) -> None:
    """The decoder start token is exported with the weights."""
    run = train(seq2seq_recipe(sums, model="tiny-t5"), tmp_path / "run", device="cpu")
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(run.model_directory).eval()
    tokens = torch.tensor([BYTES.encode("3 and 4")])
    expected = reference.generate(tokens, max_new_tokens=6, do_sample=False, num_beams=1)[0].tolist()
    [completion] = ct.generate(ct.load(run.directory), "3 and 4", max_new_tokens=6)
    assert expected == [BYTES.bos_token_id, *completion.tokens]


def test_prefix_lm_loss_is_over_target_tokens_only(tmp_path: Path, sums: Path) -> None:
    """The loss of a padded batch equals the mean over target tokens with each pair computed alone."""
    recipe = seq2seq_recipe(sums, model="tiny-gpt", objective={"kind": "prefix-lm"})
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    batch = trainer.data.train.get_batch(0, 4)
    total, num_targets = 0.0, 0
    for source, target in trainer.data.train.get_rows(range(4)):
        tokens = torch.from_numpy(np.concatenate([source, target])).unsqueeze(0)
        logits = trainer.model(tokens[:, :-1])[0, len(source) - 1 :]
        total += F.cross_entropy(logits, torch.from_numpy(target), reduction="sum").item()
        num_targets += len(target)
        assert target[-1] == BYTES.eos_token_id
    assert float(trainer.objective_fn(batch, 0).weights.sum()) == num_targets
    assert float(trainer.train_step(0)["loss"]) == pytest.approx(total / num_targets, abs=1e-6)


def test_prefix_may_be_bidirectional() -> None:
    tokens, lengths = torch.tensor([[1, 2, 3, 4, 0], [1, 2, 3, 4, 5]]), torch.tensor([2, 3])
    mask = torch.tensor([[True] * 4 + [False], [True] * 5])
    bidirectional, causal = (
        prefix_lm(tokens, None, lengths, mask=mask, bidirectional=bidirectional) for bidirectional in (True, False)
    )
    assert bidirectional.model_kwargs["prefix_lengths"] is lengths
    assert not causal.model_kwargs
    assert bidirectional.weights.tolist() == causal.weights.tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_prefix_dataset_removes_eos_of_the_source_and_bos_of_the_target(sums: Path, tmp_path: Path) -> None:
    source = text_source(sums, "source", "target")
    split = prepare_data([source], BYTES, tmp_path / "data", validation_split=0.2, seed=0).train
    first_target_id = int(split.tokens[int(split.targets[0])])  # type: ignore[index]
    dataset = PrefixDataset(split, 64, 0, bos_id=None, eos_id=None, pad_id=0, shuffle=False)
    unchanged = dataset.get_rows([0])[0]
    eos_id = int(unchanged[0][-1])
    dataset = PrefixDataset(split, 64, 0, bos_id=first_target_id, eos_id=eos_id, pad_id=0, shuffle=False)
    stripped = dataset.get_rows([0])[0]
    assert stripped[0].tolist() == unchanged[0][:-1].tolist()
    assert stripped[1].tolist() == unchanged[1][1:].tolist()


# Masked language modeling


def test_mask_token_includes_the_space_before_it() -> None:
    for tokenizer in (
        byte_tokenizer(special_tokens=(*DEFAULT_SPECIAL_TOKENS, MASK_TOKEN)),
        train_bpe(["import os\n"] * 9, 300, special_tokens=(*DEFAULT_SPECIAL_TOKENS, MASK_TOKEN)),
    ):
        assert tokenizer.mask_token_id == tokenizer.vocab_size - 1
        assert tokenizer.encode("import [MASK]") == [*tokenizer.encode("import"), tokenizer.mask_token_id]


def test_encoder_learns_to_fill_masks(text: Path, tmp_path: Path) -> None:
    recipe = SMALL | {
        "model": "tiny-bert",
        "objective": {"kind": "masked-lm"},
        "optimizer": {"lr": 3e-3},
        "data": {"seq_len": 64, "validation_split": 0.2, "sources": [{"path": str(text)}]},
        "training": {"max_steps": 40, "batch_size": 8},
        "eval": {"interval": 20, "num_sequences": 8, "sample_prompt": "1[MASK]and 2 make 3"},
    }
    run = train(recipe, tmp_path / "run", device="cpu")
    rows = read_evals(run.directory)
    assert rows[-1]["accuracy"] > max(0.15, rows[0]["accuracy"] - 0.1)
    checkpoint = ct.load(run.directory)
    assert checkpoint.tokenizer is not None
    [[best, *_]] = fill_mask(checkpoint.model, checkpoint.tokenizer, ["1[MASK]and 2 make 3"])[0]
    assert best.text == rows[-1]["sample"].splitlines()[0]


def test_tokenizer_without_mask_token_is_an_error(text: Path, tmp_path: Path) -> None:
    BYTES.save(tmp_path / "bytes")
    tokenizer = {"kind": "pretrained", "path": str(tmp_path / "bytes")}
    recipe = SMALL | {"model": "tiny-bert", "objective": {"kind": "masked-lm"}}
    recipe |= {"data": SMALL["data"] | {"sources": [{"path": str(text)}], "tokenizer": tokenizer}}
    with pytest.raises(CutawayError, match="needs a mask token, but the tokenizer has none"):
        prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")


# Fine-tuning


def save_gpt2(directory: Path) -> Path:
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=264, eos_token_id=257, **shape)).save_pretrained(
        directory
    )
    BYTES.save(directory)
    return directory


def save_t5(directory: Path) -> Path:
    config = transformers.T5Config(
        vocab_size=264,
        d_model=32,
        num_layers=2,
        num_heads=4,
        d_kv=8,
        d_ff=64,
        decoder_start_token_id=5,
        eos_token_id=257,
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(directory)
    BYTES.save(directory)
    return directory


def test_fine_tuned_decoder_opens_in_transformers(text: Path, tmp_path: Path) -> None:
    base = save_gpt2(tmp_path / "base")
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    recipe = SMALL | {"model": {"checkpoint": str(base)}, "data": SMALL["data"] | {"sources": [{"path": str(text)}]}}
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    base_model = ct.load(base).model
    tokens = torch.tensor([[5, 40, 7, 99, 12]])
    torch.testing.assert_close(trainer.model.eval()(tokens), base_model.eval()(tokens))
    trainer.train()
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    assert reference.config.vocab_size == 264
    with torch.no_grad():
        logits = trainer.model.eval()(tokens)
        torch.testing.assert_close(logits, reference(tokens).logits, rtol=1e-4, atol=1e-5)
        assert (logits - base_model(tokens)).abs().max() > 1e-3
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model").encode("a é") == BYTES.encode("a é")


def test_fine_tuned_encoder_decoder_keeps_its_decoder_start_token(sums: Path, tmp_path: Path) -> None:
    recipe = seq2seq_recipe(sums, model={"checkpoint": str(save_t5(tmp_path / "base"))})
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    assert (trainer.data.train.get_batch(0, 4).target[:, 0] == 5).all()
    trainer.train()
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "model").eval()
    assert reference.config.decoder_start_token_id == 5
    tokens = torch.tensor([[5, 40, 7, 99, 12]])
    with torch.no_grad():
        expected = reference(input_ids=tokens, decoder_input_ids=tokens).logits
        torch.testing.assert_close(trainer.model.eval()(tokens, tokens), expected, rtol=1e-4, atol=1e-5)


def test_fine_tuning_resumes_without_the_base_checkpoint(text: Path, tmp_path: Path) -> None:
    recipe = SMALL | {"data": SMALL["data"] | {"sources": [{"path": str(text)}]}}
    base = save_gpt2(tmp_path / "base")
    uninterrupted = train(recipe | {"model": {"checkpoint": str(base)}}, tmp_path / "uninterrupted", device="cpu")
    shutil.copytree(base, tmp_path / "copy")
    recipe_of_copy = recipe | {"model": {"checkpoint": str(tmp_path / "copy")}}
    prepare_trainer(load_recipe(recipe_of_copy), tmp_path / "without checkpoint", device="cpu")
    assert resume_trainer(tmp_path / "without checkpoint", device="cpu").global_step == 0
    trainer = prepare_trainer(load_recipe(recipe_of_copy), tmp_path / "with checkpoint", device="cpu")
    train_step = trainer.train_step

    def train_step_with_stop(step: int) -> dict[str, Any]:
        if step == 3:
            trainer.stop_requested.set()
        return train_step(step)

    trainer.train_step = train_step_with_stop  # type: ignore[method-assign]
    trainer.train()
    shutil.rmtree(tmp_path / "copy")
    resumed = resume(tmp_path / "with checkpoint", device="cpu")
    weights = [ct.load(run.directory).model.state_dict() for run in (uninterrupted, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with pytest.raises(CutawayError, match=r"the base checkpoint that .* fine-tunes is missing"):
        resume_trainer(tmp_path / "without checkpoint", device="cpu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.kind=masked-lm"], "form encoder, but model.form is decoder"),
        (["data.tokenizer={kind='bpe', vocab_size=290}"], "remove data.tokenizer"),
        (["model.checkpoint=/nowhere"], "'/nowhere' does not exist"),
        (["model.d_model=3"], "d_model"),
    ],
)
def test_recipe_that_does_not_fit_the_checkpoint_is_an_error(
    overrides: list[str], message: str, text: Path, tmp_path: Path
) -> None:
    data = SMALL["data"] | {"sources": [{"path": str(text)}]}
    recipe = SMALL | {"data": data, "model": {"checkpoint": str(save_gpt2(tmp_path / "base"))}}
    with pytest.raises(CutawayError, match=message):
        prepare_trainer(load_recipe(recipe, overrides), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
