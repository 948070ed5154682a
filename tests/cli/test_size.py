"""`cutaway size`: JSON, report, comparison, fit, plots, errors."""

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
from cutaway.families.gguf.load_save import save_gguf
from cutaway.size import get_hardware, list_hardware, size
from cutaway.size.estimate_json import estimates_to_dict
from cutaway.size.memory_fit import fit_to_memory

pytestmark = pytest.mark.unchecked


@pytest.fixture
def run(run_cli: CliRunner) -> CliRunner:
    return partial(run_cli, "size")


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def one_line(text: str) -> str:
    return " ".join(text.split())


# ---------------------------------------------------------------------------------------- JSON


def test_json_equals_size(run: CliRunner) -> None:
    data = json.loads(run("llama-3-8b", "--gpu", "h100", "--batch-size", "4", "--context", "4Ki", "--json"))
    options: dict[str, Any] = {"hardware": "h100", "batch_size": 4, "context": 4096}
    estimates = (size("llama-3-8b", mode=mode, **options) for mode in ("infer", "train"))
    assert data == {"source": "llama-3-8b"} | as_json(estimates_to_dict(*estimates))
    assert data["parameters"]["total"] == 8030261248


def test_all_options_reach_size(run: CliRunner) -> None:
    first_options = (
        "--mode train --batch-size 64 --context 1.024k --source-len 256 --dtype bf16 --kv-cache-dtype int8"
        " --optimizer muon"
    )
    second_options = (
        "--activation-checkpointing full --activation-checkpointing-layers 3"
        " --kernel explicit --world-size 8 --parallel fsdp --train-tokens 15T"
        " --price-per-hour 2.5 --gpu NVIDIA-A100"
    )
    data = json.loads(run("t5-small", *first_options.split(), *second_options.split(), "--json"))
    expected = size(
        "t5-small",
        mode="train",
        batch_size=64,
        context=1024,
        source_len=256,
        dtype="bf16",
        kv_cache_dtype="int8",
        optimizer="muon",
        activation_checkpointing="full",
        activation_checkpointing_layers=3,
        kernel="explicit",
        world_size=8,
        parallel="fsdp",
        train_tokens=15 * 10**12,
        price_per_hour=2.5,
        hardware=get_hardware("a100"),
    )
    assert data == {"source": "t5-small"} | as_json(expected.to_dict())
    assert list(data["options"]) == ["train"]


def test_custom_device(run: CliRunner) -> None:
    figures = ("--bandwidth", "3.35TB/s", "--flops", "989TFLOPS", "--memory", "80GB")
    device = json.loads(run("gpt2", *figures, "--json"))["hardware"]
    assert (device["bandwidth"], device["flops"]["bf16"], device["memory"]) == (3.35e12, 989e12, 80 * 10**9)


def test_default_batch_size_is_one_per_device(run: CliRunner) -> None:
    data = json.loads(run("gpt2", "--world-size", "4", "--json"))
    assert data["options"]["infer"]["batch_size"] == 4
    assert data["options"]["infer"]["batch_size_per_device"] == 1
    shared = json.loads(run("gpt2", "--world-size", "4", "--parallel", "tp", "--json"))
    assert shared["options"]["infer"]["batch_size"] == 1


def test_several_sources_are_a_json_list(run: CliRunner) -> None:
    names = ["gpt2", "bert-base", "t5-small"]
    data = json.loads(run("--compare", *names, "--json"))
    assert [entry["source"] for entry in data] == names
    assert [entry["parameters"]["total"] for entry in data] == [size(name).num_parameters for name in names]
    assert data == json.loads(run(*names, "--json"))


def test_json_output_imports_no_heavy_modules(tmp_path: Path) -> None:
    program = "import sys; from cutaway.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    for source in ("llama-3-8b", str(path)):
        command = [sys.executable, "-c", program, "size", source, "--gpu", "h100", "--json"]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        loaded = set(process.stderr.split())
        assert "cutaway.size.estimate" in loaded
        assert not loaded & {"torch", "numpy", "rich", "matplotlib", "transformers", "safetensors", "tokenizers"}


# ---------------------------------------------------------------------------------------- sources


