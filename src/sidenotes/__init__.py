"""Literate Python source, rendered as a page: each note beside its lines."""
