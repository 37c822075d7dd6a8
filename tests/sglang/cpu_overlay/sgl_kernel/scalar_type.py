"""Names that quantisation code mentions when it is imported."""

from __future__ import annotations


class ScalarType:
    """A number format of a quantised weight."""


class _Formats:
    def __getattr__(self, name: str) -> ScalarType:
        if name.startswith("__"):
            raise AttributeError(name)
        return ScalarType()


scalar_types = _Formats()