def test_directory_config_file_and_toml_sources(run: CliRunner, tmp_path: Path) -> None:
    model = ct.config("tiny-mla")
    toml = tmp_path / "mine.toml"
    toml.write_text(ct.config.to_toml(model))
    llama = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama |= {"intermediate_size": 128, "vocab_size": 256, "num_key_value_heads": 2}
    directory = tmp_path / "a-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(llama))
    from_directory = json.loads(run(str(directory), "--json"))
    from_file = json.loads(run(str(directory / "config.json"), "--json"))
    assert from_directory == from_file
    assert from_file["source"] == "a-llama"
    assert from_file["parameters"]["total"] == size(directory).num_parameters
    assert json.loads(run(str(toml), "--json"))["parameters"] == json.loads(run("tiny-mla", "--json"))["parameters"]


@pytest.mark.parametrize(
    "name", ["gpt2", "mixtral-8x7b", "deepseek-v2-lite", "gemma-2-2b", "bert-base", "albert-base-v2", "t5-small"]
)
def test_report_has_all_sections(run: CliRunner, name: str) -> None:
    text = run(name, "--gpu", "h100", "--price-per-hour", "2")
    expected = size(name)
    assert f"{expected.num_parameters:,}" in text
    assert (f"{expected.parameters.active:,}" in text) or expected.parameters.active == expected.num_parameters
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    for label in ("parameters", "FLOPs", "inference memory", "training memory", "time", "training run", "2N", "6N"):
        assert label in text
    assert ("decode" in text) == (expected.decode_flops is not None)
    for kind, (layers, _) in expected.kv_cache.by_kind.items():
        assert f"{layers} {kind} layers" in one_line(text)


def test_mode_option_selects_sections(run: CliRunner) -> None:
    inference, training = (one_line(run("gpt2", "--mode", mode)) for mode in ("infer", "train"))
    assert "inference memory" in inference
    assert "training memory" not in inference
    assert "training run" not in inference
    assert "training memory" in training
    assert "inference memory" not in training
    assert "KV cache" not in training


def test_inference_only_dtype(run: CliRunner) -> None:
    text = one_line(run("llama-3-8b", "--dtype", "int4"))
    assert "inference memory" in text
    assert "training memory" not in text
    assert "training needs fp32, bf16, fp16, mixed or float8" in text
    assert list(json.loads(run("llama-3-8b", "--dtype", "int4", "--json"))["memory"]) == ["infer"]


def test_report_shows_whether_it_fits(run: CliRunner) -> None:
    text = one_line(run("llama-3-8b", "--gpu", "rtx-4090"))
    assert "fits NVIDIA GeForce RTX 4090" in text
    assert "does not fit NVIDIA GeForce RTX 4090" in text


def test_comparison_table(run: CliRunner) -> None:
    names = ["llama-3-8b", "qwen3-8b", "gemma-2-9b", "mixtral-8x7b", "bert-base", "t5-base"]
    text = run(*names, "--gpu", "h200")
    for name in names:
        assert name in text
        assert f"{size(name).num_parameters:,}" in text
    assert max(len(line) for line in text.splitlines()) <= 80


# ---------------------------------------------------------------------------------------- fit and devices


def test_fit_equals_fit_to_memory(run: CliRunner) -> None:
    expected = fit_to_memory("16GB", "llama-3-8b", context=2048)
    assert json.loads(run("llama-3-8b", "--fit", "16GB", "--context", "2Ki", "--json")) == {
        "source": "llama-3-8b",
        **as_json(expected.to_dict()),
    }
    text = one_line(run("gpt2", "--fit", "4GB"))
    gpt2_fit = fit_to_memory("4GB", "gpt2")
    assert gpt2_fit.max_batch_size is not None
    assert f"maximum batch size {gpt2_fit.max_batch_size:,} at a context of 1,024" in text
    assert "✓" in text
    assert "maximum context none" in one_line(run("llama-3-8b", "--fit", "1GB"))


def test_fit_without_a_source_shows_shapes(run: CliRunner) -> None:
    text = one_line(run("--fit", "16GB"))
    assert "layers" in text
    assert "requested" not in text
    data = json.loads(run("classic", "--fit", "16GB", "--mode", "train", "--json"))
    assert data["family"] == "classic"
    assert data["options"]["mode"] == "train"


def test_list_hardware(run: CliRunner) -> None:
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


# ---------------------------------------------------------------------------------------- plots


def svg_texts(path: Path) -> str:
    """Return the texts of an SVG."""
    return "\n".join(text for text in ElementTree.parse(path).getroot().itertext() if text.strip())


