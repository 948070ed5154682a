"""Look inside a model."""

from cutaway.lens.journey import Journey, Stage, follow
from cutaway.lens.sites import Site, sites
from cutaway.lens.trace import Trace, trace

__all__ = ["Journey", "Site", "Stage", "Trace", "follow", "sites", "trace"]
