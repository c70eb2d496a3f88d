"""The same results computed in other ways: one idea per module."""
