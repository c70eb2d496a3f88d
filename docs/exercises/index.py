# %% [markdown]
# # Exercises
#
# Each exercise is a notebook with a task, hints, and code to complete. A check compares
# your code with the expected answers, and shows the smallest input on which they differ,
# with a hint if the mistake is a known one. The exercises follow the
# [lessons](../start.md); you need Python, PyTorch, and the lesson that an exercise names.
#
# ## Do an exercise in Jupyter
#
# 1. Install Headnotes and Jupyter with `pip install {{ headnotes }} notebook numpy`
#    ([where a command names only a file](../install.md)).
# 2. Open an exercise in the tables below, and click *Download .ipynb* at its top.
# 3. Run `jupyter notebook` in the folder of the download, and open the notebook.
# 4. Write the missing code, and click *Run › Run All Cells*.
# 5. Read the report below the last cell: `pass`, or what to fix. Run all cells again.
#
# [All notebooks in one file](../notebooks/headnotes-notebooks.zip), lessons and exercises,
# can be downloaded at once.
#
# ## Do an exercise in an editor
#
# The command `headnotes exercise` writes an exercise as a script, and checks all that a
# folder holds:
#
# ```console
# $ headnotes exercise start causal_mask exercises
# $ headnotes exercise list exercises
# ```
#
# Write the missing code in `exercises/causal_mask.py`, then run `headnotes exercise check
# exercises`, or `pytest exercises`. [The command](../source/exercises/cli.md) stores which
# exercises have passed in your folder. Nothing leaves your machine.
#
# ## All exercises

# %% hide="true"
from IPython.display import Markdown, display

from headnotes.exercises.exercise import SERIES, load, notebooks, title_of

exercises = {name: load(name) for name in notebooks()}
for series in SERIES:
    rows = ["| exercise | name |", "|---|---|"]
    for name, path in notebooks().items():
        if exercises[name].series == series:
            title = title_of(path)
            link = f"[{title[0].upper()}{title[1:]}]({path.name})"
            rows.append(f"| {link} | `{name}` |")
    if len(rows) > 2:
        display(Markdown(f"### {series}\n\n" + "\n".join(rows)))

# %% [markdown]
# ## How the check works
#
# [`check`](../source/exercises/checking.md) calls your code on inputs from the smallest to
# the largest, and compares answers, dtypes, gradients and a second call with what is
# expected. For each exercise it knows some [typical
# mistakes](../source/exercises/solutions/causal_mask.md). If your code gives the same
# answers as one of them on all inputs, the report ends with a hint for that mistake. Your
# code itself is never analyzed, so any correct solution passes.
