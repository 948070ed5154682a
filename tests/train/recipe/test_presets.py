"""Shipped recipes, pairs, hidden tokens, prompts and answers, and training that goes on from a checkpoint."""

import json
import re
import shutil
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

import cutaway as ct
from cutaway.cli import main
from cutaway.errors import CutawayError
from cutaway.evaluate import evaluate_seq2seq
from cutaway.generate.fill_mask import fill_mask
from cutaway.tokenizer import byte_tokenizer, train_bpe
from cutaway.tokenizer.train import DEFAULT_SPECIAL_TOKENS, MASK_TOKEN
from cutaway.train.checkpoint.base_checkpoint import resolve_export_family
from cutaway.train.data import dates
from cutaway.train.data.datasets import PrefixDataset
from cutaway.train.data.documents import Document, SkippedDocuments, TextSource, read_documents
from cutaway.train.data.prepare import prepare_data
from cutaway.train.objectives import prefix_lm
from cutaway.train.recipe.load import list_recipes, load_recipe
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


def paired(path: Path, **more: Any) -> dict[str, Any]:
    sources = [{"path": str(path), "text_column": "source", "target_column": "target"}]
    return SMALL | {"objective": {"kind": "seq2seq"}, "data": SMALL["data"] | {"sources": sources}} | more


