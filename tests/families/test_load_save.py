"""Save and load checkpoints: native format, shards, dtypes, peak memory, the Hub."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import cutaway as ct
from cutaway.errors import CutawayError, InputError
from cutaway.tokenizer import byte_tokenizer

TINY = [name for name in ct.presets() if name.startswith("tiny-")]
CUTAWAY = str(Path(sys.executable).parent / "cutaway")


def assert_same_weights(a: Any, b: Any) -> None:
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name]), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers directory with a tokenizer."""
    model = ct.build("tiny-llama", seed=0)
    checkpoint = ct.Checkpoint(model, model.config, tokenizer_loader=byte_tokenizer)
    return ct.save(checkpoint, tmp_path_factory.mktemp("llama") / "model")


@pytest.mark.parametrize("preset", ["tiny-bert", "llama-3-8b"])
def test_load_of_a_preset_says_that_it_has_no_weights(preset: str) -> None:
    with pytest.raises(InputError, match=f"'{preset}' is a preset, which has no weights") as error:
        ct.load(preset)
    for alternative in (f"ct.build('{preset}')", f"`cutaway open {preset}`", "'tiny-english'", "Hub id ('owner/name')"):
        assert alternative in str(error.value)


def test_directory_with_the_name_of_a_preset_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ct.build("tiny-gpt", seed=0)
    ct.save(ct.Checkpoint(model, model.config), tmp_path / "tiny-bert")
    monkeypatch.chdir(tmp_path)
    assert_same_weights(ct.load("tiny-bert").model, model)


def test_misspelled_name_of_a_pretrained_model_has_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"'tiny-pyton' does not exist; .*; did you mean 'tiny-python'\?"):
        ct.load("tiny-pyton")


@pytest.mark.parametrize("preset", TINY)
def test_native_format_round_trip(preset: str, tmp_path: Path) -> None:
    model = ct.build(preset, seed=0)
    loaded = ct.load(ct.save(model, tmp_path / "own", family="cutaway"))
    assert loaded.config == model.config == ct.config(tmp_path / "own")
    assert_same_weights(model, loaded.model)
    assert loaded.load_report is not None
    assert loaded.load_report.ok


