r"""# headnotes train --parallel

```console
$ torchrun --nproc-per-node 2 --no-python -- headnotes train dates --parallel ddp
$ torchrun --nproc-per-node 2 --no-python -- headnotes train dates --parallel heads=2
```

With `--parallel`, [headnotes train](../models/cli.md) uses all processes that
`torchrun` starts: `ddp` and `fsdp` split the batch over them, and `heads=2` splits the
heads over two. All other options are those of one process. Only the first process
prints.

The exit status is 2 where a process could not run, or where another one has stopped;
`torchrun` then stops the others. The same command continues the run.

Source: [training](training.md), from the command line.
"""

import argparse
import os
from contextlib import nullcontext, redirect_stdout
from functools import partial
from io import StringIO

from headnotes.models import cli


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headnotes train`, and the option for several processes."""
    cli.add_arguments(parser)
    parser.add_argument(
        "--parallel",
        metavar="ENGINE",
        help="train on all processes of torchrun with ddp, fsdp, or heads=N",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command on this process, and return the exit status."""
    if arguments.parallel is None:
        return cli.run(arguments)
    # This loads PyTorch's engines, which takes most of a second.
    from headnotes.parallel.training import train

    is_first = os.environ.get("RANK", "0") == "0"
    with nullcontext() if is_first else redirect_stdout(StringIO()):
        return cli.run(arguments, partial(train, option=arguments.parallel))
