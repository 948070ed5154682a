"""Fixtures of the training tests."""

import pytest


@pytest.fixture
def skip_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start training without the preflight checks; test_preflight.py runs them."""
    monkeypatch.setattr("cutaway.train.trainer.launch.run_preflight", lambda *_: None)
