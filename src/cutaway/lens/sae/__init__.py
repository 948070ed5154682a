"""Sparse autoencoders: load, train, attach to a model, evaluate, and describe features."""

from cutaway.lens.sae.attach import attach_sae
from cutaway.lens.sae.autoencoder import SAEConfig, SparseAutoencoder
from cutaway.lens.sae.files import load_sae, save_sae
from cutaway.lens.sae.metrics import SAEMetrics, evaluate_sae
from cutaway.lens.sae.report import FeatureReport, feature_density, feature_logit_effects, feature_report
from cutaway.lens.sae.train import SAETrainStep, train_sae

__all__ = [
    "FeatureReport",
    "SAEConfig",
    "SAEMetrics",
    "SAETrainStep",
    "SparseAutoencoder",
    "attach_sae",
    "evaluate_sae",
    "feature_density",
    "feature_logit_effects",
    "feature_report",
    "load_sae",
    "save_sae",
    "train_sae",
]
