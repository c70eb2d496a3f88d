# %% [markdown]
# # The bug museum
#
# These bugs were made by people who know their trade, in code that was read, run,
# trained and published, and hardly any of them raised an exception. Each stands here as
# we wrote it down again, in as few lines as it takes, and each has a link to the thread
# in which it really happened: nobody is to be blamed, and everybody may learn.
#
# Read it as an exercise. The label says how the bug shows, if it shows at all. Find it
# in the code, where `mask` is True for keys that may be read; then unfold the answer. It
# names the [law](laws.md) that is broken, and shows the smallest example that
# `headnotes check` found when this page was built, as code which runs:
# [`draw`](../source/attention_laws/tools.md#draw) makes random numbers, and
# [`enliven`](../source/attention_laws/tools.md#enliven) gives the module weights under which rows
# of attention differ.

# %% hide="true"
import difflib
import math
import sys
import textwrap
import types

sys.path.insert(0, "../..")

import museum
from IPython.display import Markdown, display

from attention_laws import LAWS, check


def module(exhibit):
    """The exhibit, run as a module."""
    made = types.ModuleType(exhibit.name)
    exec(exhibit.head + exhibit.code, made.__dict__)
    return made


def cure(exhibit):
    """The lines that mend the code, as a diff."""
    old, new = exhibit.code.splitlines(), exhibit.mended.splitlines()
    lines = list(difflib.unified_diff(old, new, n=0, lineterm=""))[3:]
    return "\n".join("" if line.startswith("@@") else line for line in lines)


def fenced(text, language):
    return f"```{language}\n{text.strip()}\n```"


def found(command, example):
    """What was seen, at which sizes, and the lines that show it."""
    lines = [f"$ {command}", *textwrap.wrap(example.said, 76), f"at {example.sizes}"]
    if not math.isnan(example.amount):
        lines.append(f"by {example.amount:.2g}, tolerance {example.tolerance:.0e}")
    return fenced("\n".join(lines), "text") + "\n\n" + fenced(example.code, "python")


def law(name):
    """A link to the page on which the law is told."""
    page = LAWS[name].test.__module__.removeprefix("attention_laws.")
    return f"[{name.replace('_', ' ')}](../source/laws/{page}.md#{name})"


def link(exhibit):
    """A link to the thread, and what is said of it."""
    url, said = exhibit.thread.split(maxsplit=1)
    _, _, _, owner, repository, _, number = url.split("/")
    return f"[{owner}/{repository} #{number}]({url})", said


def show(room):
    """All exhibits of a room: label and code, and the answer, folded."""
    numbers = [name for names in museum.ROOMS.values() for name in names]
    for name in museum.ROOMS[room]:
        exhibit = museum.read(name)
        made = getattr(module(exhibit), exhibit.target)
        imports = f"from museum.{name} import {exhibit.target}\n"
        report = check(made, **exhibit.options, only=exhibit.law, imports=imports)
        (finding,) = report.broken
        command = f"headnotes check museum/{name}.py:{exhibit.target}"
        command = " ".join([command, *museum.flags(exhibit)])
        answer = [
            f"**{exhibit.title}.** {exhibit.bug}",
            f"**Why nobody saw it.** {exhibit.unseen}",
            f"**The law** it breaks: {law(exhibit.law)}. {finding.law.statement}",
            found(command, finding.counterexample),
            "**The cure:**",
            fenced(cure(exhibit), "diff"),
            f"**Where it happened:** {' '.join(link(exhibit))}",
        ]
        parts = [
            f"### Exhibit {numbers.index(name) + 1} {{ #{name} }}",
            exhibit.symptom,
            fenced(exhibit.code, "python"),
            '??? success "The bug"\n\n' + textwrap.indent("\n\n".join(answer), "    "),
        ]
        display(Markdown("\n\n".join(parts)))


# %% [markdown]
# ## What is hidden

# %% hide="true"
show("What is hidden")

# %% [markdown]
# ## Axes and heads

# %% hide="true"
show("Axes and heads")

# %% [markdown]
# ## Numbers and weights

# %% hide="true"
show("Numbers and weights")

# %% [markdown]
# ## Training and evaluation

# %% hide="true"
show("Training and evaluation")

# %% [markdown]
# ## Positions

# %% hide="true"
show("Positions")

# %% [markdown]
# ## The catalogue
#
# All exhibits, and the laws that catch them. Every one of these catches is a test. So
# is that the mended code keeps all laws, which shows that it was the bug that was
# caught, and nothing else. The files lie in the folder `museum` of the repository, and
# `headnotes check` takes yours in the same way.

# %% hide="true"
lines = ["| no. | exhibit | law | thread |", "|--:|---|---|---|"]
for names in museum.ROOMS.values():
    for name in names:
        exhibit = museum.read(name)
        cells = [f"[{exhibit.title}](#{name})", law(exhibit.law), link(exhibit)[0]]
        lines.append(f"| {len(lines) - 1} | {' | '.join(cells)} |")
display(Markdown("\n".join(lines)))