def read_evals(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval_loss" in row]


# Dates


def test_no_way_of_writing_a_date_means_another() -> None:
    """In any language: months' names and the order of numbers never stand for two dates."""
    said: dict[str, set[date]] = {}
    for way in dates.list_date_formats():
        bare = way._replace(pattern=re.sub("EEEE|cccc", "", way.pattern))  # days of the week must not be needed
        for month in range(1, 13):
            for day in (date(2021, month, 5), date(2021, month, 11)):
                said.setdefault(dates.format_date(day, bare).lower().strip(), set()).add(day)
    assert len(said) > 1500
    assert not {text: days for text, days in said.items() if len(days) > 1}


def test_dates_are_the_same_every_time_and_of_a_long_time() -> None:
    some = list(dates.generate_pairs(300, 8))
    assert some == list(dates.generate_pairs(300, 8))
    years = {int(iso[:4]) for _, iso in some}
    assert min(years) < 1300
    assert max(years) > 2700
    texts = dict(some)
    assert all(date.fromisoformat(iso).isoformat() == iso for iso in texts.values())
    scripts = "".join(texts)
    assert all(re.search(pattern, scripts) for pattern in ("[а-я]", "年", "[ا-ي]", "[α-ω]", "th"))


def test_a_date_is_learned_from_or_looked_at_in_all_languages(tmp_path: Path) -> None:
    path = tmp_path / "dates.jsonl"
    rows = [json.dumps({"text": text, "iso": iso}) for text, iso in dates.generate_pairs(200, 6)]
    path.write_text("\n".join(rows))
    source = TextSource(path, "text", "iso", group_column="iso")
    found = prepare_data([source], BYTES, tmp_path / "data", validation_split=0.2, seed=0)
    sides = []
    for split in (found.train, found.validation):
        assert split.targets is not None
        edges = zip(split.targets, split.offsets[1:], strict=True)
        sides.append({BYTES.decode(split.tokens[a:b].tolist()) for a, b in edges})
    assert not sides[0] & sides[1]
    assert 20 < len(sides[1]) < 60
    assert found.validation.num_documents > 4 * len(sides[1])


def test_dates_need_babel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(CutawayError, match=r"pip install 'cutaway\[dates\]'"):
        prepare_trainer(load_recipe("dates"), tmp_path / "run", device="cpu")


# Recipes


def test_recipes_say_what_they_mean() -> None:
    assert load_recipe("gpt2-124m").data.seq_len == 1024
    built = {name: ct.build(load_recipe(name).model, device="meta") for name in list_recipes()}  # type: ignore[arg-type]
    counts = {name: sum(each.numel() for each in model.parameters()) for name, model in built.items()}
    assert counts["gpt2-124m"] == sum(each.numel() for each in ct.build("gpt2", device="meta").parameters())
    assert counts["llama-1b"] == sum(each.numel() for each in ct.build("llama-3.2-1b", device="meta").parameters())
    families = {name: resolve_export_family(model.config, None) for name, model in built.items()}
    assert "cutaway" not in families.values()
    assert (
        families.items()
        >= {
            "dates": "pegasus",
            "fill-mask": "modernbert",
            "gpt2-124m": "gpt2",
            "llama-1b": "llama",
            "python-stdlib": "llama",
            "translate": "marian",
        }.items()
    )


def test_translating_is_as_in_2017() -> None:
    from cutaway.train.optim.lr_scheduler import lr_factor

    made = load_recipe("translate")
    for step in (0, 1234, 3999, 4000, 50_000):
        n = step + 1
        paper = 512**-0.5 * min(n**-0.5, n * 4000**-1.5)
        rate = made.optimizer.lr * lr_factor(made.schedule, step, made.training.max_steps)
        assert rate == pytest.approx(paper, rel=1e-12)
    assert (made.optimizer.betas, made.optimizer.eps, made.optimizer.weight_decay) == ((0.9, 0.98), 1e-9, 0.0)  # type: ignore[union-attr]


SHRUNK = {
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


@pytest.mark.parametrize("name", SHRUNK)
def test_a_small_one_of_each_is_trained_and_opened_by_others(name: str, text: Path, sums: Path, tmp_path: Path) -> None:
    few = [
        "training.max_steps=2",
        "training.batch_size=4",
        "training.grad_accum_steps=2",
        "eval.num_sequences=4",
        "data.validation_split=0.3",
    ]
    how = [
        *SHRUNK[name],
        *few,
        "eval.sample_prompt=1 <mask> 2" if name == "fill-mask" else "eval.sample_prompt=1 and 2",
    ]
    texts = [sums if name == "translate" else text]
    run = train(name, tmp_path / "run", overrides=how, texts=texts, device="cpu")
    assert read_evals(run.directory)[-1]["sample"]
    auto = {"translate": transformers.AutoModelForSeq2SeqLM, "fill-mask": transformers.AutoModelForMaskedLM}
    theirs = auto.get(name, transformers.AutoModelForCausalLM).from_pretrained(run.model_directory).eval()
    ours = ct.load(run.directory).model.eval()
    tokens = torch.tensor([[5, 40, 7, 99, 12]])
    with torch.no_grad():
        if name == "translate":
            wanted = theirs(input_ids=tokens, decoder_input_ids=tokens).logits
            torch.testing.assert_close(ours(tokens, tokens), wanted, rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_a_recipe_without_text_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match=r"no text of its own; name yours with --text, files with a source and"):
        prepare_trainer(load_recipe("translate"), tmp_path / "run", device="cpu")


def test_values_in_lists_are_set_and_texts_are_named() -> None:
    changed = load_recipe("dates", ["data.sources.0.weight=2", "data.sources.0.path=mine.jsonl"])
    assert (changed.data.sources[0].weight, changed.data.sources[0].path) == (2.0, "mine.jsonl")
    listed = load_recipe("python-stdlib", ['data.sources=[{path="a"}, {path="b"}]'])
    assert [source.path for source in listed.data.sources] == ["a", "b"]
    named = load_recipe("dates", texts=["a.jsonl", Path("b.jsonl")])
    assert [(each.path, each.target_column, each.group_column) for each in named.data.sources] == [
        ("a.jsonl", "iso", "iso"),
        ("b.jsonl", "iso", "iso"),
    ]
    assert load_recipe({}, texts=["x"]).data.sources[0].path == "x"
    for wrong in ("data.sources.1.path=x", "data.sources.first.path=x"):
        with pytest.raises(CutawayError, match="of a list of 1; count from 0"):
            load_recipe("dates", [wrong])


@pytest.mark.unchecked
def test_text_is_named_on_the_command_line(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [
        f"--set={each}"
        for each in (*SHRUNK["gpt2-124m"], "training.max_steps=1", "training.batch_size=2", "data.validation_split=0.3")
    ]
    arguments = ["train", "gpt2-124m", "--text", str(text), "--out", str(tmp_path / "run"), "--device", "cpu", *few]
    monkeypatch.setattr(sys, "argv", ["cutaway", *arguments, "--set=training.precision=fp32"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, capsys.readouterr().err
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["recipe"]["data"]["sources"][0]["path"] == str(text)


def test_a_tsv_has_names_or_an_order(tmp_path: Path) -> None:
    plain, named = tmp_path / "plain.tsv", tmp_path / "named.tsv"
    plain.write_text("ein Haus\ta house\tx\r\nleer\t\nallein\nzwei\ttwo\n")
    named.write_text("id\ten\tde\n1\ta house\tein Haus\n2\ttwo\tzwei\n")
    wanted = [Document("ein Haus", "a house"), Document("zwei", "two")]
    skipped = SkippedDocuments()
    assert list(read_documents(TextSource(plain, "de", "en"), skipped)) == wanted
    assert skipped.counts == {"empty": 1, "missing column": 1}
    assert list(read_documents(TextSource(named, "de", "en"))) == wanted


# Pairs


def test_answers_at_a_look_are_what_eval_measures(sums: Path, tmp_path: Path) -> None:
    how = paired(sums, model="tiny-t5", optimizer={"lr": 5e-3}, training={"max_steps": 30, "batch_size": 16})
    trainer = prepare_trainer(
        load_recipe(how | {"eval": {"interval": 30, "num_exact_match": 20}}), tmp_path / "run", device="cpu"
    )
    trainer.train()
    [row] = read_evals(tmp_path / "run")
    held = [tuple(BYTES.decode(part.tolist()) for part in pair) for pair in trainer.data.validation.get_rows(range(20))]
    score = evaluate_seq2seq(ct.load(tmp_path / "run"), held)
    assert row["exact_match"] == pytest.approx(score.accuracy)
    assert row["sample"].splitlines()[0].startswith(f"{held[0][0]} → ")
    assert len(row["sample"].splitlines()) == 3


def test_others_answer_alike(sums: Path, tmp_path: Path) -> None:
    """What a target begins with is written beside the weights."""
    run = train(paired(sums, model="tiny-t5"), tmp_path / "run", device="cpu")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(run.model_directory).eval()
    tokens = torch.tensor([BYTES.encode("3 and 4")])
    wanted = theirs.generate(tokens, max_new_tokens=6, do_sample=False, num_beams=1)[0].tolist()
    [ours] = ct.generate(ct.load(run.directory), "3 and 4", max_new_tokens=6)
    assert wanted == [BYTES.bos_token_id, *ours.tokens]


def test_a_prompt_is_read_and_only_the_answer_is_told(tmp_path: Path, sums: Path) -> None:
    """The loss of a padded batch ≡ the mean over answers' tokens, each pair read alone."""
    how = paired(sums, model="tiny-gpt", objective={"kind": "prefix-lm"})
    trainer = prepare_trainer(load_recipe(how), tmp_path / "run", device="cpu")
    batch = trainer.data.train.get_batch(0, 4)
    nats, told = 0.0, 0
    for source, target in trainer.data.train.get_rows(range(4)):
        whole = torch.from_numpy(np.concatenate([source, target])).unsqueeze(0)
        logits = trainer.model(whole[:, :-1])[0, len(source) - 1 :]
        nats += F.cross_entropy(logits, torch.from_numpy(target), reduction="sum").item()
        told += len(target)
        assert target[-1] == BYTES.eos_token_id
    assert float(trainer.objective_fn(batch, 0).weights.sum()) == told
    assert float(trainer.train_step(0)["loss"]) == pytest.approx(nats / told, abs=1e-6)


def test_a_prompt_may_be_seen_both_ways() -> None:
    tokens, lengths = torch.tensor([[1, 2, 3, 4, 0], [1, 2, 3, 4, 5]]), torch.tensor([2, 3])
    mask = torch.tensor([[True] * 4 + [False], [True] * 5])
    both, causal = (prefix_lm(tokens, None, lengths, mask=mask, bidirectional=way) for way in (True, False))
    assert both.model_kwargs["prefix_lengths"] is lengths
    assert not causal.model_kwargs
    assert both.weights.tolist() == causal.weights.tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_an_answer_has_no_beginning_of_its_own(sums: Path, tmp_path: Path) -> None:
    found = prepare_data([TextSource(sums, "source", "target")], BYTES, tmp_path / "data", validation_split=0.2, seed=0)
    first = int(found.train.tokens[int(found.train.targets[0])])  # type: ignore[index]
    plain = PrefixDataset(found.train, 64, 0, bos_id=None, eos_id=None, pad_id=0, shuffle=False).get_rows([0])[0]
    bare = PrefixDataset(found.train, 64, 0, bos_id=first, eos_id=int(plain[0][-1]), pad_id=0, shuffle=False).get_rows(
        [0]
    )[0]
    assert bare[0].tolist() == plain[0][:-1].tolist()
    assert bare[1].tolist() == plain[1][1:].tolist()


# Hidden tokens


def test_a_mask_takes_the_space_before_it() -> None:
    for tokenizer in (
        byte_tokenizer(special_tokens=(*DEFAULT_SPECIAL_TOKENS, MASK_TOKEN)),
        train_bpe(["import os\n"] * 9, 300, special_tokens=(*DEFAULT_SPECIAL_TOKENS, MASK_TOKEN)),
    ):
        assert tokenizer.mask_token_id == tokenizer.vocab_size - 1
        assert tokenizer.encode("import <mask>") == [*tokenizer.encode("import"), tokenizer.mask_token_id]


def test_an_encoder_learns_to_fill_masks(text: Path, tmp_path: Path) -> None:
    how = SMALL | {"model": "tiny-bert", "objective": {"kind": "masked-lm"}, "optimizer": {"lr": 3e-3}}
    how |= {"data": {"seq_len": 64, "validation_split": 0.2, "sources": [{"path": str(text)}]}}
    how |= {
        "training": {"max_steps": 40, "batch_size": 8},
        "eval": {"interval": 20, "num_sequences": 8, "sample_prompt": "1<mask>and 2 make 3"},
    }
    run = train(how, tmp_path / "run", device="cpu")
    rows = read_evals(run.directory)
    assert rows[-1]["accuracy"] > max(0.15, rows[0]["accuracy"] - 0.1)
    found = ct.load(run.directory)
    assert found.tokenizer is not None
    [[best, *_]], [shown, *_] = (
        fill_mask(found.model, found.tokenizer, ["1<mask>and 2 make 3"])[0],
        [rows[-1]["sample"].splitlines()[0]],
    )
    assert best.text == shown


def test_a_tokenizer_without_a_mask_is_refused(text: Path, tmp_path: Path) -> None:
    BYTES.save(tmp_path / "bytes")
    tokenizer = {"kind": "pretrained", "path": str(tmp_path / "bytes")}
    how = SMALL | {"model": "tiny-bert", "objective": {"kind": "masked-lm"}}
    how |= {"data": SMALL["data"] | {"sources": [{"path": str(text)}], "tokenizer": tokenizer}}
    with pytest.raises(CutawayError, match="behind a mask token, and this tokenizer has none"):
        prepare_trainer(load_recipe(how), tmp_path / "run", device="cpu")


# Going on from a checkpoint


def gpt2(directory: Path) -> Path:
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=264, eos_token_id=257, **shape)).save_pretrained(
        directory
    )
    BYTES.save(directory)
    return directory


def t5(directory: Path) -> Path:
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


def test_a_decoder_of_others_learns_more_and_goes_back(text: Path, tmp_path: Path) -> None:
    base = gpt2(tmp_path / "base")
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    how = SMALL | {"model": {"checkpoint": str(base)}, "data": SMALL["data"] | {"sources": [{"path": str(text)}]}}
    trainer = prepare_trainer(load_recipe(how), tmp_path / "run", device="cpu")
    first = ct.load(base).model
    tokens = torch.tensor([[5, 40, 7, 99, 12]])
    torch.testing.assert_close(trainer.model.eval()(tokens), first.eval()(tokens))
    trainer.train()
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    assert theirs.config.vocab_size == 264
    with torch.no_grad():
        now = trainer.model.eval()(tokens)
        torch.testing.assert_close(now, theirs(tokens).logits, rtol=1e-4, atol=1e-5)
        assert (now - first(tokens)).abs().max() > 1e-3
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model").encode("a é") == BYTES.encode("a é")


def test_an_encoder_decoder_keeps_what_its_targets_begin_with(sums: Path, tmp_path: Path) -> None:
    how = paired(sums, model={"checkpoint": str(t5(tmp_path / "base"))})
    trainer = prepare_trainer(load_recipe(how), tmp_path / "run", device="cpu")
    assert (trainer.data.train.get_batch(0, 4).target[:, 0] == 5).all()
    trainer.train()
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "model").eval()
    assert theirs.config.decoder_start_token_id == 5
    tokens = torch.tensor([[5, 40, 7, 99, 12]])
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, decoder_input_ids=tokens).logits
        torch.testing.assert_close(trainer.model.eval()(tokens, tokens), wanted, rtol=1e-4, atol=1e-5)


def test_a_run_goes_on_without_the_checkpoint_it_began_with(text: Path, tmp_path: Path) -> None:
    how = SMALL | {"data": SMALL["data"] | {"sources": [{"path": str(text)}]}}
    whole = train(how | {"model": {"checkpoint": str(gpt2(tmp_path / "base"))}}, tmp_path / "whole", device="cpu")
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    other = how | {"model": {"checkpoint": str(tmp_path / "copy")}}
    prepare_trainer(load_recipe(other), tmp_path / "early", device="cpu")
    assert resume_trainer(tmp_path / "early", device="cpu").global_step == 0
    trainer = prepare_trainer(load_recipe(other), tmp_path / "late", device="cpu")
    plain = trainer.train_step

    def step(number: int) -> dict[str, Any]:
        if number == 3:
            trainer.stop_requested.set()
        return plain(number)

    trainer.train_step = step  # type: ignore[method-assign]
    trainer.train()
    shutil.rmtree(tmp_path / "copy")
    run = resume(tmp_path / "late", device="cpu")
    weights = [ct.load(each.directory).model.state_dict() for each in (whole, run)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with pytest.raises(CutawayError, match="what it began with is gone"):
        resume_trainer(tmp_path / "early", device="cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["objective.kind=masked-lm"], "form encoder, and this one's is decoder"),
        (["data.tokenizer={kind='bpe', vocab_size=290}"], "leave data.tokenizer out"),
        (["model.checkpoint=/nowhere"], "'/nowhere' does not exist"),
        (["model.d_model=3"], "d_model"),
    ],
)
def test_what_does_not_fit_a_checkpoint_is_said(changes: list[str], said: str, text: Path, tmp_path: Path) -> None:
    data = SMALL["data"] | {"sources": [{"path": str(text)}]}
    how = SMALL | {"data": data, "model": {"checkpoint": str(gpt2(tmp_path / "base"))}}
    with pytest.raises(CutawayError, match=said):
        prepare_trainer(load_recipe(how, changes), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
