"""Run Python programs as forks of one process that has imported PyTorch.

A command of ours imports PyTorch for longer than it works. Each program still begins
with `sys.argv`, a folder and an output of its own, and with no module of ours imported.
"""

import atexit
import importlib
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen
from tempfile import TemporaryDirectory
from typing import Any


class Forks:
    """Runs programs of one environment; `with Forks(...)` leaves no process behind."""

    def __init__(
        self, python: str, environment: Mapping[str, str], modules: Sequence[str]
    ) -> None:
        command = [python, __file__, *modules]
        self.server = Popen(
            command, env=environment, stdin=PIPE, stdout=PIPE, text=True
        )

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *error: object) -> None:
        with self.server:
            pass  # closes its input, and waits for its end

    def run(
        self, program: str, arguments: Sequence[str], folder: Path
    ) -> CompletedProcess[str]:
        """The result of a Python program: its exit code, and its two outputs."""
        assert self.server.stdin
        assert self.server.stdout
        with TemporaryDirectory() as outputs:
            files = [f"{outputs}/{name}" for name in ("stdout", "stderr")]
            task = json.dumps([program, [program, *arguments], str(folder), files])
            print(task, file=self.server.stdin, flush=True)
            code = int(self.server.stdout.readline())
            texts = [Path(file).read_text(encoding="utf-8") for file in files]
        return CompletedProcess([program, *arguments], code, *texts)


def serve(modules: Sequence[str]) -> tuple[str, list[str]]:
    """Answer each task with the exit code of a fork; in the fork, return the task."""
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        program, arguments, folder, files = json.loads(line)
        pid = os.fork()
        if pid:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            continue
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        # Packages may have been installed since this process began.
        importlib.invalidate_caches()
        return program, arguments
    sys.exit()


if __name__ == "__main__":
    program, sys.argv = serve(sys.argv[1:])
    sys.path[0] = str(Path(program).parent)
    code: Any = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # To take the interpreter down would copy the memory of the first process, object by
    # object: a second.
    os._exit(int(code))
