"""No false alarm: healthy models of every family, ours and transformers', wide and narrow, fresh and trained."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from support.config_strategies import SEEDS, build_randomized_model, configs
from support.transformers_models import FAMILIES, build_transformers_model, find_peers

import cutaway as ct
from cutaway.check import Report

pytestmark = pytest.mark.unchecked

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()

DEFECTS = Path(__file__).parents[2] / "docs" / "defects"
KNOWN: dict[tuple[str, str], str] = {
    ("falcon", "attention-kernels"): "falcon_alibi_kernels",
    ("falcon", "parity"): "falcon_alibi_kernels",
    ("falcon", "cache-unused-slots"): "falcon_alibi_static_cache",
    ("mpt", "config-fields"): "mpt_alibi_bias_max",
    ("phi3", "cache-decode"): "sliding_window_of_one",
    ("phi3", "causality-paths"): "sliding_window_of_one",
}
"""Real defects of models of transformers, by family and check; docs/transformers-check-report.md shows each."""


def alarms(report: Report, family: str = "") -> list[str]:
    """What it says against a model, beside what is known."""
    found = [each for each in (*report.failures, *report.warnings) if (family, each.check) not in KNOWN]
    return [str(each) for each in found]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_give_no_alarm(family: str, seed: int, dtype: torch.dtype) -> None:
    for peer in find_peers(family, seed):
        for kernel in ("eager", "sdpa"):
            if kernel == "eager" and peer.skip_eager:
                continue
            report = ct.check(build_transformers_model(peer, seed, kernel=kernel).to(dtype), seed=seed, budget=120)
            assert not alarms(report, family), (kernel, peer.config.to_diff_dict())


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_models_in_ours_give_no_alarm(family: str, seed: int, tmp_path: Path) -> None:
    for n, peer in enumerate(find_peers(family, seed)):
        build_transformers_model(peer, seed).save_pretrained(tmp_path / str(n))
        for dtype in (torch.float32, torch.bfloat16):
            checkpoint = ct.load(tmp_path / str(n), dtype=dtype)
            assert not alarms(ct.check(checkpoint, seed=seed, budget=120)), (dtype, checkpoint.config)


@settings(max_examples=60 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 4)
@given(configs(), SEEDS)
def test_random_models_give_no_alarm(config: Any, seed: int) -> None:
    report = ct.check(build_randomized_model(config, seed=seed), seed=seed, budget=120)
    assert not alarms(report), config


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)], ids=["fp32", "bf16"]
)  # some CPUs are very slow in bf16
def test_a_trained_model_gives_no_alarm(dtype: torch.dtype) -> None:
    assert not alarms(ct.check(ct.load("tiny-python", dtype=dtype)))


@pytest.mark.nightly
@pytest.mark.parametrize("script", sorted(DEFECTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_defect_is_still_shown_by_its_script(script: Path) -> None:
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_every_known_defect_has_a_script() -> None:
    assert set(KNOWN.values()) <= {path.stem for path in DEFECTS.glob("*.py")}
