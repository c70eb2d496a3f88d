"""How much memory does a call need, and how much does it keep?

`python benchmarks/memory.py` takes about a minute on two cores.
"""

import sys

from run import record

if __name__ == "__main__":
    sys.exit(record("memory"))
