"""Laws of gradients: each fails on attention that violates it."""

from attention_laws import gradients
from specimens import make_test_of_laws

test_each_law_fails_on_implementations_that_violate_it = make_test_of_laws(gradients)
