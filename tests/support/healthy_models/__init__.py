"""Correct models in the styles in which people write Transformers, against false alarms of `ct.check`."""
