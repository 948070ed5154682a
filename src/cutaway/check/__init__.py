"""`ct.check`: correctness checks for Transformer implementations, each named after the bug it finds."""

from cutaway.callable_module import make_callable
from cutaway.check.api import check
from cutaway.check.checked_model import CheckedModel
from cutaway.check.registry import Check, get_checks
from cutaway.check.report.finding import CaseResult, Finding, Report

__all__ = ["CaseResult", "Check", "CheckedModel", "Finding", "Report", "check", "get_checks"]

make_callable(__name__, check)
