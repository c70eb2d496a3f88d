"""Benchmark implementations of multi-head attention that compute the same function."""
