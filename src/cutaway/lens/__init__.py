"""Tracing, editing and analyzing activations: `trace`, `edit`, `sites`, `follow_token`.

Public subpackages: `analysis`, `activations` (datasets on disk), `probes`, `sae` (sparse autoencoders).
"""

from cutaway.lens.adapters import sites
from cutaway.lens.edit import Edit, edit
from cutaway.lens.interventions import Intervention
from cutaway.lens.journey import Journey, Stage, follow_token
from cutaway.lens.sites import Site
from cutaway.lens.trace import Trace, trace

__all__ = ["Edit", "Intervention", "Journey", "Site", "Stage", "Trace", "edit", "follow_token", "sites", "trace"]
