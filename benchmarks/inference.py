"""How long does a forward pass take?

`python benchmarks/inference.py` takes about four minutes on two cores.
"""

import sys

from run import record

if __name__ == "__main__":
    sys.exit(record("inference"))
