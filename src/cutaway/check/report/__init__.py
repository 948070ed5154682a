"""Findings, reports, JUnit XML, and the documentation page of a check."""
