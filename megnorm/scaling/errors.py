"""What a user can do wrong with a sweep, with results, or with a fit."""


class ScalingError(ValueError):
    """One message: which file or value, which rule, what to do."""
