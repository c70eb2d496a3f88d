"""Attention as several systems write it, called alike and compared."""
