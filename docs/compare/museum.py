# %% [markdown]
# # The bug museum
#
# These bugs were made by people who know their trade, in code that was read, run,
# trained and published, and hardly any of them raised an exception. Each stands here as
# we wrote it down again, in as few lines as it takes, and each has a link to the thread
# in which it really happened: nobody is to be blamed, and everybody may learn.
#
# Read it as an exercise. The label says how the bug shows, if it shows at all. Find it
# in the code, where `mask` is True for keys that a query may attend to; then unfold the
# answer. It names the [law](laws.md) that fails, and shows the smallest example that
# `headnotes check` found when this page was built, as code which runs:
# [`seeded_randn`](../source/attention_laws/tools.md#seeded_randn) makes random numbers, and
# [`randomize_parameters`](../source/attention_laws/tools.md#randomize_parameters) gives
# the module weights with which the rows of attention differ.

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


def run_as_module(exhibit):
    """The exhibit, executed as a module."""
    module = types.ModuleType(exhibit.name)
    exec(exhibit.header + exhibit.code, module.__dict__)
    return module


def fix_as_diff(exhibit):
    """The lines that fix the code, as a diff."""
    old, new = exhibit.code.splitlines(), exhibit.fixed_code.splitlines()
    lines = list(difflib.unified_diff(old, new, n=0, lineterm=""))[3:]
    return "\n".join("" if line.startswith("@@") else line for line in lines)


def code_block(text, language):
    return f"```{language}\n{text.strip()}\n```"


def show_counterexample(command, example):
    """The command, what it found at which sizes, and the program that shows it."""
    lines = [f"$ {command}", *textwrap.wrap(example.message, 76), f"at {example.sizes}"]
    if not math.isnan(example.difference):
        lines.append(
            f"difference {example.difference:.2g}, tolerance {example.tolerance:.0e}"
        )
    return (
        code_block("\n".join(lines), "text")
        + "\n\n"
        + code_block(example.code, "python")
    )


def link_to_law(name):
    """A link to the source of the law."""
    page = LAWS[name].test.__module__.removeprefix("attention_laws.")
    return f"[{name.replace('_', ' ')}](../source/attention_laws/{page}.md#{name})"


def link_to_thread(exhibit):
    """A link to the thread, and the remark about it."""
    url, remark = exhibit.thread.split(maxsplit=1)
    _, _, _, owner, repository, _, number = url.split("/")
    return f"[{owner}/{repository} #{number}]({url})", remark


def show(room):
    """All exhibits of a room: label and code, and the answer, folded."""
    numbers = [name for names in museum.ROOMS.values() for name in names]
    for name in museum.ROOMS[room]:
        exhibit = museum.read_exhibit(name)
        attention = getattr(run_as_module(exhibit), exhibit.target)
        imports = f"from museum.{name} import {exhibit.target}\n"
        report = check(attention, **exhibit.options, only=exhibit.law, imports=imports)
        (result,) = report.failed
        command = f"headnotes check museum/{name}.py:{exhibit.target}"
        command = " ".join([command, *museum.command_line_flags(exhibit)])
        answer = [
            f"**{exhibit.title}.** {exhibit.bug}",
            f"**Why nobody saw it.** {exhibit.why_unseen}",
            f"**The law** it violates: {link_to_law(exhibit.law)}. {result.law.statement}",
            show_counterexample(command, result.counterexample),
            "**The fix:**",
            code_block(fix_as_diff(exhibit), "diff"),
            f"**Where it happened:** {' '.join(link_to_thread(exhibit))}",
        ]
        parts = [
            f"### Exhibit {numbers.index(name) + 1} {{ #{name} }}",
            exhibit.symptom,
            code_block(exhibit.code, "python"),
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
# is that the fixed code passes all laws, which shows that it was the bug that was
# caught, and nothing else. The files lie in the folder `museum` of the repository, and
# `headnotes check` takes yours in the same way.

# %% hide="true"
lines = ["| no. | exhibit | law | thread |", "|--:|---|---|---|"]
for names in museum.ROOMS.values():
    for name in names:
        exhibit = museum.read_exhibit(name)
        thread, _ = link_to_thread(exhibit)
        cells = [f"[{exhibit.title}](#{name})", link_to_law(exhibit.law), thread]
        lines.append(f"| {len(lines) - 1} | {' | '.join(cells)} |")
display(Markdown("\n".join(lines)))
