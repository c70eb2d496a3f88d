# %% [markdown]
# # Start here
#
# This page says what to read on this site, and in which order, for three purposes: to
# learn how attention works, to copy an attention module into a project, and to check one
# that you have written. All reading times are estimates.

# %% hide="true"
import re
from itertools import pairwise
from pathlib import Path

from IPython.display import Markdown, display

# Each lesson states its title, its reading time and the lessons that it needs.
PATHS = sorted(Path("learn").glob("*.py"))
TITLES, MINUTES, NEEDS = [], [], []
for path in PATHS:
    text, _, _ = path.read_text(encoding="utf-8").partition("\n# %%\n")
    TITLES.append(re.search(r"^# # (.*)$", text, re.M)[1])
    text = " ".join(text.replace("\n#", "\n").split())
    needs, time = re.search(r"You need (.*?) Reading time: (\d+) min", text).groups()
    MINUTES.append(int(time))
    NEEDS.append([int(number) for number in re.findall(r"\]\((\d\d)_", needs)])


def link(number, text=None):
    """A link to a lesson, with its title as text."""
    return f"[{text or TITLES[number]}](learn/{PATHS[number].stem}.md)"


def lessons(first, last):
    """Links to some lessons, by number."""
    return f"{link(first, f'Lessons {first}')} to {link(last, str(last))}"


def minutes(first, last):
    return sum(MINUTES[first : last + 1])


display(
    Markdown(f"""
## To learn how attention works

1. {link(0)} ({MINUTES[0]} minutes) sends one sentence through an attention layer.
2. {lessons(1, 4)} ({minutes(1, 4)} minutes) build multi-head attention from dot products.
3. [The core module, line by line](source/mha.md) (15 minutes) is the complete code, with
   shapes beside the lines and, at a click, values.
4. {lessons(5, 7)} ({minutes(5, 7)} minutes) add what real data need: positions, padding,
   and a second sequence.
5. {lessons(8, 10)} ({minutes(8, 10)} minutes) compare implementations: einsum, PyTorch's
   modules, speed.
6. {lessons(11, 13)} ({minutes(11, 13)} minutes) are about current language models: the KV
   cache, position encodings, sliding windows.
7. {lessons(14, 15)} ({minutes(14, 15)} minutes) put attention into a Transformer, and look
   into the heads of a model that translates. The [attention
   explorer](attention_explorer.md) plays its steps.

Each lesson has an exercise, with its answer. In the [exercises](exercises/index.md), which
are notebooks, you write the code, and a check finds mistakes. Look up terms in the
[glossary](glossary.md), and shapes in [notation and shapes](notation.md), a sheet to
print.

## To copy a module

1. [Which implementation to
   use](learn/{PATHS[10].stem}.md#which-implementation-to-use) (2 minutes) is a table of
   purposes.
2. [The core](source/mha.md), made to be read and changed, or the [fast
   module](source/fast/module.md) (15 minutes each). The buttons above the code copy or
   download it, and so does [`headnotes copy`](source/cli.md). Only PyTorch is needed.
3. The [mask converter](compare/masks.md) (5 minutes) gives your mask in the convention of
   each library.
4. [Converting weights](source/convert.md) (15 minutes), if you have a checkpoint of
   `nn.MultiheadAttention`, and [pretrained models](pretrained.md) (5 minutes) for one of
   Hugging Face Transformers, such as Llama.
5. `headnotes check`, below, once you have changed the module.

## To check your own module

1. [Installation](install.md) (5 minutes) is one command.
2. [The laws of attention](compare/laws.md) (15 minutes): what `headnotes check` tests,
   from the command line, in Python or in pytest.
3. [Options](source/attention_laws/adapter.md#Options) (5 minutes), if the check does not
   find out how your module is called.
4. [Troubleshooting](troubleshooting.md) (10 minutes) leads from a symptom, such as NaN,
   to its causes, and to the law that tests for each.
5. The [bug museum](compare/museum.md) (45 minutes) has real bugs to find.
6. [`pytest --shapes`](shapes.md) (5 minutes) tests the shape comments in your code.
""")
)

# %% [markdown]
# ## Prerequisites
#
# This is what the lessons build on. Nothing about Transformers is assumed.
#
# | you should know | from lesson | to learn it |
# |---|:-:|---|
# | Python: functions, classes, comprehensions | 0 | [Python tutorial](https://docs.python.org/3/tutorial/) |
# | tensors: shape, dtype, indexing | 0 | [PyTorch: tensors](https://docs.pytorch.org/tutorials/beginner/basics/tensorqs_tutorial.html) |
# | dot products and matrix products | 1 | [d2l: linear algebra](https://d2l.ai/chapter_preliminaries/linear-algebra.html) |
# | `nn.Module` and `nn.Linear` | 2 | [PyTorch: build a model](https://docs.pytorch.org/tutorials/beginner/basics/buildmodel_tutorial.html) |
# | mean and variance | 2 | [d2l: probability](https://d2l.ai/chapter_preliminaries/probability.html) |
# | dropout, `train()` and `eval()` | 3 | [PyTorch: `Dropout`](https://docs.pytorch.org/docs/stable/generated/torch.nn.Dropout.html) |
# | `view` and `transpose` | 4 | [PyTorch: tensor views](https://docs.pytorch.org/docs/stable/tensor_view.html) |
# | gradients and `backward()` | 5 | [PyTorch: autograd](https://docs.pytorch.org/tutorials/beginner/basics/autogradqs_tutorial.html) |
# | broadcasting | 6 | [PyTorch: broadcasting](https://docs.pytorch.org/docs/stable/notes/broadcasting.html) |
# | loss, optimizer, training loop | 8 | [PyTorch: optimization](https://docs.pytorch.org/tutorials/beginner/basics/optimization_tutorial.html) |
#
# ## Map of the lessons
#
# An arrow leads from a lesson to one that needs it. Lesson 0 needs no other, and no other
# needs it.

# %% hide="true"
MAP = """
1 → 2 → 3 → 4 → 5
            4 → 6 → 7
            4 → 8 → 10
                8 → 11
            6 and 8 → 9
            6 and 11 → 13
            5 → 12
            5 → 14
            7 and 11 and 14 → 15
"""
display(Markdown(f"```text\n{MAP.strip()}\n```"))

arrows = set()
for line in MAP.strip().splitlines():
    steps = [re.findall(r"\d+", step) for step in line.split("→")]
    for before, after in pairwise(steps):
        arrows |= {(int(a), int(b)) for a in before for b in after}


def ancestors(number):
    return {a for need in NEEDS[number] for a in (need, *ancestors(need))}


# No arrow where there is a longer way.
assert arrows == {
    (need, number)
    for number, needs in enumerate(NEEDS)
    for need in needs
    if not any(need in ancestors(other) for other in needs)
}

rows = ["| lesson | title | minutes | needs |", "|--:|---|--:|---|"]
for number, needs in enumerate(NEEDS):
    needed = ", ".join(link(need, str(need)) for need in needs) or "–"
    rows.append(f"| {number} | {link(number)} | {MINUTES[number]} | {needed} |")
rows.append(f"| | all | {sum(MINUTES)} | |")
display(Markdown("\n".join(rows)))
