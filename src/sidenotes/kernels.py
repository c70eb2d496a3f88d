"""Start the kernels of lessons as forks of one process, which has done their imports.

Most lessons need less time than their imports. On Linux, one process imports what the
option `setup` names, and each kernel is a fork of it; it shares no state with others,
because a fork changes its own copy of the memory only. Elsewhere, where system
libraries may not survive a fork, each kernel is a new process.
"""

import atexit
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from subprocess import PIPE, Popen
from threading import Lock
from typing import TYPE_CHECKING, Any

import psutil
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from sidenotes.split import LiterateError

if TYPE_CHECKING:
    # It imports doctest, which must see the debugger that ipykernel puts in place.
    from sidenotes.dependencies import Imports


class Kernels:
    """Starts the kernels of a build; `with Kernels(...)` leaves none running.

    The kernels can import from the roots of `imports`, even if not installed.
    """

    def __init__(self, setup: str, imports: "Imports") -> None:
        self.setup = setup
        self.imports = imports
        folders = [*map(str, imports.roots), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            # The default of ipykernel, which sets it after `setup`.
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        }
        self.lock = Lock()
        self.forks: list[Fork] = []

    def __enter__(self) -> "Kernels":
        return self

    def __exit__(self, *error: object) -> None:
        if "server" not in vars(self):
            return
        # Before the server ends, which removes zombies.
        for fork in self.forks:
            with suppress(psutil.NoSuchProcess):
                fork.kill()
        with suppress(BrokenPipeError), self.server:
            pass  # closes its input, and waits for its end

    @cached_property
    def server(self) -> Popen[str]:
        """The process that forks, started for the first kernel."""
        # -P: lessons cannot import from the folder of the build. The debugger, which
        # ipykernel imports, warns of frozen modules.
        options = ["-P", "-X", "frozen_modules=off"]
        command = [sys.executable, *options, "-m", __name__, self.setup]
        return Popen(command, env=self.environment, stdin=PIPE, stdout=PIPE, text=True)

    def manager(self, **options: Any) -> AsyncKernelManager:
        """The manager of a new kernel, for nbclient."""
        manager = AsyncKernelManager(**options)
        if sys.platform == "linux":
            manager.provisioner = Provisioner(
                kernel_spec=manager.kernel_spec, parent=manager, kernels=self
            )
        return manager

    def fork(self, arguments: Sequence[str], folder: str) -> "Fork":
        """Start a kernel with the command line arguments of ipykernel, in a folder."""
        with self.lock:
            assert self.server.stdin
            assert self.server.stdout
            with suppress(BrokenPipeError):  # then there is no answer
                task = json.dumps([arguments, folder])
                print(task, file=self.server.stdin, flush=True)
            answer = self.server.stdout.readline()
            if not answer:
                raise LiterateError(f"`setup` failed, see above: {self.setup}")
            fork = Fork(int(answer))
            self.forks.append(fork)
            return fork


class Fork(psutil.Process):  # type: ignore[misc]  # psutil has no types
    """A kernel, with the attributes of `Popen` that its provisioner uses."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        """The server has taken the exit code, so that none but 0 is known."""
        return None if self.is_running() else 0


class Provisioner(LocalProvisioner):
    """Lets jupyter_client start a kernel with `Kernels.fork`."""

    def __init__(self, kernels: Kernels, **options: Any) -> None:
        super().__init__(**options)
        self.kernels = kernels

    async def launch_kernel(self, cmd: list[str], **options: Any) -> Any:
        """Start the kernel of the command `python -m ipykernel_launcher -f ...`."""
        self.process = self.kernels.fork(cmd[cmd.index("-f") :], options["cwd"])
        self.pid = self.pgid = self.process.pid
        return self.connection_info


def serve(setup: str) -> None:
    """Answer each line of the input with the process id of a new kernel."""
    # The kernels end if this process does. ipykernel reads the variable when imported.
    os.environ["JPY_PARENT_PID"] = str(os.getpid())
    from ipykernel import debugger, ipkernel  # noqa: F401, imported for the kernels
    from ipykernel.kernelapp import IPKernelApp

    exec(setup, {})
    if "matplotlib" in sys.modules:
        draw_when_shown()
    # IPython collects garbage at its exit, which would copy the memory of the server,
    # object by object.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the build closes the input instead
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no kernel becomes a zombie
    for line in sys.stdin:
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        arguments, folder = json.loads(line)
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        IPKernelApp.launch_instance(arguments)
        # To take the interpreter down would copy the memory of the server, object by
        # object: two thirds of the time of a kernel.
        atexit._run_exitfuncs()
        os._exit(0)


def draw_when_shown() -> None:
    """Do not draw a figure at the end of its cell, for a window that does not exist.

    IPython asks for it in each cell. The figure is drawn again for the page.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    FigureCanvasBase.draw_idle = (  # type: ignore[method-assign]
        lambda *arguments, **options: None
    )


if __name__ == "__main__":
    serve(sys.argv[1])
