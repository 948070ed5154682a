"""Damaged, malicious and mismatched checkpoints: one clear error each, in bounded time and memory."""

import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli_runner import CliRunner

import cutaway as ct
from cutaway.errors import CutawayError

pytestmark = pytest.mark.unchecked

WEIGHTS = "model.safetensors"
Damage = Callable[[Path], Path | None]


@pytest.fixture(scope="module")
def valid_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small valid checkpoint."""
    model = ct.build(
        {
            "form": "decoder",
            "vocab_size": 50,
            "d_model": 16,
            "context": 64,
            "decoder": {"layers": 2, "block": {"attention": {"heads": 2, "position": {"kind": "rope"}}}},
            "head": {"tied": False},
        },
        seed=0,
    )
    return ct.save(model, tmp_path_factory.mktemp("valid") / "model", family="llama")


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    stored = load_file(path / WEIGHTS)
    change(stored)
    save_file(stored, path / WEIGHTS, metadata={"format": "pt"})


def edit_config(path: Path, **change: Any) -> None:
    data = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v != "gone"}))


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = (path / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + size])
    change(table)
    text = json.dumps(table).encode()
    (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def edit_file(name: str, make: Callable[[bytes], bytes]) -> Damage:
    def run(path: Path) -> None:
        (path / name).write_bytes(make((path / name).read_bytes()))

    return run


def first_tensor(table: dict[str, Any]) -> dict[str, Any]:
    return next(value for key, value in table.items() if key != "__metadata__")


def replace_by_pickle(path: Path) -> None:
    (path / WEIGHTS).unlink()
    with (path / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"a": 1}, file)


def overlap_tensors(table: dict[str, Any]) -> None:
    one, two = [value for key, value in table.items() if key != "__metadata__"][:2]
    two["data_offsets"] = one["data_offsets"]


def write_index(path: Path, files: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def add_remote_code(path: Path) -> None:
    """Add a Python module, which must not be run."""
    edit_config(path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}, model_type="evil")
    (path / "modeling_evil.py").write_text("raise SystemExit('code from a checkpoint was run')")


def write_header(path: Path, header: str, num_bytes: int = 0) -> None:
    data = header.encode()
    (path / WEIGHTS).write_bytes(len(data).to_bytes(8, "little") + data + bytes(num_bytes))


def declare_empty_tensors(path: Path) -> None:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    write_header(path, "{" + ",".join(f'"{i}":{entry}' for i in range(700_000)) + "}")


def declare_tensor_twice(path: Path) -> None:
    """List a name twice, with different shapes: other programs may read the first entry."""
    first = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    second = '{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}'
    write_header(path, f'{{"a":{first},"b":{first.replace("[0,8]", "[8,16]")},"\\u0061":{second}}}', 16)


def declare_terabyte(path: Path) -> None:
    """Write a header that declares a terabyte."""
    table = {"a": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}
    text = json.dumps(table).encode()
    (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)


def nest_header(path: Path) -> None:
    text = ("[" * 100_000).encode()
    (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)


def set_tensor(name: str, value: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(stored: dict[str, torch.Tensor]) -> None:
        stored[name] = value(stored[name]) if callable(value) else value

    return change


def nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.flatten()[3] = float("nan")
    return tensor


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


Q = "model.layers.0.self_attn.q_proj.weight"
GGUF_START = b"GGUF" + struct.pack("<I", 3)


def gguf_file(body: bytes) -> Damage:
    def run(path: Path) -> Path:
        (path / "x.gguf").write_bytes(body)
        return path / "x.gguf"

    return run


def gguf_string(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


ARCH = gguf_string("general.architecture") + struct.pack("<I", 8)
CASES: dict[str, tuple[Damage, str]] = {
    "pickle instead of safetensors": (replace_by_pickle, "pickle"),
    "pickle by name": (lambda path: (replace_by_pickle(path), path / "pytorch_model.bin")[1], "pickle"),
    "empty file": (edit_file(WEIGHTS, lambda raw: b""), WEIGHTS),
    "seven bytes": (edit_file(WEIGHTS, lambda raw: raw[:7]), WEIGHTS),
    "cut within the header": (edit_file(WEIGHTS, lambda raw: raw[:100]), WEIGHTS),
    "cut within the data": (edit_file(WEIGHTS, lambda raw: raw[:-10]), WEIGHTS),
    "bytes after the end": (edit_file(WEIGHTS, lambda raw: raw + b"more"), WEIGHTS),
    "header longer than the file": (edit_file(WEIGHTS, lambda raw: b"\xff" * 8 + raw[8:]), WEIGHTS),
    "header of 200 MB declared": (edit_file(WEIGHTS, lambda raw: (200 << 20).to_bytes(8, "little") + raw[8:]), WEIGHTS),
    "header is not JSON": (edit_file(WEIGHTS, lambda raw: raw[:8] + b"x" * 50 + raw[58:]), WEIGHTS),
    "header is a deeply nested list": (nest_header, WEIGHTS),
    "700,000 empty tensors": (declare_empty_tensors, "declares more than 131,072 tensors"),
    "a tensor name twice": (declare_tensor_twice, "lists 'a' more than once"),
    "terabyte declared": (declare_terabyte, WEIGHTS),
    "tensors overlap": (lambda path: edit_header(path, overlap_tensors), WEIGHTS),
    "gap between tensors": (lambda path: edit_header(path, lambda t: t.pop(Q)), WEIGHTS),
    "offsets backwards": (
        lambda path: edit_header(path, lambda t: first_tensor(t).update(data_offsets=[64, 0])),
        WEIGHTS,
    ),
    "negative shape": (lambda path: edit_header(path, lambda t: first_tensor(t).update(shape=[-1, 4])), WEIGHTS),
    "shape and bytes differ": (lambda path: edit_header(path, lambda t: first_tensor(t).update(shape=[3, 3])), WEIGHTS),
    "unknown dtype": (lambda path: edit_header(path, lambda t: first_tensor(t).update(dtype="F3")), WEIGHTS),
    "NaN value": (lambda path: edit_tensors(path, set_tensor(Q, nan)), "NaN"),
    "infinite value": (lambda path: edit_tensors(path, set_tensor(Q, lambda t: t / 0)), "infinite"),
    "wrong shape": (lambda path: edit_tensors(path, set_tensor(Q, lambda t: t[:4].clone())), "q_proj"),
    "transposed": (
        lambda path: edit_tensors(path, set_tensor("lm_head.weight", lambda t: t.T.contiguous())),
        "lm_head",
    ),
    "missing tensor": (lambda path: edit_tensors(path, lambda stored: stored.pop(Q)), "missing: " + Q),
    "unexpected tensor": (
        lambda path: edit_tensors(path, set_tensor("model.extra.weight", torch.zeros(3))),
        "unexpected",
    ),
    "config of another family": (lambda path: edit_config(path, model_type="gpt2"), "do not match"),
    "config of another size": (lambda path: edit_config(path, hidden_size=32), "do not match"),
    "config with more layers": (lambda path: edit_config(path, num_hidden_layers=3), "missing"),
    "config with fewer layers": (lambda path: edit_config(path, num_hidden_layers=1), "unexpected"),
    "billion layers": (lambda path: edit_config(path, num_hidden_layers=10**9), "layers"),
    "hidden_size is a string": (lambda path: edit_config(path, hidden_size="sixteen"), "hidden_size"),
    "zero heads": (lambda path: edit_config(path, num_attention_heads=0), "heads"),
    "rope_parameters is a number": (lambda path: edit_config(path, rope_parameters=3), "RoPE"),
    "unknown rope_type": (lambda path: edit_config(path, rope_parameters={"rope_type": "spiral"}), "spiral"),
    "unknown activation": (lambda path: edit_config(path, hidden_act="softsign"), "softsign"),
    "unsupported quantization": (
        lambda path: edit_config(path, quantization_config={"quant_method": "aqlm"}),
        "quantization_config",
    ),
    "unknown family": (lambda path: edit_config(path, model_type="lama"), "did you mean 'llama'"),
    "no model_type": (lambda path: edit_config(path, model_type="gone", architectures="gone"), "model_type"),
    "remote code": (add_remote_code, "not a supported family"),
    "config is not JSON": (edit_file("config.json", lambda raw: raw[:20]), "config.json"),
    "config is a list": (edit_file("config.json", lambda raw: b"[1]"), "config.json"),
    "config is not UTF-8": (edit_file("config.json", lambda raw: b"\xff\xfe\x00"), "config.json"),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "no weights"),
    "missing shard": (lambda path: write_index(path, {Q: "model-00002-of-00002.safetensors"}), "shard"),
    "index with a path outside of the directory": (
        lambda path: write_index(path, {Q: "../../etc/passwd"}),
        "not opened",
    ),
    "empty index": (lambda path: write_index(path, {}), "weight_map"),
    "index is a list": (
        lambda path: (path / "model.safetensors.index.json").write_text("[]") and None,
        "index",
    ),
    "weights are a pipe": (lambda path: replace_by_pipe(path / WEIGHTS), "not a regular file"),
    "config is a pipe": (lambda path: replace_by_pipe(path / "config.json"), "not a regular file"),
    "config is a device": (lambda path: replace_by_link(path / "config.json", "/dev/zero"), "not a regular file"),
    "integer weights": (lambda path: edit_tensors(path, set_tensor(Q, lambda t: t.to(torch.int8))), "int8"),
    "NaN in fp8": (
        lambda path: edit_tensors(
            path, set_tensor(Q, lambda t: torch.full(t.shape, 127, dtype=torch.uint8).view(torch.float8_e4m3fn))
        ),
        "NaN",
    ),
    "ten thousand layers": (lambda path: edit_config(path, num_hidden_layers=10_000), "10000 layers"),
    "head_dim of a billion": (lambda path: edit_config(path, head_dim=2**30), "d_head"),
    "huge vocab_size": (lambda path: edit_config(path, vocab_size=2**31 - 1), "vocab_size"),
    "list instead of a number": (lambda path: edit_config(path, head_dim=[0] * 100_000), "at most 4096"),
    "deeply nested config": (
        edit_file("config.json", lambda raw: raw[:-2] + b',"rope_parameters":' + b'{"a":' * 900 + b"1" + b"}" * 901),
        "config.json",
    ),
    "control characters in a name": (
        lambda path: edit_tensors(path, set_tensor("model.\n\x1b[31mred", torch.zeros(1))),
        "unexpected",
    ),
    "architectures are not strings": (
        lambda path: edit_config(path, model_type="gone", architectures=[[]]),
        "model_type",
    ),
    "huge number of shards": (
        lambda path: (path / WEIGHTS).rename(path / "model-00001-of-99999999999.safetensors") and None,
        "shard 2",
    ),
    "quantization_config is a string": (lambda path: edit_config(path, quantization_config="fp8"), "'fp8', not a JSON"),
    "quantization_config is the method": (lambda path: edit_config(path, quantization_config="mxfp4"), "not a JSON"),
    "quantization_config is a number": (lambda path: edit_config(path, quantization_config=8), "is 8, not a JSON"),
    "invalid weight_block_size": (
        lambda path: edit_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": [0, -1]}),
        "weight_block_size",
    ),
    "missing path": (lambda path: path / "nowhere", "does not exist"),
    "safetensors file without config": (lambda path: path / WEIGHTS, "directory"),
    "file of another type": (lambda path: path / "config.json", "not a checkpoint"),
    "adapter": (lambda path: (path / WEIGHTS).rename(path / "adapter_model.safetensors") and None, "adapter"),
    "GGUF: empty": (gguf_file(b""), "GGUF"),
    "GGUF: wrong magic": (gguf_file(b"GGML" + bytes(60)), "GGUF"),
    "GGUF: version 99": (gguf_file(b"GGUF" + struct.pack("<IQQ", 99, 0, 0)), "version"),
    "GGUF: billion tensors": (gguf_file(GGUF_START + struct.pack("<QQ", 10**9, 0)), "numbers of tensors"),
    "GGUF: key longer than the file": (
        gguf_file(GGUF_START + struct.pack("<QQQ", 0, 1, 1 << 60) + bytes(40)),
        "truncated",
    ),
    "GGUF: list longer than the file": (
        gguf_file(
            GGUF_START + struct.pack("<QQ", 0, 1) + gguf_string("a") + struct.pack("<IIQ", 9, 4, 1 << 50) + bytes(40)
        ),
        "truncated",
    ),
    "GGUF: unknown architecture": (
        gguf_file(GGUF_START + struct.pack("<QQ", 0, 1) + ARCH + gguf_string("rwkv") + bytes(40)),
        "rwkv",
    ),
    "GGUF: no metadata": (
        gguf_file(GGUF_START + struct.pack("<QQ", 0, 1) + ARCH + gguf_string("llama") + bytes(40)),
        "llama",
    ),
    "GGUF: tensor past the end": (
        gguf_file(
            GGUF_START
            + struct.pack("<QQ", 1, 1)
            + ARCH
            + gguf_string("llama")
            + gguf_string("token_embd.weight")
            + struct.pack("<IQQIQ", 2, 16, 50, 0, 1 << 40)
            + bytes(64)
        ),
        "past the end",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_checkpoint_is_one_clear_error(case: str, valid_checkpoint: Path, tmp_path: Path) -> None:
    damage, message = CASES[case]
    path = tmp_path / "model"
    path.mkdir()
    for file in valid_checkpoint.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    source = damage(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CutawayError) as caught:
        ct.load(source if isinstance(source, Path) else path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB
    assert message in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_undamaged_checkpoint_loads(valid_checkpoint: Path) -> None:
    report = ct.load(valid_checkpoint).load_report
    assert report is not None
    assert report.ok


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "", 3.5, object()])
def test_unknown_device_is_an_error(device: Any, valid_checkpoint: Path) -> None:
    with pytest.raises(CutawayError, match="device"):
        ct.load(valid_checkpoint, device=device)


def test_float16_overflow_is_an_error(valid_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = ct.load(valid_checkpoint)
    with torch.no_grad():
        checkpoint.model.head.matrix.weight[0, 0] = 1e6
    out = ct.save(checkpoint, tmp_path / "x")
    with pytest.raises(CutawayError, match="float16"):
        ct.load(out, dtype=torch.float16)
    assert torch.isfinite(ct.load(out, dtype=torch.bfloat16).model.head.matrix.weight).all()


@pytest.mark.parametrize("target", [None, 3, b"x", "", "a\0b", "\ud800", "x" * 5000, "/proc/nothing/x", "/dev/null/x"])
def test_invalid_output_path_is_an_error(target: Any, valid_checkpoint: Path) -> None:
    with pytest.raises(CutawayError):
        ct.save(ct.load(valid_checkpoint), target)


def test_concurrent_saves_write_one_checkpoint(valid_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = ct.load(valid_checkpoint)
    done: list[str] = []

    def attempt() -> None:
        try:
            ct.save(checkpoint, tmp_path / "x")
            done.append("saved")
        except CutawayError:
            done.append("error")

    threads = [threading.Thread(target=attempt) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == ["error"] * 5 + ["saved"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    ct.load(tmp_path / "x")


KILLED = """
import sys, cutaway as ct
import cutaway.families.save as save
checkpoint = ct.load(sys.argv[1])
print("ready", flush=True)
while True:
    save.save(checkpoint, sys.argv[2], overwrite=True)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("pause", [0.0, 0.01, 0.03, 0.05])
