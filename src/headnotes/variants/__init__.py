"""The same answers by other means: one idea a module."""
