"""No false positives on correct models: every family, cutaway and transformers, fp32 and bf16, random and trained."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ecosystem_report.results import load_conclusions
from hypothesis import given, settings
from support.config_strategies import SEEDS, build_randomized_model, configs
from support.known_defects import DEFECTS_DIR, KNOWN_DEFECTS, unexpected_findings
from support.transformers_models import FAMILIES, build_transformers_model, find_peers, supported_kernels

import cutaway as ct

pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("frozen_check_clock")]

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()

INSTALLED_DEFECTS = [
    defect.script for defect in load_conclusions().defects if defect.library in ("torch.nn", "transformers")
]
"""Scripts of the libraries that the tests install."""


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_models_pass(family: str, seed: int, dtype: torch.dtype) -> None:
    for peer in find_peers(family, seed):
        for kernel in supported_kernels(peer):
            report = ct.check(build_transformers_model(peer, seed, kernel=kernel).to(dtype), seed=seed, budget=120)
            assert not unexpected_findings(report, family), (kernel, peer.config.to_diff_dict())


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_cutaway_models_with_the_same_weights_pass(family: str, seed: int, tmp_path: Path) -> None:
    for index, peer in enumerate(find_peers(family, seed)):
        build_transformers_model(peer, seed).save_pretrained(tmp_path / str(index))
        for dtype in (torch.float32, torch.bfloat16):
            checkpoint = ct.load(tmp_path / str(index), dtype=dtype)
            assert not unexpected_findings(ct.check(checkpoint, seed=seed, budget=120)), (dtype, checkpoint.config)


@pytest.mark.nightly
@settings(max_examples=60 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 2)
@given(configs(), SEEDS)
def test_random_configurations_pass(config: Any, seed: int) -> None:
    report = ct.check(build_randomized_model(config, seed=seed), seed=seed, budget=120)
    assert not unexpected_findings(report), config


@pytest.mark.nightly
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"]
)  # some CPUs are very slow in bf16
def test_trained_model_passes(dtype: torch.dtype) -> None:
    assert not unexpected_findings(ct.check(ct.load("tiny-python", dtype=dtype)))


@pytest.mark.nightly
@pytest.mark.parametrize("script", INSTALLED_DEFECTS)
def test_defect_script_reproduces_the_defect(script: str) -> None:
    result = subprocess.run([sys.executable, DEFECTS_DIR / script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip()


def test_every_known_defect_has_a_script() -> None:
    assert set(KNOWN_DEFECTS.values()) <= {path.stem for path in DEFECTS_DIR.glob("*.py")}
