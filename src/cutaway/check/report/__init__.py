"""Findings and reports, their output formats (JUnit, SARIF, Markdown, badge), baselines, and the page of a check."""
