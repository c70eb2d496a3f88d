"""Inputs that nobody should give, and what must come of them.

`dice` draws values and spoils them, `outcome` makes a call and judges what came of it,
`registry` knows which callables are attacked; the other files hold the attacks, one for
each part of the package. `tests/test_hostile.py` runs them.
"""
