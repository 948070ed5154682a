"""What does a part do? Variants of a recipe, trained alike on the same data from several seeds, and compared."""
