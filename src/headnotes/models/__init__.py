"""Models built from the modules of this package, and how they are trained."""