def test_plot_has_titles_and_axis_labels(run: CliRunner, tmp_path: Path) -> None:
    path = tmp_path / "costs.svg"
    output = run("llama-3-8b", "--gpu", "rtx-4090", "--context", "64", "--plot", str(path))
    assert output.endswith(f"plot: {path}\n")
    text = svg_texts(path)
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
    for label in ("tokens per second", "context (tokens)", "batch size", "prefill", "decode"):
        assert label in text
    batch_size = size("llama-3-8b", context=64, hardware=device).compute_bound_batch_size
    assert batch_size is not None
    assert f"compute-bound from {batch_size:,}" in text


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [["--mode", "train"], ["--mode", "infer", "--dtype", "int8"], []])
def test_plot_of_every_form(run: CliRunner, options: list[str], tmp_path: Path) -> None:
    path = tmp_path / "several.svg"
    names = ["tiny-bert", "tiny-t5", "tiny-moe"]
    assert len(json.loads(run(*names, *options, "--gpu", "t4", "--plot", str(path), "--json"))) == 3
    text = svg_texts(path)
    for name in names:
        assert name in text


def test_plot_format_follows_the_suffix(run: CliRunner, tmp_path: Path) -> None:
    png, pdf = tmp_path / "a.png", tmp_path / "a.pdf"
    png.write_text("an older plot")
    assert "time needs --gpu" in run("tiny-gpt", "--plot", str(png))
    assert png.read_bytes().startswith(b"\x89PNG")
    run("tiny-gpt", "--plot", str(pdf))
    assert pdf.read_bytes().startswith(b"%PDF")
    error = run("tiny-gpt", "--plot", str(tmp_path / "a.gif"), code=2)
    assert all(known_suffix in error for known_suffix in (".svg", ".png", ".pdf"))


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SOURCE is missing"),
        (["lama-3-8b"], "did you mean llama-3-8b"),
        (["gpt2", "lama-3-8b"], "did you mean llama-3-8b"),
        (["missing/config.json"], "does not exist"),
        (["gpt2", "--gpu", "h1000"], "did you mean h100"),
        (["gpt2", "--dtype", "bf17"], "fp32, bf16, fp16, mixed"),
        (["gpt2", "--dtype", "int4", "--mode", "train"], "train in fp32, bf16, fp16, mixed or float8"),
        (["gpt2", "--mode", "both"], "infer, train"),
        (["gpt2", "--optimizer", "adam"], "adamw"),
        (["gpt2", "--kv-cache-dtype", "int3"], "int4"),
        (["gpt2", "--kernel", "fast"], "explicit"),
        (["gpt2", "--activation-checkpointing", "some"], "selective"),
        (["gpt2", "--activation-checkpointing-layers", "4"], "pass 'full'"),
        (["gpt2", "--parallel", "pipeline"], "fsdp"),
        (["gpt2", "--batch-size", "many"], "--batch-size: 'many' is not a count"),
        (["gpt2", "--context", "1.5"], "--context: '1.5' is not an integer"),
        (["gpt2", "--batch-size", "0"], "--batch-size"),
        (["gpt2", "--train-tokens", "15X"], "--train-tokens"),
        (["gpt2", "--world-size", "8", "--batch-size", "4"], "multiple of 8"),
        (["gpt2", "--world-size", "5", "--parallel", "tp"], "cannot be split over 5 devices"),
        (["gpt2", "--bandwidth", "1TB/s"], "needs --bandwidth and --flops"),
        (["gpt2", "--bandwidth", "fast", "--flops", "1T"], "--bandwidth: 'fast' is not a rate"),
        (["gpt2", "--gpu", "h100", "--memory", "80GB"], "both describe a device"),
        (["gpt2", "--fit", "16XB"], "--fit: '16XB' is not a size"),
        (["gpt2", "bert-base", "--fit", "16GB"], "--fit takes one SOURCE"),
        (["gpt2", "--plot", "nowhere/at/all.svg"], "is not a directory"),
        (["gpt2", "--price-per-hour", "-1"], "--price-per-hour"),
    ],
)
def test_errors_exit_with_code_two(run: CliRunner, arguments: list[str], message: str) -> None:
    assert message in run(*arguments, code=2)


def test_help_has_examples(run: CliRunner) -> None:
    assert run("--help").count("Example: cutaway size") == 5


def test_swapped_bandwidth_and_flops_is_an_error(run: CliRunner) -> None:
    assert "swap" in run("gpt2", "--bandwidth", "989TFLOPS", "--flops", "3.35TB/s", code=2)


