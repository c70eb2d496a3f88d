"""Render Python sources as annotated pages, and test their shape comments."""

__version__ = "0.1.0"
