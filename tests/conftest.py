"""Shared fixtures, hypothesis profiles, and runtime checks of tensor shapes (jaxtyping) in `cutaway.model`."""

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

# Drawing a configuration and building a model is slow, so deadlines and health checks are off.
NO_HEALTH_CHECKS = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
# No shrinking: it takes longer than reading the failing configuration.
PHASES = [hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate]
hypothesis.settings.register_profile("default", max_examples=12, derandomize=True, phases=PHASES, **NO_HEALTH_CHECKS)
hypothesis.settings.register_profile("nightly", max_examples=400, phases=PHASES, **NO_HEALTH_CHECKS)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Set the seed and restore oneDNN, which a bf16 test may switch off on CPUs without bf16."""
    torch.manual_seed(0)
    onednn = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = onednn


@pytest.fixture
def frozen_check_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ct.check` measures no time: its results do not depend on how busy the machine is, and no budget is used up."""
    from cutaway.check.context import CheckContext

    monkeypatch.setattr(CheckContext, "clock", staticmethod(lambda: 0.0))


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CliRunner:
    from cutaway.cli import main

    def run(*arguments: object, code: int = 0, stdin: str | bytes | None = None, columns: int = 80) -> str:
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["cutaway", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        with pytest.raises(SystemExit) as exit_info:
            main()
        output = capsys.readouterr()
        assert (exit_info.value.code or 0) == code, output.err
        return output.err if code > 1 else output.out

    return run
