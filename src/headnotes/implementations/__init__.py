"""Multi-head attention as in other published systems, one per module."""
