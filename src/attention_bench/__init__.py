"""Side by side, at full speed: what computes the same function, and how fast."""
