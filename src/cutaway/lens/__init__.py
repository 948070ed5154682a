"""Tracing, editing and analyzing activations: `trace`, `edit`, `sites`, `follow_token`.

Public subpackages: `analysis`, `activations` (datasets on disk), `probes`, `sae` (sparse autoencoders).
"""

from cutaway.lens.adapters import sites
from cutaway.lens.adapters.describe import describe_model
from cutaway.lens.adapters.described_model import DescribedModel
from cutaway.lens.edit import Edit, edit
from cutaway.lens.interventions import Intervention
from cutaway.lens.journey import Journey, Stage, follow_token
from cutaway.lens.sites import Site
from cutaway.lens.trace import Trace, trace

__all__ = [
    "DescribedModel",
    "Edit",
    "Intervention",
    "Journey",
    "Site",
    "Stage",
    "Trace",
    "describe_model",
    "edit",
    "follow_token",
    "sites",
    "trace",
]
