"""Damaged, hostile and mistaken checkpoints: one clear error each, quickly, in bounded memory, nothing half loaded."""

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

import cutaway as ct
from cutaway.errors import CutawayError

pytestmark = pytest.mark.unchecked

WEIGHTS = "model.safetensors"
Break = Callable[[Path], Path | None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sound checkpoint to break."""
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
    return ct.save(model, tmp_path_factory.mktemp("whole") / "model", family="llama")


def tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    held = load_file(path / WEIGHTS)
    change(held)
    save_file(held, path / WEIGHTS, metadata={"format": "pt"})


def settings(path: Path, **change: Any) -> None:
    data = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v != "gone"}))


def header(path: Path, change: Callable[[dict[str, Any]], Any], *, pad: bool = False) -> None:
    raw = (path / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + size])
    change(table)
    text = json.dumps(table).encode()
    (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def rewrite(name: str, make: Callable[[bytes], bytes]) -> Break:
    def run(path: Path) -> None:
        (path / name).write_bytes(make((path / name).read_bytes()))

    return run


def first(table: dict[str, Any]) -> dict[str, Any]:
    return next(value for key, value in table.items() if key != "__metadata__")


def pickled(path: Path) -> None:
    (path / WEIGHTS).unlink()
    with (path / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"a": 1}, file)


def overlapping(table: dict[str, Any]) -> None:
    one, two = [value for key, value in table.items() if key != "__metadata__"][:2]
    two["data_offsets"] = one["data_offsets"]


def shards(path: Path, files: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def bomb(path: Path) -> None:
    """A module beside the weights that must never run."""
    settings(path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}, model_type="evil")
    (path / "modeling_evil.py").write_text("raise SystemExit('code from a checkpoint was run')")


def sparse(path: Path) -> None:
    """A header that promises a terabyte."""
    table = {"a": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}
    text = json.dumps(table).encode()
    (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)


def deep(path: Path) -> None:
    text = ("[" * 100_000).encode()
    (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)


def put(name: str, value: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(held: dict[str, torch.Tensor]) -> None:
        held[name] = value(held[name]) if callable(value) else value

    return change


def nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.flatten()[3] = float("nan")
    return tensor


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


Q = "model.layers.0.self_attn.q_proj.weight"
GGUF_START = b"GGUF" + struct.pack("<I", 3)


def gguf(body: bytes) -> Break:
    def run(path: Path) -> Path:
        (path / "x.gguf").write_bytes(body)
        return path / "x.gguf"

    return run


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


ARCH = text("general.architecture") + struct.pack("<I", 8)
CASES: dict[str, tuple[Break, str]] = {
    "pickle instead of safetensors": (pickled, "pickle"),
    "pickle by name": (lambda path: (pickled(path), path / "pytorch_model.bin")[1], "pickle"),
    "empty file": (rewrite(WEIGHTS, lambda raw: b""), WEIGHTS),
    "seven bytes": (rewrite(WEIGHTS, lambda raw: raw[:7]), WEIGHTS),
    "cut within the header": (rewrite(WEIGHTS, lambda raw: raw[:100]), WEIGHTS),
    "cut within the data": (rewrite(WEIGHTS, lambda raw: raw[:-10]), WEIGHTS),
    "bytes after the end": (rewrite(WEIGHTS, lambda raw: raw + b"more"), WEIGHTS),
    "header longer than the file": (rewrite(WEIGHTS, lambda raw: b"\xff" * 8 + raw[8:]), WEIGHTS),
    "header of 200 MB promised": (rewrite(WEIGHTS, lambda raw: (200 << 20).to_bytes(8, "little") + raw[8:]), WEIGHTS),
    "header is no JSON": (rewrite(WEIGHTS, lambda raw: raw[:8] + b"x" * 50 + raw[58:]), WEIGHTS),
    "header is a list, deeply": (deep, WEIGHTS),
    "a terabyte promised": (sparse, WEIGHTS),
    "tensors overlap": (lambda path: header(path, overlapping), WEIGHTS),
    "a hole between tensors": (lambda path: header(path, lambda t: t.pop(Q)), WEIGHTS),
    "offsets backwards": (lambda path: header(path, lambda t: first(t).update(data_offsets=[64, 0])), WEIGHTS),
    "negative shape": (lambda path: header(path, lambda t: first(t).update(shape=[-1, 4])), WEIGHTS),
    "shape and bytes differ": (lambda path: header(path, lambda t: first(t).update(shape=[3, 3])), WEIGHTS),
    "unknown dtype": (lambda path: header(path, lambda t: first(t).update(dtype="F3")), WEIGHTS),
    "not a number": (lambda path: tensors(path, put(Q, nan)), "NaN"),
    "infinite": (lambda path: tensors(path, put(Q, lambda t: t / 0)), "infinite"),
    "wrong shape": (lambda path: tensors(path, put(Q, lambda t: t[:4].clone())), "q_proj"),
    "transposed": (lambda path: tensors(path, put("lm_head.weight", lambda t: t.T.contiguous())), "lm_head"),
    "missing tensor": (lambda path: tensors(path, lambda held: held.pop(Q)), "missing: " + Q),
    "unexpected tensor": (lambda path: tensors(path, put("model.extra.weight", torch.zeros(3))), "unexpected"),
    "another family's config": (lambda path: settings(path, model_type="gpt2"), "do not belong together"),
    "a config of another size": (lambda path: settings(path, hidden_size=32), "do not belong together"),
    "more layers than there are": (lambda path: settings(path, num_hidden_layers=3), "missing"),
    "fewer layers than there are": (lambda path: settings(path, num_hidden_layers=1), "unexpected"),
    "a billion layers": (lambda path: settings(path, num_hidden_layers=10**9), "layers"),
    "a size that is a word": (lambda path: settings(path, hidden_size="sixteen"), "hidden_size"),
    "no heads": (lambda path: settings(path, num_attention_heads=0), "heads"),
    "rope settings that are a number": (lambda path: settings(path, rope_parameters=3), "rope"),
    "an unknown rope": (lambda path: settings(path, rope_parameters={"rope_type": "spiral"}), "spiral"),
    "an unknown activation": (lambda path: settings(path, hidden_act="softsign"), "softsign"),
    "quantised elsewhere": (
        lambda path: settings(path, quantization_config={"quant_method": "awq"}),
        "quantization_config",
    ),
    "unknown family": (lambda path: settings(path, model_type="lama"), "did you mean 'llama'"),
    "no model_type": (lambda path: settings(path, model_type="gone", architectures="gone"), "model_type"),
    "remote code": (bomb, "no family"),
    "config is no JSON": (rewrite("config.json", lambda raw: raw[:20]), "config.json"),
    "config is a list": (rewrite("config.json", lambda raw: b"[1]"), "config.json"),
    "config is no text": (rewrite("config.json", lambda raw: b"\xff\xfe\x00"), "config.json"),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "no weights"),
    "missing shard": (lambda path: shards(path, {Q: "model-00002-of-00002.safetensors"}), "shard"),
    "index that leaves the directory": (lambda path: shards(path, {Q: "../../etc/passwd"}), "not opened"),
    "index without a map": (lambda path: shards(path, {}), "weight_map"),
    "index that is no table": (
        lambda path: (path / "model.safetensors.index.json").write_text("[]") and None,
        "index",
    ),
    "a pipe for weights": (lambda path: pipe(path / WEIGHTS), "no plain file"),
    "a pipe for settings": (lambda path: pipe(path / "config.json"), "no plain file"),
    "a device for settings": (lambda path: link(path / "config.json", "/dev/zero"), "no plain file"),
    "weights that are whole numbers": (lambda path: tensors(path, put(Q, lambda t: t.to(torch.int8))), "int8"),
    "fp8 that is no number": (
        lambda path: tensors(
            path, put(Q, lambda t: torch.full(t.shape, 127, dtype=torch.uint8).view(torch.float8_e4m3fn))
        ),
        "NaN",
    ),
    "ten thousand layers": (lambda path: settings(path, num_hidden_layers=10_000), "10000 layers"),
    "a head of a billion": (lambda path: settings(path, head_dim=2**30), "d_head"),
    "a vocabulary beyond counting": (lambda path: settings(path, vocab_size=2**31 - 1), "vocab_size"),
    "a list for a number": (lambda path: settings(path, head_dim=[0] * 100_000), "no setting"),
    "settings nested without end": (
        rewrite("config.json", lambda raw: raw[:-2] + b',"rope_parameters":' + b'{"a":' * 900 + b"1" + b"}" * 901),
        "config.json",
    ),
    "lines and colours in a name": (
        lambda path: tensors(path, put("model.\n\x1b[31mred", torch.zeros(1))),
        "unexpected",
    ),
    "classes that are no names": (lambda path: settings(path, model_type="gone", architectures=[[]]), "model_type"),
    "shards counted to the sky": (
        lambda path: (path / WEIGHTS).rename(path / "model-00001-of-99999999999.safetensors") and None,
        "shard 2",
    ),
    "packed in a way that is a word": (lambda path: settings(path, quantization_config="fp8"), "packed"),
    "tiles without end": (
        lambda path: settings(path, quantization_config={"quant_method": "fp8", "weight_block_size": [0, -1]}),
        "weight_block_size",
    ),
    "nothing there": (lambda path: path / "nowhere", "does not exist"),
    "a file of weights alone": (lambda path: path / WEIGHTS, "directory"),
    "a file of another kind": (lambda path: path / "config.json", "no checkpoint"),
    "an adapter": (lambda path: (path / WEIGHTS).rename(path / "adapter_model.safetensors") and None, "adapter"),
    "GGUF: nothing in it": (gguf(b""), "GGUF"),
    "GGUF: another magic": (gguf(b"GGML" + bytes(60)), "GGUF"),
    "GGUF: version 99": (gguf(b"GGUF" + struct.pack("<IQQ", 99, 0, 0)), "version"),
    "GGUF: a billion tensors": (gguf(GGUF_START + struct.pack("<QQ", 10**9, 0)), "more tensors"),
    "GGUF: a key longer than the file": (gguf(GGUF_START + struct.pack("<QQQ", 0, 1, 1 << 60) + bytes(40)), "ends"),
    "GGUF: a long list promised": (
        gguf(GGUF_START + struct.pack("<QQ", 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 1 << 50) + bytes(40)),
        "ends",
    ),
    "GGUF: unknown architecture": (
        gguf(GGUF_START + struct.pack("<QQ", 0, 1) + ARCH + text("rwkv") + bytes(40)),
        "rwkv",
    ),
    "GGUF: no settings": (gguf(GGUF_START + struct.pack("<QQ", 0, 1) + ARCH + text("llama") + bytes(40)), "llama"),
    "GGUF: a tensor beyond the end": (
        gguf(
            GGUF_START
            + struct.pack("<QQ", 1, 1)
            + ARCH
            + text("llama")
            + text("token_embd.weight")
            + struct.pack("<IQQIQ", 2, 16, 50, 0, 1 << 40)
            + bytes(64)
        ),
        "beyond",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_error(case: str, whole: Path, tmp_path: Path) -> None:
    breaks, said = CASES[case]
    path = tmp_path / "model"
    path.mkdir()
    for file in whole.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    source = breaks(path)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CutawayError) as caught:
        ct.load(source if isinstance(source, Path) else path)
    assert time.process_time() - began < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB
    assert said in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_the_sound_one_loads(whole: Path) -> None:
    report = ct.load(whole).load_report
    assert report is not None
    assert report.ok


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "", 3.5, object()])
def test_a_device_that_is_not_here(device: Any, whole: Path) -> None:
    with pytest.raises(CutawayError, match="device"):
        ct.load(whole, device=device)


def test_numbers_that_a_dtype_cannot_hold(whole: Path, tmp_path: Path) -> None:
    checkpoint = ct.load(whole)
    with torch.no_grad():
        checkpoint.model.head.matrix.weight[0, 0] = 1e6
    out = ct.save(checkpoint, tmp_path / "x")
    with pytest.raises(CutawayError, match="float16"):
        ct.load(out, dtype=torch.float16)
    assert torch.isfinite(ct.load(out, dtype=torch.bfloat16).model.head.matrix.weight).all()


@pytest.mark.parametrize("target", [None, 3, b"x", "", "a\0b", "\ud800", "x" * 5000, "/proc/nothing/x", "/dev/null/x"])
def test_a_target_that_is_no_path(target: Any, whole: Path) -> None:
    with pytest.raises(CutawayError):
        ct.save(ct.load(whole), target)


def test_one_of_several_saves_wins_and_none_is_lost(whole: Path, tmp_path: Path) -> None:
    checkpoint = ct.load(whole)
    done: list[str] = []

    def attempt() -> None:
        try:
            ct.save(checkpoint, tmp_path / "x")
            done.append("saved")
        except CutawayError:
            done.append("refused")

    threads = [threading.Thread(target=attempt) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == ["refused"] * 5 + ["saved"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    ct.load(tmp_path / "x")


KILLED = """
import sys, cutaway as ct
import cutaway.families.save as save
checkpoint = ct.load(sys.argv[1])
told = print("ready", flush=True)
while True:
    save.save(checkpoint, sys.argv[2], overwrite=True)
"""


def test_a_kill_leaves_the_old_or_the_new(whole: Path, tmp_path: Path) -> None:
    """Killed in the midst of saving again and again: what stands under the name is always a whole model."""
    out = ct.save(ct.load(whole), tmp_path / "x")
    for pause in (0.0, 0.01, 0.03, 0.05):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(whole), str(out)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(pause)
        child.kill()
        child.wait()
        report = ct.load(out).load_report
        assert report is not None
        assert report.ok


def test_a_full_disk_loses_nothing(whole: Path, tmp_path: Path) -> None:
    out = ct.save(ct.load(whole), tmp_path / "x")
    code = (
        "import resource, signal, sys, cutaway as ct; checkpoint = ct.load(sys.argv[1]);"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); ct.save(checkpoint, sys.argv[2], overwrite=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(whole), str(out)], capture_output=True, text=True, check=False
    )
    assert "WeightError" in done.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    ct.load(out)


def test_code_beside_weights_is_never_run(whole: Path, tmp_path: Path) -> None:
    """Not by us, and not by the library that --verify compares with."""
    out = ct.save(ct.load(whole), tmp_path / "x")
    settings(out, model_type="gone", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    (out / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "cutaway"), "convert", str(out), "--verify"],
        input="y\n" * 5,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "ran").exists()


def test_random_damage_is_an_error_or_harmless(whole: Path, tmp_path: Path) -> None:
    """A thousand flipped bytes and cuts: an error of ours, or a model with other numbers; never another exception."""
    g = torch.Generator().manual_seed(0)
    path = tmp_path / "model"
    path.mkdir()
    sound = {file.name: file.read_bytes() for file in whole.iterdir()}
    refused = 0
    for turn in range(300):
        for name, raw in sound.items():
            (path / name).write_bytes(raw)
        name = ("model.safetensors", "config.json")[turn % 2]
        raw = bytearray(sound[name])
        reach = len(raw) if turn % 3 else min(len(raw), 2000)
        for _ in range(1 + turn % 4):
            at = int(torch.randint(0, reach, (1,), generator=g))
            raw[at] = int(torch.randint(0, 256, (1,), generator=g))
        (path / name).write_bytes(bytes(raw[: len(raw) - (turn % 5) * (turn % 7 == 0)]))
        try:
            ct.load(path)
        except CutawayError:
            refused += 1
    assert refused > 100
