"""Literate Python source, rendered as a page: each note beside the lines it is about."""
