"""transformer_engine/common/recipe/__init__.py."""


class DelayedScaling:
    """Imported as a base class."""
