"""Family tables: one module per model family, with its config fields and weight mappings."""
