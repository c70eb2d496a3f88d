# %% [markdown]
# # Shape comments that are tests
#
# A comment such as `# [batch_size, seq_len, d]` is the first thing that a reader of a
# model looks for, and the last thing that anybody updates. `pytest --shapes` makes each
# of them a test: it runs the examples in the docstrings of a file, watches every line,
# and compares what the line computed with what its comment says. The file is neither
# changed nor made to import anything.
#
# It works for any Python file whose values have a `.shape`, so for PyTorch, NumPy and
# others alike. On this site a tick, as on the page of [the core](source/mha.md), says
# that a comment has passed.
#
# ## A start in five lines
#
# ```console
# $ pip install {{ sidenotes }} pytest
# $ pytest --shapes my_model.py
# ```
#
# The file is on the [installation page](install.md#files).
#
# Let `my_model.py` be this file. The example in its docstring is what will be run:

# %% hide="true"
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from IPython.display import Markdown, display

from sidenotes.shapes import check
from sidenotes.trace import trace

PROMPT = 3 * ">"  # written out, it would be taken away by IPython
MODEL = f'''
import torch


def attend(query, key):
    """How much each query reads of each key.

    {PROMPT} attend(torch.randn(2, 5), torch.randn(3, 5)).shape
    torch.Size([2, 3])
    """
    q_len, d = query.shape
    k_len = len(key)
    scores = query @ key.T  # [q_len, k_len]
    weights = scores.softmax(dim=1)  # [k_len, q_len]
    return weights
'''


def show(source):
    """A source as a block of the page."""
    display(Markdown(f"```python\n{source.strip()}\n```"))


