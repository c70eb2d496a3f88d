r"""# How much memory

The peak of one call, above what was in use when it began, and what is still kept when
its result has been dropped. On a GPU the allocator counts both exactly. On a CPU there
is only the process, and what the operating system says of it: its *resident set*. So
each contestant has a process of its own, whose allocator is told to give back at once
whatever is freed, and whose high-water mark is set back before each call.

$$\texttt{peak} = \texttt{VmHWM}_\text{after} - \texttt{VmRSS}_\text{before}$$

That is what a machine must have free, buffers of libraries included; a count of tensors
would not see those.

Source: [proc(5)](https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html) for
`clear_refs`, [mallopt(3)](https://man7.org/linux/man-pages/man3/mallopt.3.html) for
what the allocator gives back.
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

from attention_bench.equal import everyone, step
from attention_bench.setting import DTYPES, Setting
from attention_bench.timing import reason

# Blocks from 64 KiB up are mapped one by one, and unmapped when they are freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> tuple[int, int]:
    r"""The resident set of this process in bytes: now, and at most since `start`.

    >>> now, most = resident()
    >>> 0 < now <= most
    True
    """
    if STATUS.exists():
        found = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", STATUS.read_text()))
        now, most = (1024 * int(found.get(key, 0)) for key in ("VmRSS", "VmHWM"))
        return now, max(now, most)
    # Elsewhere only the mark of a whole life is known: a later call shows only if it
    # needs more than all before it, which is why lengths grow.
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    most = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most, most


def start(device: torch.device) -> int:
    """Set the high-water mark back; return the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if CLEAR.exists():
        CLEAR.write_text("5")
    return resident()[0]


def now_and_most(device: torch.device) -> tuple[int, int]:
    """The bytes in use now, and at most since `start`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(
            device
        )
    return resident()


def measure(name: str, setting: Setting) -> dict[str, int]:
    r"""What one call of a contestant needs, in this process, and what it keeps.

    Raises whatever the contestant raises.

    >>> found = measure("nn", Setting(1, 7))
    >>> sorted(found), found["peak"] >= 0
    (['kept', 'peak'], True)
    """
    entry = everyone()[name].build(setting.core(), setting)
    entry.module.train(setting.training)
    call = step(entry, setting)
    before = start(setting.device)
    call()
    now, most = now_and_most(setting.device)
    return {"peak": max(0, most - before), "kept": max(0, now - before)}


def in_a_process(
    name: str, settings: Sequence[Setting], threads: int, timeout: float = 600
) -> Iterator[dict[str, int] | str]:
    r"""Measure these settings in a fresh process; a string is the reason why not.

    A process that is killed for its hunger takes nothing else with it.
    """
    spec = {
        "name": name,
        "threads": threads,
        "settings": [s.as_json() for s in settings],
    }
    command = [sys.executable, "-m", "attention_bench.memory", json.dumps(spec)]
    done = 0
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=os.environ | ALLOCATOR,
            timeout=timeout,
            check=False,
        )
        output, why = process.stdout, f"its process ended with {process.returncode}"
        last = process.stderr.strip().splitlines()[-1:]
        why = f"{why}: {last[0]}" if last else why
    except subprocess.TimeoutExpired as error:
        output, why = str(error.stdout or ""), f"no answer in {timeout:g} seconds"
    for line in output.splitlines():
        answer: dict[str, int] | str = json.loads(line)
        yield answer
        done += 1
    for _ in settings[done:]:
        yield why


def read_setting(plain: dict[str, Any]) -> Setting:
    r"""A setting from its plain data.

    >>> read_setting(Setting(2, 3).as_json()) == Setting(2, 3)
    True
    """
    types = {"dtype": DTYPES[plain["dtype"]], "device": torch.device(plain["device"])}
    return Setting(**plain | types)


def main(spec: dict[str, Any]) -> None:
    """Measure, and print a line of JSON for each setting: two numbers, or a reason."""
    torch.set_num_threads(spec["threads"])
    settings = [read_setting(plain) for plain in spec["settings"]]
    # The first call of all starts threads and loads kernels, and is not counted.
    for number, setting in enumerate([*settings[:1], *settings]):
        answer: dict[str, int] | str
        try:
            answer = measure(spec["name"], setting)
        except Exception as error:
            answer = reason(error)
        if number:
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
