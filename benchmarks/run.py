"""Ask one question after the other, and record the answers of this machine.

`python benchmarks/run.py` takes about ten minutes on two cores; the page of benchmarks
is made from what it writes. Its options are those of `headnotes bench`.
"""

import sys
from pathlib import Path

from headnotes.cli import main

RESULTS = Path(__file__).parent / "results"


def record(*questions: str) -> int:
    """Ask these questions, or all of them, and write a file for each."""
    return main(["bench", *questions, "--results", str(RESULTS), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(record())