def verdicts(source):
    """Print what is found in a source, less the part that is the same each time."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "example.py"
        # At its end, so that the lines have the numbers that they seem to have.
        path.write_text(f"{source.strip()}\n\nimport torch\n", encoding="utf-8")
        findings = check(path.read_text(encoding="utf-8"), trace(path))
    for finding in findings:
        claim = finding.claim
        print(finding.message or f"line {claim.line}: {claim.text} is ok")
    return [finding.verdict for finding in findings]


show(MODEL)

# %% [markdown]
# One of the two comments has its axes swapped, and this is what pytest prints:

# %% hide="true"
QUIET = ["--no-header", "--color=no", "-p", "no:cacheprovider"]
with TemporaryDirectory() as folder:
    (Path(folder) / "my_model.py").write_text(MODEL.lstrip(), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--shapes", *QUIET, "my_model.py"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "72"},
        capture_output=True,
        text=True,
    )
print(re.sub(r" in [\d.]+s", "", result.stdout).strip())
assert "1 failed, 1 passed" in result.stdout, result.stdout + result.stderr

# %% [markdown]
# Each comment has a name, so `pytest --shapes "my_model.py::L12 [q_len, k_len]"` runs
# it alone. A folder stands for all files in it, and `pytest` without the flag is what
# it was before.
#
# ## What is a claim
#
# A comment that ends a line of code and begins with a bracket. It speaks of the value
# that the statement assigns, returns or yields. Where a statement takes several lines,
# it ends the last of them or the first. Beside a parameter that has a line of its own,
# it speaks of the argument. All other comments are prose.
#
# | you write | it means |
# |---|---|
# | `# [q_len, k_len]` | two axes, each with a name |
# | `# [3, d]` | an axis of size 3 |
# | `# [..., heads * d_k]` | any number of axes, then one of that size; `+ - * //` |
# | `# [batch_size, ..., d]` | `...` may stand anywhere, once |
# | `# []` | a scalar |
# | `# [n, d], [n]` | of two values, the first is `[n, d]`, the second `[n]` |
# | `# [n, d]; rows sum to 1` | what follows a semicolon is a remark |
# | `# [n, d]  # type: ignore` | a pragma may stand before or after |
# | `# (n, d)` or `# the shape is [n, d]` | prose, and not checked |
# | `# [n, d] -> [d, n]` | begins like a claim and is none: an error |
#
# One bracket on a line that assigns several tensors speaks of each of them.
#
# ## What a name means
#
# **Within one call, a name means one size.** If the code itself has an integer of that
# name, a parameter, a variable, or an attribute of `self`, that is the size. If it has
# none, the first comment that uses the name says what it is, and the others must agree.
# In another call the same name may mean another size.
#
# ## Four verdicts
#
# **ok**: the claim held in every call that reached it, and a different one would not
# have. Here the code knows `heads` and `d_k`, and each comment confirms what the other
# says of `seq_len`:

# %% hide="true"
OK = f'''
def split(x, heads):
    """
    {PROMPT} _ = split(torch.randn(7, 10), heads=5)
    """
    d_k = x.shape[-1] // heads
    y = x.relu()  # [seq_len, heads * d_k]
    return y.view(-1, heads, d_k)  # [seq_len, heads, d_k]
'''
show(OK)

# %% hide="true"
assert verdicts(OK) == ["ok", "ok"]

# %% [markdown]
# **wrong**: in some call it did not hold. Here the `-1` took the wrong axis:

# %% hide="true"
WRONG = OK.replace("-1, heads, d_k)", "heads, -1, d_k)")
assert WRONG != OK
show(WRONG)

# %% hide="true"
assert verdicts(WRONG) == ["ok", "wrong"]

# %% [markdown]
# **weak**: it held, but so would another one, because two sizes coincide in all
# examples. An example with other sizes makes it strong:

# %% hide="true"
WEAK = f'''
def scores(query, key):
    """
    {PROMPT} _ = scores(torch.randn(3, 5), torch.randn(3, 5))
    """
    q_len, k_len = len(query), len(key)
    return query @ key.T  # [q_len, k_len]
'''
show(WEAK)

# %% hide="true"
assert verdicts(WEAK) == ["weak"]

# %% [markdown]
# It is also weak if nothing but this one comment knows a name, for then the name could
# be any other:

# %% hide="true"
ALONE = WEAK.replace("torch.randn(3, 5), ", "torch.randn(2, 5), ").replace(
    "    q_len, k_len = len(query), len(key)\n", "    q_len = len(query)\n"
)
show(ALONE)

# %% hide="true"
assert verdicts(ALONE) == ["weak"]

# %% [markdown]
# **unreached**: no example runs the line. A comment that nothing has ever checked is a
# failure, not a pass:

# %% hide="true"
UNREACHED = f'''
def center(x, rows=False):
    """
    {PROMPT} _ = center(torch.randn(2, 5))
    """
    n, d = x.shape
    if rows:
        return x - x.mean(dim=1, keepdim=True)  # [n, d]
    return x - x.mean(dim=0)  # [n, d]
'''
show(UNREACHED)

# %% hide="true"
assert verdicts(UNREACHED) == ["unreached", "ok"]

# %% [markdown]
# ## How to choose sizes
#
# Take primes, small and all different: 2, 3, 5, 7, 11. No two axes can then be mistaken
# for one another, and a product such as `heads * d_k` is no other product. Keep 1 for
# what is really broadcast: a batch of one cannot be told from an axis that is stretched.
#
# Not every example must be like that. A claim is believed if for each mistake that
# could be made in it, two entries swapped, one renamed, an operator changed, there is
# one call in which that mistake would have been seen. In the tests of this project
# every comment of every module is altered in all these ways, and each time the check
# turns red. They also find each line that makes a tensor of a new shape, one that none
# of the tensors named in the line has, and is silent about it.
#
# ## What it does not do
#
# - It checks what the examples run, and nothing more: it is a test, not a proof.
# - What stands outside of functions is not watched, nor are values without a `.shape`,
#   such as lists of tensors.
# - `...` may hide an axis: `[..., d]` is true wherever `[n, d]` is.
# - A tensor may have the right shape and the wrong numbers in it.
