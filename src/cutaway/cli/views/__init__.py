"""Terminal output of the verbs, rendered with rich; one file per report."""
