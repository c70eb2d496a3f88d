r"""# The laws as a test of yours

Where headnotes is installed, pytest has a fixture `attention_laws`:

```python
def test_my_attention_obeys_the_laws(attention_laws):
    attention_laws(MyAttention, causal=True)
```

The test fails with the table of laws if one of them is broken. Until a test asks for
it, nothing is imported, neither torch nor the laws.

Source: [checking an attention](checker.md), from a test.
"""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attention_laws.checker import Report


class AttentionLaws:
    """Calls `attention_laws.check`, and fails the test where a law is broken."""

    def __call__(self, attention: Any, **options: Any) -> "Report":
        """Check `attention`; takes the options of `check`, and returns its report."""
        from attention_laws.checker import check

        report = check(attention, **options)
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report


@pytest.fixture
def attention_laws() -> AttentionLaws:
    """Ask an attention the laws: `attention_laws(MyAttention, causal=True)`."""
    return AttentionLaws()
