"""Errors of the data layer."""

from __future__ import annotations


class DataError(ValueError):
    """A file or a value that the user gave cannot be used; the message is one line for the user."""
