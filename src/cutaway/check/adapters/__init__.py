"""From a model of cutaway, of transformers, or any other module or function to a `CheckedModel`."""
