"""Look inside a model, and change what is there."""

from cutaway.lens.changes import Change
from cutaway.lens.edit import Edit, edit
from cutaway.lens.journey import Journey, Stage, follow
from cutaway.lens.sites import Site, sites
from cutaway.lens.trace import Trace, trace

__all__ = ["Change", "Edit", "Journey", "Site", "Stage", "Trace", "edit", "follow", "sites", "trace"]
