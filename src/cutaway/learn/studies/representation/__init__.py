"""Representation: superposition, probes, heads, attention weight and importance, where facts are stored, answers."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from cutaway.learn.studies.representation import superposition
from cutaway.learn.studies.representation.answers import (
    measure_attribution,
    measure_entropy,
    measure_logit_lens_cause,
)
from cutaway.learn.studies.representation.attention_weights import measure_attention_weights
from cutaway.learn.studies.representation.facts import measure_facts, measure_neuron_memory
from cutaway.learn.studies.representation.heads import (
    measure_attention_entropy,
    measure_composition,
    measure_head_targets,
)
from cutaway.learn.studies.representation.probes import measure_probes
from cutaway.learn.studies.representation.two_targets import measure_saturation, measure_two_targets
from cutaway.learn.studies.study import Estimate, PartFn

PARTS: tuple[Callable[[str], dict[str, Estimate]], ...] = (
    superposition.measure_superposition,
    superposition.measure_token_directions,
    measure_probes,
    measure_two_targets,
    measure_saturation,
    measure_attention_weights,
    measure_facts,
    measure_neuron_memory,
    measure_head_targets,
    measure_composition,
    measure_attention_entropy,
    measure_logit_lens_cause,
    measure_attribution,
    measure_entropy,
)


def list_parts(device: str) -> dict[str, PartFn]:
    return {part.__name__.removeprefix("measure_").replace("_", " "): partial(part, device) for part in PARTS}


def describe_settings(device: str) -> dict[str, Any]:
    return {
        "model": "tiny-python, and models trained by the study",
        "text": f"modules of the standard library of Python {sys.version_info[0]}.{sys.version_info[1]}",
        "superposition": f"{superposition.NUM_FEATURES} features in {superposition.NUM_DIMS} dimensions",
    }
