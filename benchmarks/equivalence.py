"""Measure how far implementations of attention differ on each device of this machine.

`python benchmarks/equivalence.py` writes the largest difference of the equivalence
matrix to `benchmarks/results/equivalence-*.json`, one file for each device. The page of
the matrix lists these files. Another folder can be given as the argument.
"""

import datetime
import json
import platform
import sys
from pathlib import Path

import torch

from attention_bench.report import commit, device_name, slug, write
from headnotes.compare import equivalence

RESULTS = Path(__file__).parent / "results"
HEADS, D_MODEL = 4, 24


def worst_pair(device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative difference in the whole matrix."""
    factory_kwargs = {"device": device, "dtype": dtype}
    systems = equivalence.systems(
        equivalence.SYSTEMS, heads=HEADS, d_model=D_MODEL, **factory_kwargs
    )
    cases = equivalence.cases(D_MODEL, **factory_kwargs)
    return equivalence.worst(equivalence.matrix(systems, cases))


def main(folder: Path) -> None:
    """Measure each device, and write one record for it to `folder`."""
    # TF32 keeps 10 of the 23 bits of float32's significand.
    torch.set_float32_matmul_precision("highest")
    for device_type in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        device = torch.device(device_type)
        record = {
            "device": device_name(device),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "worst": {
                "float32": worst_pair(device, torch.float32),
                "float64": worst_pair(device, torch.float64),
            },
        }
        text = json.dumps(record, indent=2) + "\n"
        write(folder / f"equivalence-{slug(record['device'])}.json", text)
        print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
