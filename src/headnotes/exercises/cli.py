r"""# headnotes exercise

```console
$ headnotes exercise list
$ headnotes exercise start causal_mask exercises
$ headnotes exercise check exercises
```

The first command lists the [exercises](../../exercises/index.md). The second writes an
exercise into the folder `exercises/`: a script with the task in its comments,
`causal_mask.py`, and a test for pytest, `test_causal_mask.py`. Files that exist are
left as they are. The third checks all exercises in the folder, scripts and Jupyter
notebooks, and prints a report for each that does not pass.

The exercises that passed are stored in the same folder, in `headnotes-progress.json`.
`headnotes exercise list exercises` shows them.

The exit status of `check` is 0 if all exercises in the folder pass, and 1 if one does
not. It is 2 where a command could not run, for example because the folder has no
exercise.

Source: [checking a solution](checking.md), from the command line.
"""

import argparse
import io
import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from headnotes.exercises.checking import Report, check
from headnotes.exercises.exercise import load, name_of, notebooks, title_of

PROGRESS = "headnotes-progress.json"

# A link to a page of the site, which a file of the learner is not beside.
SITE_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)\s]*\)")

TEST = """\
from {name} import {target}

from headnotes.exercises import check


def test_{name}():
    report = check("{name}", {target})
    assert report, report
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the three commands."""
    commands = parser.add_subparsers(dest="exercise_command", required=True)
    about = "list the exercises, and those that passed in a folder"
    add_folder(commands.add_parser("list", help=about))
    start = commands.add_parser("start", help="write an exercise into a folder")
    start.add_argument("name", metavar="NAME", help="name of the exercise, or `all`")
    add_folder(start)
    add_folder(commands.add_parser("check", help="check the exercises in a folder"))


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add the folder that each command takes."""
    about = "folder of your exercises (default: the current folder)"
    parser.add_argument(
        "folder", nargs="?", default=".", type=Path, metavar="DIR", help=about
    )


def run(arguments: argparse.Namespace) -> int:
    """Run a command, and return the exit status."""
    try:
        if arguments.exercise_command == "list":
            print(listing(arguments.folder))
        elif arguments.exercise_command == "start":
            for path, is_new in start(arguments.name, arguments.folder).items():
                print(path if is_new else f"{path} exists, and is left as it is")
        else:
            return 0 if check_folder(arguments.folder) else 1
    except (ValueError, OSError) as error:
        print(f"headnotes exercise: {error}", file=sys.stderr)
        return 2
    return 0


def listing(folder: Path) -> str:
    """All exercises by series, each with its title and whether it has passed."""
    done = passed(folder)
    rows: dict[str, list[str]] = {}
    for name, path in notebooks().items():
        state = "pass" if name in done else ""
        row = f"  {state:6}{name:26}{title_of(path)}"
        rows.setdefault(load(name).series, []).append(row)
    lines = [line for series in rows for line in (series, *rows[series])]
    return "\n".join([*lines, "", progress(done)])


def progress(done: Iterable[str]) -> str:
    """How many exercises have passed."""
    return f"{len({*done} & {*notebooks()})} of {len(notebooks())} exercises passed"


def start(name: str, folder: Path) -> dict[Path, bool]:
    """Write an exercise, or all; the paths, each with whether it was written now."""
    written = {}
    for each in notebooks() if name == "all" else [name]:
        for file, text in files(each).items():
            path = folder / file
            written[path] = not path.exists()
            if written[path]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    return written


def files(name: str) -> dict[str, str]:
    r"""The script and the test of an exercise, by file name.

    >>> print(files("causal_mask")["test_causal_mask.py"])
    from causal_mask import causal_mask
    <BLANKLINE>
    from headnotes.exercises import check
    <BLANKLINE>
    <BLANKLINE>
    def test_causal_mask():
        report = check("causal_mask", causal_mask)
        assert report, report
    <BLANKLINE>
    """
    exercise = load(name)
    target = exercise.solution.__name__
    test = TEST.format(name=name, target=target)
    if exercise.laws:
        test = test.replace(f"import {target}", f"import {target}, law")
        test = test.replace(f", {target})", f", {target}, law=law)")
    text = notebooks()[name].read_text(encoding="utf-8")
    return {f"{name}.py": SITE_LINK.sub(r"\1", text), f"test_{name}.py": test}


def check_folder(folder: Path) -> bool:
    """Check the exercises in a folder, print the reports, and store which passed."""
    paths = sorted(folder.glob("*.py")) + sorted(folder.glob("*.ipynb"))
    names = notebooks()
    known = {path: name for path in paths if (name := name_of(path)) in names}
    if not known:
        way_out = "write one with `headnotes exercise start NAME DIR`"
        raise ValueError(f"`{folder}` holds no exercise; {way_out}")
    reports = {path: checked(path, name) for path, name in known.items()}
    done = passed(folder)
    for path, report in reports.items():
        print(f"{path.name:32}{'pass' if report else 'FAIL'}")
        done = done | {report.name} if report else done - {report.name}
    for report in reports.values():
        if not report:
            print(f"\n{report}")
    print(f"\n{progress(done)}")
    text = json.dumps({"passed": sorted(done)}, indent=2)
    (folder / PROGRESS).write_text(text + "\n", encoding="utf-8")
    return all(reports.values())


def passed(folder: Path) -> set[str]:
    """The exercises that are stored as passed in a folder."""
    path = folder / PROGRESS
    if not path.exists():
        return set()
    try:
        return {*json.loads(path.read_text(encoding="utf-8"))["passed"]}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"`{path}` cannot be read; remove it") from None


def checked(path: Path, name: str) -> Report:
    """The report on a file of the learner, which is run first."""
    namespace: dict[str, Any] = {"__name__": path.stem}
    try:
        with redirect_stdout(io.StringIO()):  # it prints its own report
            exec(compile(code_in(path), str(path), "exec"), namespace)
    except Exception as error:
        message = f"{path.name} cannot be run: {type(error).__name__}: {error}"
        return Report(name, message)
    target = load(name).solution.__name__
    mine: Callable[..., Any] | None = namespace.get(target)
    if not callable(mine):
        return Report(name, f"{path.name} has no function or class `{target}`.")
    return check(name, mine, law=namespace.get("law"))


def code_in(path: Path) -> str:
    """The code of a script, or of a notebook without commands of IPython."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    cells = json.loads(text)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return re.sub(r"^[%!].*$", "", "\n".join(code), flags=re.MULTILINE)
