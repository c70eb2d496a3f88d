# %% [markdown]
# # Bug museum: common bugs of attention code
#
# This page collects bugs of attention code, for anyone who writes or reviews such code.
# Experienced authors made them, in code that was reviewed, trained and published, and
# hardly any of them raised an exception. Each is rewritten here in as few lines as
# possible, and links to the thread in which it was reported.
#
# You can read it as an exercise. The text above the code describes the symptom. Find
# the bug in the code, where `mask` is True for keys that a query may attend to; then
# unfold the answer. It names the [law](laws.md) that fails, and shows the smallest
# counterexample that `headnotes check` found when this page was built, as a program:
# [`seeded_randn`](../source/attention_laws/tools.md#seeded_randn) generates random numbers,
# and [`randomize_parameters`](../source/attention_laws/tools.md#randomize_parameters)
# gives the module weights with which the rows of attention differ. To find a bug by its
# name, see the [catalog](#catalog); by its symptom, [troubleshooting](../troubleshooting.md).

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
    """Execute the code of an exhibit as a module."""
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
    """The command, the violation it finds with its sizes, and the program."""
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
    """Display all exhibits of a room: symptom, code, and the folded answer."""
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
            f"**Why it went unnoticed.** {exhibit.why_unseen}",
            f"**The law that it violates:** {link_to_law(exhibit.law)}. {result.law.statement}",
            show_counterexample(command, result.counterexample),
            "**The fix:**",
            code_block(fix_as_diff(exhibit), "diff"),
            f"**Where it was found:** {' '.join(link_to_thread(exhibit))}",
        ]
        topic, _, _ = exhibit.title.partition(": ")
        parts = [
            f"### Exhibit {numbers.index(name) + 1}: {topic} {{ #{name} }}",
            exhibit.symptom,
            code_block(exhibit.code, "python"),
            '??? success "The bug"\n\n' + textwrap.indent("\n\n".join(answer), "    "),
        ]
        display(Markdown("\n\n".join(parts)))


# %% [markdown]
# ## Masking

# %% hide="true"
show("Masking")

# %% [markdown]
# ## Axes and heads

# %% hide="true"
show("Axes and heads")

# %% [markdown]
# ## Scores and weights

# %% hide="true"
show("Scores and weights")

# %% [markdown]
# ## Training and evaluation

# %% hide="true"
show("Training and evaluation")

# %% [markdown]
# ## Positions and decoding

# %% hide="true"
show("Positions and decoding")

# %% [markdown]
# ## Catalog
#
# The table lists all bugs by name, with the laws that find them. Tests run each law on
# its exhibit, which must fail, and all laws on the fixed code, which must pass: so it
# is the bug that the law finds, and nothing else. The files are in the folder `museum`
# of the repository; `headnotes check` tests your own files in the same way.

# %% hide="true"
lines = ["| no. | bug | law | thread |", "|--:|---|---|---|"]
for names in museum.ROOMS.values():
    for name in names:
        exhibit = museum.read_exhibit(name)
        thread, _ = link_to_thread(exhibit)
        cells = [f"[{exhibit.title}](#{name})", link_to_law(exhibit.law), thread]
        lines.append(f"| {len(lines) - 1} | {' | '.join(cells)} |")
display(Markdown("\n".join(lines)))
