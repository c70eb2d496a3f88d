"""Literate Python source, rendered as a page: each note beside its lines."""

__version__ = "0.1.0"