def test_ascii_terminal() -> None:
    code = "import sys; sys.argv = ['cutaway', 'size', 'gpt2']; from cutaway.cli import main; main()"
    plain = {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=os.environ | plain).stdout
    assert b"####" in shown
    assert b"-6.4%" in shown
    assert b"?" not in shown


def test_file_that_is_not_a_config_is_an_error(run: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    assert "is not a configuration" in run(str(tmp_path / "model.bin"), code=2)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "is not a complete GGUF file" in run(str(tmp_path / "model.gguf"), code=2)


def test_gguf_file_and_packed_formats(run: CliRunner, tmp_path: Path) -> None:
    path = save_gguf(ct.build("tiny-llama", seed=0), tmp_path / "model.gguf", quantization="q8_0")
    text = one_line(run(str(path), "--gpu", "rtx-4090"))
    assert "in q8_0" in text
    assert "The file has weights quantized in q8_0; --dtype bf16 for dequantized weights." in text
    data = json.loads(run(str(path), "--json"))
    assert data["options"]["infer"]["dtype"] == "q8_0"
    assert data["options"]["train"]["dtype"] == "mixed"
    compared = json.loads(run(str(path), "tiny-llama", "--json"))
    assert [each["options"]["infer"]["dtype"] for each in compared] == ["q8_0", "bf16"]
    assert json.loads(run("llama-3-8b", "--dtype", "Q4_K", "--fit", "8GB", "--json"))["fits"]


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        ("15T", "15T: 1,868 per parameter, 93.4 × Chinchilla's 20 (160.6B)"),
        ("100B", "100B: 12.5 per parameter, 0.623 × Chinchilla's 20 (160.6B)"),
        ("160605224960", "160.6B: 20 per parameter, compute-optimal (Chinchilla)"),
    ],
)
def test_training_tokens_are_compared_with_chinchilla(run: CliRunner, tokens: str, line: str) -> None:
    options = ("llama-3-8b", "--mode", "train", "--train-tokens", tokens)
    assert line in run(*options)
    budget = json.loads(run(*options, "--json"))["training_budget"]
    assert budget["chinchilla_tokens"] == 20 * 8_030_261_248
    assert budget["chinchilla_ratio"] == pytest.approx(budget["train_tokens"] / budget["chinchilla_tokens"])
    assert budget["tokens_per_parameter"] == pytest.approx(budget["train_tokens"] / 8_030_261_248)


# ---------------------------------------------------------------------------------------- adapters


def test_train_lora_equals_size(run: CliRunner) -> None:
    command = "7b --train qlora --rank 8 --targets attn.q,attn.v --gpu rtx-4090 --context 2Ki --json"
    data = json.loads(run(*command.split()))
    expected = size(
        "llama-2-7b",
        mode="train",
        hardware="rtx-4090",
        context=2048,
        adapter={"rank": 8, "targets": ["attn.q", "attn.v"]},
        quantization="nf4",
    )
    assert data == {"source": "llama-2-7b"} | as_json(expected.to_dict())
    assert data["parameters"]["trainable"] == 32 * 2 * 8 * (4096 + 4096)
    assert "training_budget" not in data  # 20 tokens per parameter is a rule for training from scratch


def test_report_lists_trained_and_frozen_parameters(run: CliRunner) -> None:
    text = one_line(run("7b", "--train", "lora", "--rank", "16", "--gpu", "rtx-4090"))
    assert "trained: 39,976,960 in adapters of rank 16 (all-linear), in fp32, 0.59%" in text
    assert "frozen: 6,738,415,616, in bf16" in text
    assert "does not fit NVIDIA GeForce RTX 4090" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpt2 --train lora --mode infer", "--mode infer and --train contradict each other"),
        ("gpt2 --train full --rank 4", "--rank is an option of adapters, but --train is full; use --train lora"),
        ("gpt2 --train adalora", "use one of full, lora, qlora, dora, rslora"),
        ("gpt2 --train lora --dtype int4", "use mixed (frozen weights in bf16, adapters in fp32), or fp32"),
        ("gpt2 --train lora --targets atn.q", "matches no layer of this model; use 'all-linear', or some of: embed"),
        ("gpt2 --train lora --rank 1000", "use a rank of at most 768, or rank_pattern"),
        ("gpt2 --train lora --world-size 2 --parallel fsdp", "use parallel 'dp'"),
        ("9b --train lora", "there is no preset for the size '9b'"),
    ],
)
def test_adapter_errors(run: CliRunner, arguments: str, message: str) -> None:
    assert message in one_line(run(*arguments.split(), code=2))
