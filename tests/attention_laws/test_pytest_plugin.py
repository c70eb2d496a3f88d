"""The fixture `attention_laws`, in another project."""

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

PLUGINS = ("-p", "attention_laws.pytest_plugin", "-p", "no:hypothesispytest")

TESTS = """
from torch import nn
from headnotes import MultiHeadAttention


class Twice(MultiHeadAttention):
    def forward(self, **inputs):
        return super().forward(**inputs) * (2 if self.training else 1)


def test_passes(attention_laws):
    report = attention_laws(MultiHeadAttention, only=["causality"], seed=3)
    assert len(report.passed) == 1


def test_fails(attention_laws):
    inputs = ("query", "key", "value")
    attention_laws(Twice, only=["eval_matches_train"], inputs=inputs)
"""


@pytest.mark.slow
def test_a_law_that_fails_fails_the_test_with_the_table(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest(*PLUGINS, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    text = result.stdout.str()
    assert "eval_matches_train      FAIL" in text
    assert "0 passed, 1 failed, 0 skipped" in text
    assert "Traceback" not in text


MODEL = """
from torch import nn
from headnotes import MultiHeadAttention


class ScaledAttention(MultiHeadAttention):
    def get_scores(self, query, key):
        return 3 * super().get_scores(query, key)


def build(kind=MultiHeadAttention):
    return nn.ModuleDict({"first": MultiHeadAttention(3, 12), "second": kind(3, 12)})


def build_scaled():
    return build(ScaledAttention)


def test_passes(attention_laws):
    (report,) = attention_laws(build, inside=True, only=["formula"])
    assert report.name == "build_first"


def test_fails(attention_laws):
    attention_laws(build_scaled, inside=True, only=["formula", "compiled"])


def test_skips(attention_laws):
    attention_laws(MultiHeadAttention, only=["sinks"])


def test_misspells(attention_laws):
    attention_laws(MultiHeadAttention, causall=True)


def test_cannot_call(attention_laws):
    attention_laws(MultiHeadAttention, mask={"nope": "attend:bk"})
"""


@pytest.mark.slow
def test_attentions_inside_a_model_and_errors_are_reported_without_noise(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(MODEL)
    result = pytester.runpytest_subprocess(*PLUGINS, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=4)
    text = result.stdout.str()
    assert "build_scaled_second\n" in text
    assert "no law was tested on `MultiHeadAttention`: each is skipped" in text
    assert "there is no option `causall`; did you mean `causal`?" in text
    assert "`mask` names `nope`, which is no argument" in text
    assert "def check" not in text
    assert "torch.__trace" not in text


@pytest.mark.slow
def test_the_plugin_imports_neither_torch_nor_the_laws() -> None:
    program = (
        "import sys, attention_laws.pytest_plugin\n"
        "print({'torch', 'attention_laws.checker', 'headnotes.mha'} & {*sys.modules})"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"
