"""The fixture `attention_laws`, in the tests of others."""

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

TESTS = """
from torch import nn
from headnotes import MultiHeadAttention


class Twice(MultiHeadAttention):
    def forward(self, **inputs):
        return super().forward(**inputs) * (2 if self.training else 1)


def test_mine(attention_laws):
    report = attention_laws(MultiHeadAttention, only=["causality"], seed=3)
    assert len(report.kept) == 1


def test_broken(attention_laws):
    inputs = ("query", "key", "value")
    attention_laws(Twice, only=["eval_without_dropout"], inputs=inputs)
"""


def test_a_broken_law_fails_the_test_with_the_table(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    plugins = ("-p", "attention_laws.pytest_plugin", "-p", "no:hypothesispytest")
    result = pytester.runpytest(*plugins, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    text = result.stdout.str()
    assert "eval_without_dropout    broken" in text
    assert "0 kept, 1 broken, 0 not applicable" in text
    assert "Traceback" not in text


def test_nothing_is_imported_unless_a_test_asks() -> None:
    program = (
        "import sys, attention_laws.pytest_plugin\n"
        "print({'torch', 'attention_laws.checker', 'headnotes.mha'} & {*sys.modules})"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"
