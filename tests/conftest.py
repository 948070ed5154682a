"""The test run checks every tensor's shape against its annotation; compiled models are tested without those checks."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if not os.environ.get("JAXTYPING_DISABLE"):
    from jaxtyping import install_import_hook

    install_import_hook(["cutaway.model"], "beartype.beartype")

import hypothesis
import pytest
import torch

# Drawing a whole Transformer takes a while: that is no sign of ill health.
PATIENT = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
# A failing Transformer is shown as drawn: to shrink one takes longer than to read it.
PHASES = [hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate]
hypothesis.settings.register_profile("default", max_examples=30, derandomize=True, phases=PHASES, **PATIENT)
hypothesis.settings.register_profile("nightly", max_examples=400, phases=PHASES, **PATIENT)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
