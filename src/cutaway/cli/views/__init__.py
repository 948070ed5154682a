"""Terminal output of the verbs, rendered with rich. Each report has its own file."""
