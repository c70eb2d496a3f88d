"""The same computation, as others write it: one published system a module."""