def test_killed_save_leaves_old_or_new_checkpoint(pause: float, valid_checkpoint: Path, tmp_path: Path) -> None:
    """Killed while saving repeatedly: the path always has a complete checkpoint."""
    out = ct.save(ct.load(valid_checkpoint), tmp_path / "x")
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(valid_checkpoint), str(out)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(pause)
    child.kill()
    child.wait()
    report = ct.load(out).load_report
    assert report is not None
    assert report.ok


@pytest.mark.nightly
def test_full_disk_keeps_old_checkpoint(valid_checkpoint: Path, tmp_path: Path) -> None:
    out = ct.save(ct.load(valid_checkpoint), tmp_path / "x")
    code = (
        "import resource, signal, sys, cutaway as ct; checkpoint = ct.load(sys.argv[1]);"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); ct.save(checkpoint, sys.argv[2], overwrite=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(valid_checkpoint), str(out)], capture_output=True, text=True, check=False
    )
    assert "WeightError" in done.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    ct.load(out)


def test_remote_code_is_never_run(valid_checkpoint: Path, tmp_path: Path, run_cli: CliRunner) -> None:
    """Neither by cutaway nor by transformers in --verify."""
    out = ct.save(ct.load(valid_checkpoint), tmp_path / "x")
    edit_config(out, model_type="gone", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    (out / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    error = run_cli("convert", out, "--verify", code=2, stdin="y\n" * 5)
    assert "Traceback" not in error
    assert not (tmp_path / "ran").exists()


def test_random_damage_raises_only_cutaway_errors(valid_checkpoint: Path, tmp_path: Path) -> None:
    """Changed bytes and truncations give a CutawayError or a model with other values, never another exception."""
    g = torch.Generator().manual_seed(0)
    path = tmp_path / "model"
    path.mkdir()
    original = {file.name: file.read_bytes() for file in valid_checkpoint.iterdir()}
    num_errors = 0
    for trial in range(300):
        for name, raw in original.items():
            (path / name).write_bytes(raw)
        name = ("model.safetensors", "config.json")[trial % 2]
        raw = bytearray(original[name])
        max_offset = len(raw) if trial % 3 else min(len(raw), 2000)
        for _ in range(1 + trial % 4):
            offset = int(torch.randint(0, max_offset, (1,), generator=g))
            raw[offset] = int(torch.randint(0, 256, (1,), generator=g))
        (path / name).write_bytes(bytes(raw[: len(raw) - (trial % 5) * (trial % 7 == 0)]))
        try:
            ct.load(path)
        except CutawayError:
            num_errors += 1
    assert num_errors > 100
