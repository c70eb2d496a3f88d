"""Exercises that check themselves: `check("causal_mask", mine)` tests a solution."""

from headnotes.exercises.checking import Report, check

__all__ = ["Report", "check"]
