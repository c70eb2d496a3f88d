r"""# Measuring peak memory

This module measures the memory of one call: its *peak*, the largest amount in use
during the call minus the amount in use before it, and the *retained* memory, which is
still in use after the result has been freed. On a GPU, PyTorch's allocator counts both
exactly. On a CPU, only the *resident set size* of the process is known, from the
operating system. So each implementation runs in a process of its own. Its allocator
returns freed memory at once, and its peak is reset before each call.

$$\texttt{peak} = \texttt{VmHWM}_\text{after} - \texttt{VmRSS}_\text{before}$$

This is the memory that must be free for the call. It includes the buffers of libraries,
which a sum over tensors would not.

Source: [proc(5)](https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html) for
`clear_refs`, [mallopt(3)](https://man7.org/linux/man-pages/man3/mallopt.3.html) for
the thresholds of the allocator.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from attention_bench.equal import make_step
from attention_bench.implementations import ALL_IMPLEMENTATIONS
from attention_bench.setting import Setting
from attention_bench.timing import error_summary

# Bytes under "peak" and "retained", or the reason why there are none.
Measurement = dict[str, int] | str

# glibc maps blocks from 64 KiB up one by one, and unmaps them when they are freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

# Linux only: the memory of this process, and the file that resets its peak.
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> tuple[int, int]:
    r"""The resident set size of this process: now, and its peak since `reset_peak`.

    >>> current, peak = resident_bytes()
    >>> 0 < current <= peak
    True
    """
    if STATUS.exists():
        text = STATUS.read_text(encoding="utf-8")
        kilobytes = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", text))
        current = 1024 * int(kilobytes.get("VmRSS", 0))
        peak = 1024 * int(kilobytes.get("VmHWM", 0))
        return current, max(current, peak)
    # Other systems report only the peak of the whole process, so a call is visible only
    # if it needs more than all calls before it. For this reason, lengths are measured
    # in ascending order.
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak, peak


def reset_peak(device: torch.device) -> int:
    """Reset the peak; return the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if CLEAR_REFS.exists():
        # 5 resets the peak resident set size: proc_pid_clear_refs(5).
        CLEAR_REFS.write_text("5", encoding="utf-8")
    return resident_bytes()[0]


def current_and_peak(device: torch.device) -> tuple[int, int]:
    """The bytes in use now, and their peak since `reset_peak`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        current = torch.cuda.memory_allocated(device)
        return current, torch.cuda.max_memory_allocated(device)
    return resident_bytes()


def measure(name: str, setting: Setting) -> dict[str, int]:
    r"""The peak and retained memory of one step of an implementation, in this process.

    >>> found = measure("nn", Setting(1, 7))
    >>> sorted(found), found["peak"] >= 0
    (['peak', 'retained'], True)
    """
    adapter = ALL_IMPLEMENTATIONS[name].build(setting.core(), setting)
    step = make_step(adapter, setting)
    before = reset_peak(setting.device)
    step()
    current, peak = current_and_peak(setting.device)
    return {"peak": max(0, peak - before), "retained": max(0, current - before)}


def measure_in_subprocess(
    name: str, settings: Sequence[Setting], threads: int, timeout: float = 600
) -> Iterator[Measurement]:
    r"""Measure settings in one new process, which may be killed if out of memory."""
    spec = {
        "name": name,
        "threads": threads,
        "settings": [setting.as_dict() for setting in settings],
    }
    command = [sys.executable, "-m", "attention_bench.memory", json.dumps(spec)]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=os.environ | ALLOCATOR,
            timeout=timeout,
            check=False,
        )
        output = process.stdout
        problem = f"its process ended with exit status {process.returncode}"
        if process.stderr.strip():
            problem += f": {process.stderr.strip().splitlines()[-1]}"
    except subprocess.TimeoutExpired as error:
        # Bytes, even with `text=True`: https://github.com/python/cpython/issues/87597
        output = (error.stdout or b"").decode()
        problem = f"no result within {timeout:g} seconds"
    # A process that was killed has printed the settings that it had finished.
    lines = output.splitlines()
    for line in lines:
        measurement: Measurement = json.loads(line)
        yield measurement
    for _ in settings[len(lines) :]:
        yield problem


def main(spec: dict[str, Any]) -> None:
    """Measure, and print one line of JSON for each setting: the bytes, or an error."""
    torch.set_num_threads(spec["threads"])
    settings = [Setting.from_dict(fields) for fields in spec["settings"]]
    for setting in settings:
        measurement: Measurement
        try:
            # The first call starts threads and loads the kernels of this size, which
            # stay; only the second call counts.
            measure(spec["name"], setting)
            measurement = measure(spec["name"], setting)
        except Exception as error:
            measurement = error_summary(error)
        print(json.dumps(measurement), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
