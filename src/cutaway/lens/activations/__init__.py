"""Activation datasets: write the activations of a corpus to disk, and read them in random order."""

from cutaway.lens.activations.collect import collect_activations
from cutaway.lens.activations.dataset import ActivationBatch, ActivationDataset

__all__ = ["ActivationBatch", "ActivationDataset", "collect_activations"]
