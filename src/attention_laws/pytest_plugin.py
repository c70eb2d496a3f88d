r"""# Running the laws in pytest

The pytest fixture `attention_laws` runs the laws in a test. It is available where
headnotes is installed:

```python
def test_my_attention_satisfies_the_laws(attention_laws):
    attention_laws(MyAttention, causal=True)
```

The test fails if a law does, and shows the table of results. The fixture imports torch
and the laws at its first call only, so other tests of your project start as fast as
before.

Source: [running the laws](checker.md), from a test.
"""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attention_laws.checker import Report


class AttentionLaws:
    """Calls `attention_laws.check`, and fails the test if a law fails."""

    def __call__(self, attention: Any, **options: Any) -> "Report":
        """Check `attention`; takes the options of `check`, and returns its report."""
        from attention_laws.checker import check

        report = check(attention, **options)
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report


@pytest.fixture
def attention_laws() -> AttentionLaws:
    """Run the laws on an implementation: `attention_laws(MyAttention, causal=True)`."""
    return AttentionLaws()
