"""What a user of cutaway can get wrong, as `ValueError`s that say what, why and what to do."""


class CutawayError(ValueError):
    """The root of every error meant for a user."""


class ConfigError(CutawayError):
    """A configuration that does not describe a Transformer."""


class InputError(CutawayError):
    """An argument that this model cannot take."""


class KernelError(CutawayError):
    """An attention kernel was asked for something it cannot compute."""


class WeightError(CutawayError):
    """Weights that are not numbers, or not this model's."""
