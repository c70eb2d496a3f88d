"""What does a call cost where there is nothing to compute?

`python benchmarks/tiny.py` takes about ten seconds on two cores.
"""

import sys

from run import record

if __name__ == "__main__":
    sys.exit(record("tiny"))
