r"""# Running the laws in pytest

The pytest fixture `attention_laws` runs the laws in a test. It is available where
headnotes is installed:

```python
def test_my_attention_satisfies_the_laws(attention_laws):
    attention_laws(MyAttention, causal=True)
```

The test fails if a law does, and shows the table of results; it also fails if each law
is skipped. With `inside=True`, each attention within a model is checked, and the
fixture returns the list of their reports; so it is for a model that takes token ids or
images, or cannot be called itself. A small model of token ids has a report of its own,
too, as has a block whose formula cannot be tested from outside. The fixture takes its
options from the call alone: it ignores `pyproject.toml`. It imports torch and the laws
at its first call only, so other tests of your project start as fast as before.

Source: [running the laws](checker.md), from a test.
"""

from typing import Any

import pytest


class AttentionLaws:
    """Calls `attention_laws.check`, and fails the test if a law fails."""

    def __call__(self, attention: Any, *, inside: bool = False, **options: Any) -> Any:
        """Check `attention`; takes the options of `check`, and returns its report.

        With `inside`, or if it is a model, it checks each attention within it, and
        returns a list.
        """
        __tracebackhide__ = True  # of pytest: the error is in the line of the test
        from attention_laws.adapter import CallError
        from attention_laws.checker import import_line
        from attention_laws.cli import SETTINGS, Outcome, check_loaded
        from attention_laws.law import did_you_mean

        known = sorted(SETTINGS | {"imports", "name", "progress"})
        for option in options:
            if option not in known:
                similar = did_you_mean(option, known, "the options are")
                raise CallError(f"there is no option `{option}`; {similar}")
        name = options.pop("name", getattr(attention, "__name__", "my_attention"))
        imports = options.pop("imports", import_line(attention, name))
        outcome = Outcome(name, inside)
        try:
            check_loaded(outcome, (name, imports, attention), **options)
        except ValueError as error:
            raise error.with_traceback(None) from None
        shown = "\n\n".join([*map(str, outcome.reports), *outcome.errors.values()])
        if outcome.errors and not outcome.reports:
            raise CallError(shown)
        if outcome.failed or outcome.errors:
            pytest.fail(shown, pytrace=False)
        return outcome.reports if outcome.inside else outcome.reports[0]


@pytest.fixture
def attention_laws() -> AttentionLaws:
    """Run the laws on an implementation: `attention_laws(MyAttention, causal=True)`."""
    return AttentionLaws()
