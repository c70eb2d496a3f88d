"""Training on several processes is that of one, and sends the bytes of the formula."""

import sys

import pytest

from headnotes.parallel.comparison import Report, compare
from headnotes.parallel.engines import ENGINES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def reports(request: pytest.FixtureRequest) -> dict[str, Report]:
    """All questions to so many processes, which are started once."""
    return compare(request.param)


def test_outputs_gradients_and_losses_are_those_of_one_process(
    reports: dict[str, Report],
) -> None:
    assert set(reports) == set(ENGINES)
    for engine, report in reports.items():
        differences = report.output, report.gradient, report.loss
        assert max(differences) < 1e-5, engine


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts bytes")
def test_the_bytes_sent_are_those_of_the_formula(reports: dict[str, Report]) -> None:
    for engine, report in reports.items():
        # Beside the tensors travel headers, and one number, the count of tokens.
        assert 1 < report.sent / report.formula < 1.01, engine
