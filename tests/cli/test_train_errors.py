"""Errors of `cutaway train` and `cutaway eval`: each names what is wrong and the nearest thing that works."""

import json
from pathlib import Path

import pytest
from support.cli_runner import CliRunner

pytestmark = pytest.mark.unchecked

TEXT = "".join(
    f"{number} and {number} make {2 * number}, says the {'cat' if number % 3 else 'dog'}.\n" for number in range(300)
)
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
FINE_TUNE = '[model]\ncheckpoint = ""\n[data]\nsources = [{ path = "" }]\n'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a text, data files and recipes of a newcomer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    contents = {
        "my.txt": TEXT,
        "short.txt": "too short\n",
        "same.txt": "x\n" * 4000,
        "empty.txt": "",
        "table.csv": "text,label\nhello,1\n",
        "rows.json": '[{"text": "hello"}]',
        "chat.jsonl": json.dumps(CHAT) + "\n",
        "two.jsonl": json.dumps({"title": "a", "body": "b"}) + "\n",
        "one.jsonl": json.dumps({"text": "only row " * 300}) + "\n",
        "pairs.jsonl": json.dumps({"text": "a", "target": "b"}) + "\n",
        "broken.jsonl": "{not json\n",
        "recipe.yaml": "model: gpt2\n",
        "bad.toml": "[model\n",
        "tune.toml": FINE_TUNE,
        "lora.toml": FINE_TUNE.replace('checkpoint = ""', 'checkpoint = ""\nlora = { r = 8 }'),
        "table.toml": "[model]\nform = 'decoder'\nd_model = 32\nvocab_size = 100\n[model.decoder]\nlayers = 1\n"
        "[model.decoder.block]\nattention = { heads = 2 }\n[data]\nsources = [{ path = 'my.txt' }]\nseq_len = 32\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "binary.bin").write_bytes(b"\x7fELF\xff\x00\xfe" * 500)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "folder").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text('{"model_type": "gpt2"}')
    return tmp_path


CASES = [
    # The first argument
    ("train", "pass a text with --text FILE, or a recipe"),
    ("train my.txt", "train on its text with: cutaway train --text my.txt"),
    ("train folder", "train on its files with: cutaway train --text folder"),
    ("train checkpoint", "is a model, not a recipe; fine-tune it with --base checkpoint"),
    ("train model.gguf", "is a model, not a recipe; fine-tune it with --base model.gguf"),
    ("train recipe.yaml", "recipes are .toml or .json files"),
    ("train bad.toml", "is not valid TOML"),
    ("train missing.toml", "missing.toml' does not exist"),
    ("train tiny-pyton", "did you mean 'tiny-python'?"),
    ("train gpt2", "train it with: cutaway train python-stdlib --set model=gpt2"),
    ("train tiny-dates --resume runs/x", "the recipe 'tiny-dates' and --resume cannot be combined"),
    # Fine-tuning
    ("train tune.toml", "cutaway train tune.toml --base SOURCE --data FILE"),
    ("train tune.toml --base tiny-english", "cutaway train tune.toml --base tiny-english --data FILE"),
    ("train tune.toml --data my.txt", "cutaway train tune.toml --base SOURCE --data my.txt"),
    ("train tune.toml --base gpt2 --data my.txt", "is a preset, which has no trained weights to fine-tune; pass a"),
    ("train tune.toml --base nowhere/model --data my.txt", "check the spelling and the network"),
    ("train tune.toml --base missing-directory --data my.txt", "pass a model directory, a .gguf file or a Hub id"),
    ("train tune.toml --base checkpoint --data my.txt", "add the *.safetensors files"),
    ("train tune.toml --base tiny-english-encoder --data my.txt", "requires a model of form decoder"),
    ("train tune.toml --base tiny-english --data nothing.txt", "'nothing.txt' does not exist"),
    ("train --text my.txt --base tiny-english", "cutaway train RECIPE --base tiny-english --data my.txt"),
    ("train translate", "cutaway train translate --data FILE"),
    # Texts
    ("train --text nothing.txt", "'nothing.txt' does not exist"),
    ("train --text folder", "has no files"),
    ("train --text empty.txt", "contains no text: 1 × empty"),
    ("train --text short.txt", "has 10 bytes of text, which is too little"),
    ("train --text same.txt", "2 of them different"),
    ("train --text one.jsonl", "add text, or divide it into more documents"),
    ("train --text binary.bin", "contains no text: 1 × invalid UTF-8"),
    ("train --text table.csv", "write its texts to a .jsonl file"),
    ("train --text rows.json", "write its texts to a .jsonl file"),
    ("train --text broken.jsonl", "contains no text: 1 × invalid JSON"),
    ("train --text chat.jsonl", "data for fine-tuning a checkpoint"),
    ("train --text two.jsonl", "columns: title, body); pass --text-column"),
    ("train --text two.jsonl --text-column boddy", "'boddy' is missing"),
    ("train --text my.txt --minutes 0", "minutes is 0"),
    ("train python-stdlib --minutes 3", "set training.max_steps of the recipe instead"),
    ("train --text my.txt --out full", "'full' is not empty"),
    ("train --text my.txt --out my.txt", "'my.txt' is a file"),
    # Keys and values
    ("train lora.toml --base tiny-english --data my.txt", "model: unknown key 'lora'"),
    ("train --text my.txt --set training.lr=1", "did you mean 'optimizer.lr'?"),
    ("train --text my.txt --set learning_rate=1", "did you mean 'optimizer.lr'?"),
    ("train --text my.txt --set training.epochs=3", "did you mean 'num_epochs'?"),
    ("train --text my.txt --set per_device_train_batch_size=8", "did you mean 'training.batch_size'?"),
    ("train --text my.txt --set training.bf16=true", "did you mean 'training.precision'?"),
    ("train --text my.txt --set max_length=8", "did you mean 'data.seq_len'?"),
    ("train --text my.txt --set eval.patience=2", "did you mean 'eval.early_stopping.patience'?"),
    ("train --text my.txt --set save_steps=2", "did you mean 'checkpoint.interval'?"),
    ("train --text my.txt --set training.max_step=2", "did you mean 'max_steps'?"),
    ("train --text my.txt --set training.max_steps", "is not key=value"),
    ("train --text my.txt --set training.max_steps=many", "training.max_steps: "),
    ("train --text my.txt --set training.batch_size=0", "training.batch_size: "),
    ("train --text my.txt --set optimizer.kind=adam", "allowed here: adamw"),
    ("train --text my.txt --set optimizer.lr=-1", "optimizer.lr: "),
    ("train --text my.txt --set data.seq_len=4000", "use more text, or lower seq_len"),
    ("train --text my.txt --set model=gpt5", "did you mean gpt2"),
    ("train --text my.txt --set model.d_model=100000000", "are free; use a smaller model"),
    ("train --text my.txt --set objective.kind=masked-lm", "requires a model of form encoder"),
    ("train --text my.txt --set objective.kind=seq2seq", "requires a model of form encoder-decoder"),
    ("train --text my.txt --set schedule.warmup_steps=100000", "warmup_steps"),
    ("train table.toml", "remove model.vocab_size, so that it follows from the tokenizer"),
    ("train --text my.txt --device gpu", "use cpu or cuda"),
    (
        "train tune.toml --base tiny-english --data my.txt --set eval.general_text=x",
        "eval.general_text: 'x' does not exist",
    ),
    # Runs
    ("train --resume folder", "has no run.json"),
    ("train --status nowhere", "has no run.json"),
    ("train --resume folder --text my.txt", "a resumed run uses its own recipe"),
    ("train tune.toml --dry-run", "cutaway train tune.toml --base SOURCE --data FILE"),
    ("train tiny-dates --world-size 2", "add --dry-run, or start a training on several processes with torchrun"),
    ("train tiny-dates --dry-run --out x", "leave out --out"),
    # eval
    ("eval tiny-english", "pass --text FILE"),
    ("eval tiny-english --text nothing.txt", "'nothing.txt' does not exist"),
    ("eval tiny-english --data nothing.jsonl", "'nothing.jsonl' does not exist"),
    ("eval tiny-english --data my.txt", "not a file with records"),
    ("eval tiny-english --data two.jsonl", "a record has question and answer"),
    ("eval tiny-english --data chat.jsonl", "no chat template"),
    ("eval tiny-english --data broken.jsonl", "invalid JSON"),
    ("eval tiny-english --text two.jsonl", "set --text-column"),
    ("eval tiny-englsh --text my.txt", "did you mean 'tiny-english'?"),
    ("eval tiny-english --text my.txt --max-new-tokens 3", "--max-new-tokens applies to --data only"),
]


@pytest.mark.parametrize(("command", "message"), CASES)
def test_error_names_what_is_wrong_and_what_works(command: str, message: str, files: Path, run_cli: CliRunner) -> None:
    *before, error = run_cli(*command.split(), code=2).splitlines()
    assert error.startswith("cutaway: ")
    assert message in error
    assert not before or "about" in before[0] or "estimated memory" in before[0]  # the chosen recipe
    assert not (files / "runs").exists()
