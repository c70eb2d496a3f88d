r"""# The machine

A time means little without the machine that took it, so each record names it, with all
versions and the commit. And it says what this machine can do at best, measured in the
same minutes: how fast it multiplies two large matrices, and how fast it copies a block
of memory that fits into no cache. A contestant that reaches 80 % of such a ceiling can
be beaten by no more than a quarter, whoever writes it.

Which of the two ceilings is the lower one depends on the work: much arithmetic on few
bytes meets the first, little on many the second. The time that a machine needs at the
least is the longer of both.

$$t \ge \max\left(\frac{\text{FLOPs}}{\text{FLOPs per second}},
  \frac{\text{bytes}}{\text{bytes per second}}\right)$$

Source: [Roofline](https://doi.org/10.1145/1498765.1498785), Williams, Waterman and
Patterson 2009.
"""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from attention_bench.timing import stopwatch

LIBRARIES = ("transformers", "x-transformers")


def name_of(device: torch.device) -> str:
    r"""What the device calls itself.

    >>> len(name_of(torch.device("cpu"))) > 0
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    match = re.search(r"model name\s*:\s*(.+)", text)
    name = match[1].strip() if match else platform.processor()
    return name or platform.machine() or "a CPU"


def slug(name: str) -> str:
    r"""A name that can stand in a name of a file.

    >>> slug("Intel(R) Xeon(R) Processor")
    'intel-r-xeon-r-processor'
    """
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def commit() -> str:
    """The commit of the source, with a `+` where it was changed; empty if unknown."""
    here = Path(__file__)

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    try:
        # A package that is installed can lie in the tree of some other project.
        if git("ls-files", "--error-unmatch", here.name).returncode:
            return ""
        changed = git("status", "--porcelain", "--untracked-files=no", ".").stdout
        return git("rev-parse", "--short", "HEAD").stdout.strip() + "+" * bool(changed)
    except OSError:  # no git
        return ""


def cores() -> int:
    """How many of its cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory(device: torch.device) -> float:
    """How much memory there is, in GiB; 0 if unknown."""
    if device.type == "cuda":
        return round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0.0
    return round(total / 2**30, 1)


def describe(device: torch.device) -> dict[str, Any]:
    r"""All that a reader must know of the machine, but for its ceilings.

    >>> sorted(describe(torch.device("cpu")))[:4]
    ['commit', 'cores', 'cuda', 'date']
    """
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": name_of(device),
        "kind": device.type,
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": memory(device),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": (torch.version.cuda or "") if device.type == "cuda" else "",
        "libraries": versions,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def ceilings(
    device: torch.device, dtype: torch.dtype, *, turns: int = 8
) -> dict[str, float]:
    r"""The fastest of a few products and copies, in FLOPs and bytes a second.

    >>> found = ceilings(torch.device("cpu"), torch.float32, turns=1)
    >>> sorted(found)
    ['bytes_per_second', 'flops_per_second']
    """
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 2048
    count = 2**29 if on_gpu else 2**26
    seconds = stopwatch(device)
    with torch.inference_mode():
        a = torch.ones(size, size, dtype=dtype, device=device)  # [size, size]
        out = torch.empty_like(a)
        product = min(
            seconds(lambda: torch.mm(a, a, out=out), 1) for _ in range(1 + turns)
        )
        source = torch.ones(count, device=device)  # [count]
        target = torch.empty_like(source)
        copied = min(seconds(lambda: target.copy_(source), 1) for _ in range(1 + turns))
    # A copy reads each byte and writes it.
    moved = 2 * count * source.element_size()
    return {
        "flops_per_second": 2 * size**3 / product,
        "bytes_per_second": moved / copied,
    }
