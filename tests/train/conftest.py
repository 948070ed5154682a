"""Fixtures of the training tests."""

import pytest


@pytest.fixture
def skip_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training starts without the checks of the model before it; test_preflight.py runs them."""
    monkeypatch.setattr("cutaway.train.trainer.launch.run_preflight", lambda *_: None)
