# %% [markdown]
# # Shape comments as tests
#
# `pytest --shapes` tests the shape comments of a Python file, such as `# [batch_size,
# seq_len, d]`. Readers of a model look for these comments first, and they become wrong
# unnoticed when the code changes. The command runs the doctest examples of the file,
# traces every line, and compares the shapes of the computed values with the comments.
# The file is not modified, and need not import anything.
#
# This works for all values with a `.shape`, as in PyTorch and NumPy. On this site, a
# tick beside a comment, as on the page of [the core](source/mha.md), means that the
# comment has passed.
#
# ## Quick start
#
# ```console
# $ pip install {{ sidenotes }} pytest
# $ pytest --shapes my_model.py
# ```
#
# The wheel is on the [installation page](install.md#files).
#
# Suppose that `my_model.py` is this file. The example in its docstring will be executed:

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

PROMPT = 3 * ">"  # written out, IPython would remove it
MODEL = f'''
import torch


def attend(query, key):
    """The attention weights of each query over the keys.

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
    """Print the findings in a source, and return their verdicts."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "example.py"
        # The import is added at the end, so that line numbers are those shown.
        path.write_text(f"{source.strip()}\n\nimport torch\n", encoding="utf-8")
        findings = check(path.read_text(encoding="utf-8"), trace(path))
    for finding in findings:
        claim = finding.claim
        print(finding.message or f"line {claim.line}: {claim.text} is ok")
    return [finding.verdict for finding in findings]


show(MODEL)

# %% [markdown]
# In one of the two comments the axes are swapped. pytest prints:

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
# Each comment is a test with a name: `pytest --shapes "my_model.py::L12 [q_len, k_len]"`
# runs one of them. For a folder, all files in it are tested. Without the flag, `pytest`
# is unchanged.
#
# ## Syntax of a shape comment
#
# A shape comment is at the end of a line of code and begins with a bracket. It states
# the shape of the value that the statement assigns, returns or yields. If the statement
# spans several lines, write it at the end of the first or the last one. Beside a
# parameter on a line of its own, it states the shape of the argument. All other
# comments are ignored.
#
# | comment | meaning |
# |---|---|
# | `# [q_len, k_len]` | two axes, each with a name |
# | `# [3, d]` | an axis of size 3 |
# | `# [..., heads * d_k]` | any number of axes, then one of that size; `+ - * //` |
# | `# [batch_size, ..., d]` | `...` may be anywhere, once |
# | `# []` | a scalar |
# | `# [n, d], [n]` | two values: the first is `[n, d]`, the second `[n]` |
# | `# [n, d]; rows sum to 1` | the text after a semicolon is a remark |
# | `# [n, d]  # type: ignore` | a pragma may be before or after the shape |
# | `# (n, d)` or `# the shape is [n, d]` | an ordinary comment: not checked |
# | `# [n, d] -> [d, n]` | a syntax error: the test fails |
#
# One bracket on a line that assigns several tensors states the shape of each of them.
#
# ## Names of sizes
#
# **Within one call, a name means one size.** If the code has an integer of that name (a
# parameter, a variable, or an attribute of `self`), this integer is the size. Otherwise
# the first comment that uses the name defines its size, and the others must agree. In
# another call, the same name may mean another size.
#
# ## The four results of a test
#
# **ok**: the comment was right in every call that reached it, and a different comment
# would have been wrong. Here `heads` and `d_k` are variables of the code, and each of
# the two comments confirms the size of `seq_len` in the other:

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
# **wrong**: in some call, the value had another shape. Here the `-1` is on the wrong
# axis:

# %% hide="true"
WRONG = OK.replace("-1, heads, d_k)", "heads, -1, d_k)")
assert WRONG != OK
show(WRONG)

# %% hide="true"
assert verdicts(WRONG) == ["ok", "wrong"]

# %% [markdown]
# **weak**: the comment was right, but a different one would have been right, too,
# because two sizes are equal in all examples. Add an example with other sizes:

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
# A comment is also weak if a name occurs in no other comment and in no variable,
# because any other name would then be right as well:

# %% hide="true"
ALONE = WEAK.replace("torch.randn(3, 5), ", "torch.randn(2, 5), ").replace(
    "    q_len, k_len = len(query), len(key)\n", "    q_len = len(query)\n"
)
show(ALONE)

# %% hide="true"
assert verdicts(ALONE) == ["weak"]

# %% [markdown]
# **unreached**: no example executes the line. A comment that was not checked fails; it
# does not pass silently:

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
# Choose small prime sizes that are all different: 2, 3, 5, 7, 11. Then no two axes can
# be confused, and a product such as `heads * d_k` equals no other product. Use size 1
# for broadcast axes only: a batch of one cannot be distinguished from such an axis.
#
# Not every example must be like that. A comment is ok if every possible mistake in it
# (two entries swapped, one renamed, an operator changed) would be wrong in at least one
# call. The tests of this project change every comment of every module in all these
# ways, and require that the check fails each time. They also find lines without a
# comment that compute a tensor of a new shape, which none of the tensors named in the
# line has.
#
# ## Limits
#
# - Only lines that the examples execute are checked: this is a test, not a proof.
# - Code outside of functions is not traced, and neither are values without a `.shape`,
#   such as lists of tensors.
# - `...` may hide an axis: `[..., d]` is right wherever `[n, d]` is.
# - A tensor of the right shape may hold wrong numbers.
