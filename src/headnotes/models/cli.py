r"""# headnotes train

```console
$ headnotes train dates
$ headnotes train dates --run runs/2 --seed 2
$ headnotes train dates --data pairs.tsv --skip-bad-lines
```

The command trains the [translator](translator.md) on [dates](dates.md), and prints its
exact match on held-out dates, with some mistakes. It needs `pip install
'headnotes[train]'`.

The run's folder holds the checkpoint, the weights, the metrics and `result.json`. The
same command continues a run that was interrupted, and prints the result of one that is
complete.

With `--data`, the pairs come from a TSV file: on each line a text, a tab, and a date
such as 1998-05-03. Dates are held out by their hash, as in the generated task.

The exit status is 0 if the run is complete, and 2 where it could not run.

Source: [training](training.md), from the command line.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

from headnotes.models import dates
from headnotes.models.training import Settings, exact_match, train
from headnotes.models.translator import Translator

HELD_OUT = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the task and the options."""
    default = Settings()
    parser.add_argument("task", choices=["dates"], help="what to learn")
    parser.add_argument(
        "--run",
        type=Path,
        default=Path("runs/dates"),
        metavar="DIR",
        help="folder of the run (default: runs/dates)",
    )
    for name, about in {
        "seed": "seed of the weights and of the batches",
        "steps": "number of training steps",
        "batch_size": "number of pairs in a batch",
    }.items():
        value = getattr(default, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=value,
            metavar="N",
            help=f"{about} (default: {value})",
        )
    parser.add_argument(
        "--data", type=Path, metavar="TSV", help="train on the pairs of this file"
    )
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="leave out bad lines of the file"
    )


def run(arguments: argparse.Namespace, train: Callable[..., Translator] = train) -> int:
    """Run the command with a function that trains; return the exit status."""
    settings = Settings(
        seed=arguments.seed, steps=arguments.steps, batch_size=arguments.batch_size
    )
    try:
        draw: dates.Draw = dates.sample
        if arguments.data is not None:
            draw = dates.sampler(
                dates.read_pairs(
                    arguments.data, skip_bad_lines=arguments.skip_bad_lines
                )
            )
        model = train(arguments.run, settings, draw)
    except (ImportError, OSError, ValueError) as error:
        print(f"headnotes train: {error}", file=sys.stderr)
        return 2
    pairs = draw("test", HELD_OUT, Random(0))
    share, texts = exact_match(model, pairs)
    result = {"seed": settings.seed, "pairs": len(pairs), "exact_match": share}
    (arguments.run / "result.json").write_text(json.dumps(result) + "\n")
    print(f"\nexact match on {len(pairs)} texts of held-out dates: {share:.2%}")
    mistakes = [
        (pair, text)
        for pair, text in zip(pairs, texts, strict=True)
        if text != pair.target
    ]
    for pair, text in mistakes[:5]:
        print(f"  {pair.text}: {text}, not {pair.target}")
    return 0
