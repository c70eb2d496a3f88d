"""How does the time of a forward pass grow with the length?

`python benchmarks/growth.py` takes about a minute on two cores.
"""

import sys

from run import record

if __name__ == "__main__":
    sys.exit(record("growth"))
