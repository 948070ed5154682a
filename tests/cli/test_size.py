"""`cutaway size` as a person and as a machine use it."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import CliRunner

import cutaway as ct
from cutaway.size import get_hardware, list_hardware, size
from cutaway.size.estimate import estimates_to_dict
from cutaway.size.memory_fit import fit_to_memory

pytestmark = pytest.mark.unchecked


@pytest.fixture
def run(run_cli: CliRunner) -> CliRunner:
    return partial(run_cli, "size")


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def one_line(text: str) -> str:
    return " ".join(text.split())


# ---------------------------------------------------------------------------------------- for machines


def test_json_is_what_the_library_answers(run: CliRunner) -> None:
    told = json.loads(run("llama-3-8b", "--gpu", "h100", "--batch-size", "4", "--context", "4Ki", "--json"))
    question: dict[str, Any] = {"hardware": "h100", "batch_size": 4, "context": 4096}
    both = (size("llama-3-8b", mode=mode, **question) for mode in ("infer", "train"))
    assert told == {"source": "llama-3-8b"} | as_json(estimates_to_dict(*both))
    assert told["parameters"]["total"] == 8030261248


def test_every_option_reaches_the_question(run: CliRunner) -> None:
    written = (
        "--mode train --batch-size 64 --context 1.024k --source-len 256 --dtype bf16 --kv-cache-dtype int8"
        " --optimizer muon"
    )
    more = (
        "--activation-checkpointing full --kernel explicit --world-size 8 --parallel fsdp --train-tokens 15T"
        " --price-per-hour 2.5 --gpu NVIDIA-A100"
    )
    told = json.loads(run("t5-small", *written.split(), *more.split(), "--json"))
    answer = size(
        "t5-small",
        mode="train",
        batch_size=64,
        context=1024,
        source_len=256,
        dtype="bf16",
        kv_cache_dtype="int8",
        optimizer="muon",
        activation_checkpointing="full",
        kernel="explicit",
        world_size=8,
        parallel="fsdp",
        train_tokens=15 * 10**12,
        price_per_hour=2.5,
        hardware=get_hardware("a100"),
    )
    assert told == {"source": "t5-small"} | as_json(answer.to_dict())
    assert list(told["options"]) == ["train"]


def test_a_device_may_be_given_by_its_figures(run: CliRunner) -> None:
    figures = ("--bandwidth", "3.35TB/s", "--flops", "989TFLOPS", "--memory", "80GB")
    device = json.loads(run("gpt2", *figures, "--json"))["hardware"]
    assert (device["bandwidth"], device["flops"]["bf16"], device["memory"]) == (3.35e12, 989e12, 80 * 10**9)


def test_one_sequence_a_device_unless_asked(run: CliRunner) -> None:
    told = json.loads(run("gpt2", "--world-size", "4", "--json"))
    assert told["options"]["infer"]["batch_size"] == 4
    assert told["options"]["infer"]["batch_size_per_device"] == 1
    shared = json.loads(run("gpt2", "--world-size", "4", "--parallel", "tp", "--json"))
    assert shared["options"]["infer"]["batch_size"] == 1


def test_several_sources_are_a_list(run: CliRunner) -> None:
    names = ["gpt2", "bert-base", "t5-small"]
    told = json.loads(run("--compare", *names, "--json"))
    assert [each["source"] for each in told] == names
    assert [each["parameters"]["total"] for each in told] == [size(name).num_parameters for name in names]
    assert told == json.loads(run(*names, "--json"))


def test_the_json_path_imports_nothing_heavy(tmp_path: Path) -> None:
    program = "import sys; from cutaway.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    for source in ("llama-3-8b", str(path)):
        command = [sys.executable, "-c", program, "size", source, "--gpu", "h100", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        loaded = set(done.stderr.split())
        assert "cutaway.size.estimate" in loaded
        assert not loaded & {"torch", "numpy", "rich", "matplotlib", "transformers", "safetensors", "tokenizers"}


# ---------------------------------------------------------------------------------------- sources


def test_a_directory_a_file_and_a_preset_cost_the_same(run: CliRunner, tmp_path: Path) -> None:
    model = ct.config("tiny-mla")
    toml = tmp_path / "mine.toml"
    toml.write_text(ct.config.to_toml(model))
    llama = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama |= {"intermediate_size": 128, "vocab_size": 256, "num_key_value_heads": 2}
    directory = tmp_path / "a-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(llama))
    of_directory = json.loads(run(str(directory), "--json"))
    of_file = json.loads(run(str(directory / "config.json"), "--json"))
    assert of_directory == of_file
    assert of_file["source"] == "a-llama"
    assert of_file["parameters"]["total"] == size(directory).num_parameters
    assert json.loads(run(str(toml), "--json"))["parameters"] == json.loads(run("tiny-mla", "--json"))["parameters"]


@pytest.mark.parametrize(
    "name", ["gpt2", "mixtral-8x7b", "deepseek-v2-lite", "gemma-2-2b", "bert-base", "albert-base-v2", "t5-small"]
)
def test_people_see_every_part(run: CliRunner, name: str) -> None:
    text = run(name, "--gpu", "h100", "--price-per-hour", "2")
    answer = size(name)
    assert f"{answer.num_parameters:,}" in text
    assert (f"{answer.parameters.active:,}" in text) or answer.parameters.active == answer.num_parameters
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    for said in ("parameters", "FLOPs", "inference memory", "training memory", "time", "training run", "2N", "6N"):
        assert said in text
    assert ("decode" in text) == (answer.decode_flops is not None)
    for kind, (layers, _) in answer.kv_cache.by_kind.items():
        assert f"{layers} {kind} layers" in one_line(text)


def test_one_mode_alone(run: CliRunner) -> None:
    serving, training = (one_line(run("gpt2", "--mode", mode)) for mode in ("infer", "train"))
    assert "inference memory" in serving
    assert "training memory" not in serving
    assert "training run" not in serving
    assert "training memory" in training
    assert "inference memory" not in training
    assert "KV cache" not in training


def test_a_dtype_that_only_serves(run: CliRunner) -> None:
    text = one_line(run("llama-3-8b", "--dtype", "int4"))
    assert "inference memory" in text
    assert "training memory" not in text
    assert "training needs fp32, bf16, fp16 or mixed" in text
    assert list(json.loads(run("llama-3-8b", "--dtype", "int4", "--json"))["memory"]) == ["infer"]


def test_whether_it_fits_is_said(run: CliRunner) -> None:
    text = one_line(run("llama-3-8b", "--gpu", "rtx-4090"))
    assert "fits NVIDIA GeForce RTX 4090" in text
    assert "does not fit NVIDIA GeForce RTX 4090" in text


def test_side_by_side_for_people(run: CliRunner) -> None:
    names = ["llama-3-8b", "qwen3-8b", "gemma-2-9b", "mixtral-8x7b", "bert-base", "t5-base"]
    text = run(*names, "--gpu", "h200")
    for name in names:
        assert name in text
        assert f"{size(name).num_parameters:,}" in text
    assert max(len(line) for line in text.splitlines()) <= 80


# ---------------------------------------------------------------------------------------- what fits, and devices


def test_what_fits(run: CliRunner) -> None:
    found = fit_to_memory("16GB", "llama-3-8b", context=2048)
    assert json.loads(run("llama-3-8b", "--fit", "16GB", "--context", "2Ki", "--json")) == {
        "source": "llama-3-8b",
        **as_json(found.to_dict()),
    }
    text = one_line(run("gpt2", "--fit", "4GB"))
    answer = fit_to_memory("4GB", "gpt2")
    assert answer.max_batch_size is not None
    assert f"largest batch {answer.max_batch_size:,} at a context of 1,024" in text
    assert "✓" in text
    assert "longest context none" in one_line(run("llama-3-8b", "--fit", "1GB"))


def test_shapes_without_a_source(run: CliRunner) -> None:
    text = one_line(run("--fit", "16GB"))
    assert "layers" in text
    assert "as asked" not in text
    told = json.loads(run("classic", "--fit", "16GB", "--mode", "train", "--json"))
    assert told["family"] == "classic"
    assert told["options"]["mode"] == "train"


def test_the_known_devices(run: CliRunner) -> None:
    assert json.loads(run("--list-hardware", "--json"))[0].keys() >= {
        "name",
        "bandwidth",
        "flops",
        "source",
        "verified_date",
    }
    text = run("--list-hardware")
    for device in list_hardware():
        assert device.name in text


# ---------------------------------------------------------------------------------------- drawings


def texts_of(path: Path) -> str:
    """What is written in an svg."""
    return "\n".join(text for text in ElementTree.parse(path).getroot().itertext() if text.strip())


def test_a_plot_has_its_question_and_its_axes(run: CliRunner, tmp_path: Path) -> None:
    path = tmp_path / "costs.svg"
    said = run("llama-3-8b", "--gpu", "rtx-4090", "--context", "64", "--plot", str(path))
    assert said.endswith(f"drawn: {path}\n")
    text = texts_of(path)
    device = get_hardware("rtx-4090")
    for label in (
        "llama-3-8b inference",
        "llama-3-8b training",
        device.title,
        "weights",
        "optimizer",
        "kv cache",
        "GB",
        "seconds",
    ):
        assert label in text
    for label in ("tokens a second", "tokens of context", "sequences at once", "prefill", "decode"):
        assert label in text
    turn = size("llama-3-8b", context=64, hardware=device).compute_bound_batch_size
    assert turn is not None
    assert f"compute binds from {turn:,} on" in text


@pytest.mark.parametrize("options", [["--mode", "train"], ["--mode", "infer", "--dtype", "int8"], []])
def test_every_form_can_be_drawn(run: CliRunner, options: list[str], tmp_path: Path) -> None:
    path = tmp_path / "several.svg"
    names = ["tiny-bert", "tiny-t5", "tiny-moe"]
    assert len(json.loads(run(*names, *options, "--gpu", "t4", "--plot", str(path), "--json"))) == 3
    text = texts_of(path)
    for name in names:
        assert name in text


def test_the_suffix_says_what_is_drawn(run: CliRunner, tmp_path: Path) -> None:
    png, pdf = tmp_path / "a.png", tmp_path / "a.pdf"
    png.write_text("an older drawing")
    assert "time needs --gpu" in run("tiny-gpt", "--plot", str(png))
    assert png.read_bytes().startswith(b"\x89PNG")
    run("tiny-gpt", "--plot", str(pdf))
    assert pdf.read_bytes().startswith(b"%PDF")
    error = run("tiny-gpt", "--plot", str(tmp_path / "a.gif"), code=2)
    assert all(known_suffix in error for known_suffix in (".svg", ".png", ".pdf"))


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no SOURCE is given"),
        (["lama-3-8b"], "did you mean llama-3-8b"),
        (["gpt2", "lama-3-8b"], "did you mean llama-3-8b"),
        (["missing/config.json"], "does not exist"),
        (["gpt2", "--gpu", "h1000"], "did you mean h100"),
        (["gpt2", "--dtype", "bf17"], "fp32, bf16, fp16, mixed"),
        (["gpt2", "--dtype", "int4", "--mode", "train"], "train in fp32, bf16, fp16 or mixed"),
        (["gpt2", "--mode", "both"], "infer, train"),
        (["gpt2", "--optimizer", "adam"], "adamw"),
        (["gpt2", "--kv-cache-dtype", "int3"], "int4"),
        (["gpt2", "--kernel", "fast"], "explicit"),
        (["gpt2", "--activation-checkpointing", "some"], "selective"),
        (["gpt2", "--parallel", "pipeline"], "fsdp"),
        (["gpt2", "--batch-size", "many"], "--batch-size: 'many' is no count"),
        (["gpt2", "--context", "1.5"], "--context: '1.5' is no whole number"),
        (["gpt2", "--batch-size", "0"], "--batch-size"),
        (["gpt2", "--train-tokens", "15X"], "--train-tokens"),
        (["gpt2", "--world-size", "8", "--batch-size", "4"], "multiple of 8"),
        (["gpt2", "--world-size", "5", "--parallel", "tp"], "12 key heads cannot be split over 5 devices"),
        (["gpt2", "--bandwidth", "1TB/s"], "needs --bandwidth and --flops"),
        (["gpt2", "--bandwidth", "fast", "--flops", "1T"], "--bandwidth: 'fast' is no rate"),
        (["gpt2", "--gpu", "h100", "--memory", "80GB"], "give one or the other"),
        (["gpt2", "--fit", "16XB"], "--fit: '16XB' is no size"),
        (["gpt2", "bert-base", "--fit", "16GB"], "--fit answers for one SOURCE"),
        (["gpt2", "--plot", "nowhere/at/all.svg"], "is no directory"),
        (["gpt2", "--price-per-hour", "-1"], "--price-per-hour"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_two(run: CliRunner, arguments: list[str], message: str) -> None:
    assert message in run(*arguments, code=2)


def test_help_has_examples(run: CliRunner) -> None:
    assert run("--help").count("Example: cutaway size") == 4


def test_rates_that_were_swapped_are_noticed(run: CliRunner) -> None:
    assert "swap" in run("gpt2", "--bandwidth", "989TFLOPS", "--flops", "3.35TB/s", code=2)


def test_a_terminal_without_signs_shows_others() -> None:
    code = "import sys; sys.argv = ['cutaway', 'size', 'gpt2']; from cutaway.cli import main; main()"
    plain = {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=os.environ | plain).stdout
    assert b"####" in shown
    assert b"-6.4%" in shown
    assert b"?" not in shown


def test_a_file_that_is_no_configuration_is_called_so(run: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "is not a configuration" in run(str(tmp_path / "model.gguf"), code=2)
