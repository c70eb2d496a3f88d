"""One module for each exercise: its solution, its inputs, and typical mistakes."""
