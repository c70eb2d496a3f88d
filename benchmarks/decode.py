"""How long does one more token take?

`python benchmarks/decode.py` takes about a minute on two cores.
"""

import sys

from run import record

if __name__ == "__main__":
    sys.exit(record("decode"))
