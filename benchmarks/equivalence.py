"""Is it the same computation on this machine? Record the worst pair of each device.

`python benchmarks/equivalence.py` writes `benchmarks/results/equivalence-*.json`, one
file a device, which the page of the equivalence matrix lists; another folder can be
named.
"""

import datetime
import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

from headnotes.compare import equivalence as compare

RESULTS = Path(__file__).parent / "results"
HEADS, D_MODEL = 4, 24


def name_of(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match[1] if match else platform.processor()


def worst_pair(device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative difference in the whole matrix."""
    like = {"device": device, "dtype": dtype}
    systems = compare.systems(compare.SYSTEMS, heads=HEADS, d_model=D_MODEL, **like)
    cells = compare.matrix(systems, compare.cases(D_MODEL, **like))
    return compare.worst(cells)


def main(folder: Path) -> None:
    """Measure each device, and write down in `folder` what was found."""
    # float32 means float32: TF32 keeps 10 of its 23 bits.
    torch.set_float32_matmul_precision("highest")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        device = torch.device(kind)
        found = {
            "device": name_of(device),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": datetime.date.today().isoformat(),
            "commit": commit,
            "worst": {
                "float32": worst_pair(device, torch.float32),
                "float64": worst_pair(device, torch.float64),
            },
        }
        slug = re.sub(r"\W+", "-", found["device"].lower()).strip("-")
        path = folder / f"equivalence-{slug}.json"
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
