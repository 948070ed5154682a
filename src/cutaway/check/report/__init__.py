"""Findings, and how they are written: text, JUnit, and a page that explains a check."""
