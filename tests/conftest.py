"""The test run checks every tensor's shape against its annotation; compiled models are tested without those checks."""

import io
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if not os.environ.get("JAXTYPING_DISABLE"):
    from jaxtyping import install_import_hook

    install_import_hook(["cutaway.model"], "beartype.beartype")

import hypothesis
import pytest
import torch
from support.cli_runner import CliRunner

# Drawing a whole Transformer takes a while: that is no sign of ill health.
NO_HEALTH_CHECKS = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
# A failing Transformer is shown as drawn: to shrink one takes longer than to read it.
PHASES = [hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate]
hypothesis.settings.register_profile("default", max_examples=12, derandomize=True, phases=PHASES, **NO_HEALTH_CHECKS)
hypothesis.settings.register_profile("nightly", max_examples=400, phases=PHASES, **NO_HEALTH_CHECKS)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Each test begins the same: one in bf16 may turn oneDNN off for the whole process where the CPU has no bf16."""
    torch.manual_seed(0)
    onednn = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = onednn


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CliRunner:
    from cutaway.cli import main

    def with_arguments(*arguments: object, code: int = 0, stdin: str | bytes | None = None, columns: int = 80) -> str:
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["cutaway", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        assert (ended.value.code or 0) == code, written.err
        return written.err if code > 1 else written.out

    return with_arguments
