"""Implementations of other systems: called in one way, compared and probed."""
