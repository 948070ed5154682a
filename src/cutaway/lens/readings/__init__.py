"""Readings: questions put to a model, answered by labelled arrays that draw themselves."""

from cutaway.lens.readings.ablation import ablation, head_ablation
from cutaway.lens.readings.attribution import attribution
from cutaway.lens.readings.decoded import logit_lens
from cutaway.lens.readings.depth import gradient_by_depth, gradient_by_placement
from cutaway.lens.readings.heads import attention_entropy, head_kinds
from cutaway.lens.readings.neurons import neuron_keys, neuron_values
from cutaway.lens.readings.patching import patching
from cutaway.lens.readings.paths import path_patching
from cutaway.lens.readings.places import position_similarity
from cutaway.lens.readings.reading import Reading
from cutaway.lens.readings.recomputed import recomputation
from cutaway.lens.readings.steps import step_by_step
from cutaway.lens.readings.stream import stream_norms, update_cosines, update_sizes

__all__ = [
    "Reading",
    "ablation",
    "attention_entropy",
    "attribution",
    "gradient_by_depth",
    "gradient_by_placement",
    "head_ablation",
    "head_kinds",
    "logit_lens",
    "neuron_keys",
    "neuron_values",
    "patching",
    "path_patching",
    "position_similarity",
    "recomputation",
    "step_by_step",
    "stream_norms",
    "update_cosines",
    "update_sizes",
]
