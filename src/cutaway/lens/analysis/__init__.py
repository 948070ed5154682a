"""Analyses of a model on a text. Each returns a `LabeledTensor`, which prints as a table and can be plotted."""

from cutaway.lens.analysis.ablation import ablation, head_ablation
from cutaway.lens.analysis.activation_checkpointing import activation_checkpointing_cost
from cutaway.lens.analysis.attention_heads import attention_entropy, head_scores
from cutaway.lens.analysis.attention_knockout import attention_knockout
from cutaway.lens.analysis.attribution import direct_logit_attribution
from cutaway.lens.analysis.attribution_patching import attribution_patching
from cutaway.lens.analysis.component_effects import component_effects, pair_ablation
from cutaway.lens.analysis.gradients import gradient_by_depth, gradient_by_placement
from cutaway.lens.analysis.kv_cache import cached_decoding_error
from cutaway.lens.analysis.logit_lens import logit_lens
from cutaway.lens.analysis.neurons import neuron_activations, neuron_logit_effects
from cutaway.lens.analysis.patching import activation_patching, path_patching
from cutaway.lens.analysis.positions import position_similarity
from cutaway.lens.analysis.residual_stream import resid_norms, update_cosine_similarities, update_norm_ratios
from cutaway.lens.labeled_tensor import LabeledTensor

__all__ = [
    "LabeledTensor",
    "ablation",
    "activation_checkpointing_cost",
    "activation_patching",
    "attention_entropy",
    "attention_knockout",
    "attribution_patching",
    "cached_decoding_error",
    "component_effects",
    "direct_logit_attribution",
    "gradient_by_depth",
    "gradient_by_placement",
    "head_ablation",
    "head_scores",
    "logit_lens",
    "neuron_activations",
    "neuron_logit_effects",
    "pair_ablation",
    "path_patching",
    "position_similarity",
    "resid_norms",
    "update_cosine_similarities",
    "update_norm_ratios",
]
