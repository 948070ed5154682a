"""Is this Transformer right? Checks that take any implementation, each named for the bug it finds."""

from cutaway.callable_module import make_callable
from cutaway.check.finding import Finding, Part, Report
from cutaway.check.registry import Check, checks
from cutaway.check.run import check
from cutaway.check.target import Target

__all__ = ["Check", "Finding", "Part", "Report", "Target", "check", "checks"]

make_callable(__name__, check)