def test_sharded_checkpoint_equals_single_file(llama: Path, tmp_path: Path) -> None:
    checkpoint = ct.load(llama)
    out = ct.save(checkpoint, tmp_path / "many", max_shard_size=20_000)
    assert len(list(out.glob("model-*.safetensors"))) > 3
    assert_same_weights(checkpoint.model, ct.load(out).model)
    peer = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.randint(0, checkpoint.config.vocab_size, (1, 9))
    with torch.no_grad():
        torch.testing.assert_close(peer(tokens).logits, checkpoint.model(tokens))
    next(iter(sorted(out.glob("model-*.safetensors")))).unlink()
    with pytest.raises(CutawayError, match="shard"):
        ct.load(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_kept_or_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    model = ct.build("tiny-llama", dtype=dtype, seed=0)
    out = ct.save(model, tmp_path / "x")
    assert ct.load(out).model.dtype == dtype
    assert_same_weights(model, ct.load(out).model)
    assert_same_weights(model.to(torch.bfloat16), ct.load(out, dtype=torch.bfloat16).model)
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_changing_a_loaded_model_does_not_change_the_file(llama: Path) -> None:
    """Changing weights does not change the file or a model loaded again."""
    before = (llama / "model.safetensors").read_bytes()
    changed, unchanged = ct.load(llama).model, ct.load(llama).model
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(1.0)
    assert (llama / "model.safetensors").read_bytes() == before
    assert_same_weights(unchanged, ct.load(llama).model)


def test_overwrite_requires_the_flag(llama: Path, tmp_path: Path) -> None:
    checkpoint = ct.load(llama)
    out = ct.save(checkpoint, tmp_path / "x")
    with pytest.raises(InputError, match="exists already"):
        ct.save(checkpoint, out)
    mapped = ct.load(out)
    ct.save(mapped, out, overwrite=True)  # overwrites the files that the model is memory-mapped from
    assert_same_weights(mapped.model, checkpoint.model)
    assert_same_weights(mapped.model, ct.load(out).model)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_only_model_directories_are_overwritten(tmp_path: Path) -> None:
    model = ct.build("tiny-llama", seed=0)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for name in ("home", "file", "pipe", "link"):
        with pytest.raises(InputError):
            ct.save(model, tmp_path / name, overwrite=True)
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"
    assert (tmp_path / "file").read_text() == "kept"


def test_family_is_found_from_the_config(tmp_path: Path) -> None:
    model = ct.build("tiny-gpt2" if "tiny-gpt2" in TINY else "tiny-llama", seed=1)
    out = ct.save(model, tmp_path / "x")
    peer = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.randint(0, model.config.vocab_size, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(peer(tokens).logits, model(tokens))


def test_config_without_family_saves_in_native_format(tmp_path: Path) -> None:
    """A config that no family can represent: an error with the reason, except in the native format."""
    model = ct.build(
        {
            "form": "decoder",
            "vocab_size": 40,
            "d_model": 16,
            "decoder": {
                "layers": 2,
                "block": {"attention": {"heads": 2, "position": {"kind": "alibi"}}, "ffn": {"kind": "clamped-swiglu"}},
            },
        },
        seed=0,
    )
    with pytest.raises(CutawayError, match="no family can represent"):
        ct.save(model, tmp_path / "x")
    assert not list(tmp_path.iterdir())
    assert_same_weights(model, ct.load(ct.save(model, tmp_path / "x", family="cutaway")).model)


MEASURE = """
import sys, torch, cutaway as ct
import cutaway.families.load
source, dtype = sys.argv[1], getattr(torch, sys.argv[2])
ct.load(sys.argv[3], dtype=dtype, check_finite=True).model(torch.tensor([[1]]))  # one-time allocations
def peak():  # of this process: getrusage starts at the peak of the parent
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
model = ct.load(source, dtype=dtype, check_finite=True).model
total = sum(float(p.detach().sum()) for p in model.parameters())  # reads every page
loaded, size = peak() - before, sum(p.numel() * p.itemsize for p in model.parameters())
if dtype == torch.bfloat16:  # the stored dtype: memory-mapped, not copied
    print(loaded / size)
else:  # the allocator has overhead: compare with the peak of allocating the same tensors
    shapes, before = [p.shape for p in model.parameters()], peak()
    plain = [torch.ones(shape) for shape in shapes]
    print(loaded / max(size, peak() - before))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_of_loading(dtype: str, llama: Path, tmp_path: Path) -> None:
    config = ct.config("tiny-llama")
    config = config.replace(d_model=1024, vocab_size=20_000, decoder=config.decoder.replace(layers=6))
    out = ct.save(ct.build(config, dtype=torch.bfloat16, seed=0), tmp_path / "x")
    command = [sys.executable, "-c", MEASURE, str(out), dtype, str(llama)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) <= 1.1


# ------------------------------------------------------------------------------------------------ Hub


class Hub(BaseHTTPRequestHandler):
    """Minimal Hub server for downloads from a directory."""

    root: Path
    requested_paths: list[str]

    def respond(self, *, body: bool) -> None:
        Hub.requested_paths.append(self.path)
        if "/nobody/" in self.path:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
        elif "/tree/" in self.path:
            files = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": p.name} for p in self.root.iterdir()
            ]
            self.reply(json.dumps(files).encode(), body=body)
        elif "/api/models/" in self.path:
            files = [{"rfilename": path.name} for path in sorted(self.root.iterdir())]
            info = json.dumps({"id": "some/model", "sha": "a" * 40, "siblings": files}).encode()
            self.reply(info, body=body)
        elif "/resolve/" in self.path and (self.root / self.path.rsplit("/", 1)[1].split("?")[0]).is_file():
            self.reply((self.root / self.path.rsplit("/", 1)[1].split("?")[0]).read_bytes(), body=body)
        else:
            self.send_error(404)

    def reply(self, data: bytes, *, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{abs(hash(data)):040x}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def do_GET(self) -> None:
        self.respond(body=True)

    def do_HEAD(self) -> None:
        self.respond(body=False)

    def log_message(self, *args: Any) -> None:
        """No log output."""


@pytest.fixture
def hub(llama: Path) -> Iterator[str]:
    (llama / "modeling_evil.py").write_text("raise SystemExit")
    (llama / "pytorch_model.bin").write_bytes(b"pickle")
    Hub.root, Hub.requested_paths = llama, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    for name in ("modeling_evil.py", "pytorch_model.bin"):
        (llama / name).unlink()


LOAD = "import sys, cutaway as ct; c = ct.load(sys.argv[1]); print(c.family, c.tokenizer.vocab_size)"


def run(code: str, *args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "JAXTYPING"))}
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=inherited | env, check=False
    )


def test_hub_id_is_downloaded_once_and_cached(hub: str, tmp_path: Path) -> None:
    hub_env = {"HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    first = run(LOAD, "some/model", HF_ENDPOINT=hub, **hub_env)
    assert first.stdout.split() == ["llama", "259"], first.stderr
    assert not any("evil" in path or ".bin" in path for path in Hub.requested_paths)
    offline = run(LOAD, "some/model", HF_HUB_OFFLINE="1", **hub_env)
    assert offline.stdout == first.stdout, offline.stderr


@pytest.mark.nightly
def test_unknown_hub_id_is_one_clear_error(hub: str, tmp_path: Path) -> None:
    for name, env in (("nobody/nothing", {"HF_ENDPOINT": hub}), ("nobody/nothing", {"HF_HUB_OFFLINE": "1"})):
        done = subprocess.run(
            [CUTAWAY, "convert", name],
            capture_output=True,
            text=True,
            env=os.environ
            | env
            | {"HF_HOME": str(tmp_path)}
            | ({} if "HF_HUB_OFFLINE" in env else {"HF_HUB_OFFLINE": "0"}),
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.startswith("cutaway: ")
        assert "nobody/nothing" in done.stderr
        assert "Traceback" not in done.stderr
