"""What the page asks of a model: questions, each answered with facts and arrays."""
