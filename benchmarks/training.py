"""How long do a forward and a backward pass take?

`python benchmarks/training.py` takes about five minutes on two cores.
"""

import sys

from run import record

if __name__ == "__main__":
    sys.exit(record("training"))
