"""Shared fixtures, hypothesis profiles, and runtime checks of tensor shapes (jaxtyping) in `cutaway.model`."""

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if not os.environ.get("JAXTYPING_DISABLE"):
    from jaxtyping import install_import_hook

    install_import_hook(["cutaway.model"], "beartype.beartype")

import hypothesis
import pytest
import torch
from support.cli_runner import CliRunner

TESTS = Path(__file__).parent
# Drawing a configuration and building a model is slow, so deadlines and health checks are off.
NO_HEALTH_CHECKS = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
# No shrinking: it takes longer than reading the failing configuration.
PHASES = [hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate]
hypothesis.settings.register_profile("default", max_examples=8, derandomize=True, phases=PHASES, **NO_HEALTH_CHECKS)
hypothesis.settings.register_profile("nightly", max_examples=400, phases=PHASES, **NO_HEALTH_CHECKS)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the markers `shape_checked` and, to cases that `@pytest.mark.sample` leaves out, `nightly`.

    `sample(n)`: n evenly spaced cases of a parametrized test run always, the others only nightly.
    """
    for item in items:
        directories = item.path.relative_to(TESTS).parts[:-1] if item.path.is_relative_to(TESTS) else ()
        is_model_test = directories == ("model",) or directories == ("families", "tables")
        if is_model_test and item.get_closest_marker("unchecked") is None:
            item.add_marker("shape_checked")
    cases_of_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None and item.get_closest_marker("nightly") is None:
            cases_of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in cases_of_test.values():
        marker = cases[0].get_closest_marker("sample")
        assert marker is not None
        size = marker.args[0]
        sampled = {round(i * (len(cases) - 1) / max(1, size - 1)) for i in range(size)}
        for index, case in enumerate(cases):
            if index not in sampled:
                case.add_marker(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Set the seed and restore oneDNN, which a bf16 test may switch off on CPUs without bf16."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # `torch.manual_seed` would store a stack trace for the moment in which CUDA is initialized
        torch.default_generator.manual_seed(0)
    onednn = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = onednn


@pytest.fixture(autouse=True, scope="session")
def _no_loss_plots() -> Iterator[None]:
    """Do not draw loss plots, which takes as long as the training of a small model; `test_loss_plot` draws them."""
    from cutaway.train.logging import callbacks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks, "plot_losses", lambda rows, path, title: path.touch())
        yield


@pytest.fixture
def frozen_check_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock of `ct.check`, so that its results do not depend on the load of the machine or a time budget."""
    from cutaway.check.context import CheckContext

    monkeypatch.setattr(CheckContext, "clock", staticmethod(lambda: 0.0))


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CliRunner:
    from cutaway.cli import main

    def run(*arguments: object, code: int = 0, stdin: str | bytes | None = None, columns: int | str = 80) -> str:
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
