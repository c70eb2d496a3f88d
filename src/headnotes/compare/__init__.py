"""Call implementations in one convention, compare their results, probe behavior."""
