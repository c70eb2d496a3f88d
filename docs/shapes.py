# %% [markdown]
# # Shape comments as tests
#
# `pytest --shapes` tests the shape comments of a Python file, such as `# [batch_size,
# seq_len, d]`. Readers of a model look for these comments first, and they become wrong
# unnoticed when the code changes. The command runs the doctest examples of the file,
# traces every line, and compares the shapes of the computed values with the comments.
# The file need not import anything, and need not be written for this: the notations that
# people use are understood, and a comment fails only if it is wrong.
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
        print(finding.message or f"line {claim.line}: {claim.text} is verified")
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
# | option | effect |
# |---|---|
# | `--shapes-call "Attention(512, 8)(torch.randn(2, 5, 512))"` | runs this code instead of the examples, for a file that has none; it sees the names of the file and `torch`, and may be repeated |
# | `--shapes-strict` | a comment that cannot be verified fails, too |
# | `--shapes-fix` | replaces wrong comments in the file by true ones |
#
# The calls of your own tests serve as well: `--shapes-call "import test_model;
# test_model.test_forward()"` runs a test that is beside the file, or in a folder that
# Python searches, such as the current one of `python -m pytest`.
#
# ## Notations
#
# A shape comment at the end of a line of code states the shape of the value that the
# statement assigns, returns or yields. If the statement spans several lines, write it at
# the end of the first or the last one. Beside a parameter on a line of its own, it states
# the shape of the argument. On a line of its own, it states the shape of the value that
# the code below computes, up to the next blank line, or of the variables that it names.
#
# | comment | meaning |
# |---|---|
# | `# [q_len, k_len]`, `# (q_len, k_len)`, `# q_len x k_len` | two axes, each with a name |
# | `# b h n d`, `# B, T, C`, `# b n (h d)` | short names need no brackets; `(h d)` is a product |
# | `# [3, d]`, `# (3 heads, d)` | an axis of size 3 |
# | `# [..., heads * d_k]`, `# (B, 2C, H/2)` | any number of axes, then one of that size; expressions with `+ - * /` |
# | `# [batch_size, ..., d]`, `# (B, _, d')` | `...` is any number of axes, once; `_`, `?`, `*` or `-1` is one axis of any size |
# | `# []` | a scalar |
# | `# [n, d], [n]` | two values: the first is `[n, d]`, the second `[n]` |
# | `# x: (n, d)`, `# Shape: (n, d)`, `# of shape (n, d)` | the shape of the variable `x`, or of the value |
# | `# (n, d) x (d, m) -> (n, m)` | the shape behind the arrow |
# | `# [n, d]; rows sum to 1`, `# [n, d] as float32` | text after the shape is a remark |
# | `# [n, d]  # type: ignore` | a pragma may be before or after the shape |
# | `x: Float[Tensor, "*batch n d"]` | a jaxtyping annotation of a parameter, a variable or a result |
#
# One shape on a line that assigns several tensors states the shape of each of them. All
# other comments are ignored, such as `# [1] see the paper`, ranges such as `# [0, 1]`, and
# what stands behind words such as `range`, `kernel`, `axes` or `e.g.`. A shape of integers
# only is never wrong, unless the comment calls it a shape or a size: `# size: (3, 2)`.
#
# ## Names of sizes
#
# **Within one call, a name means one size.** If the code has an integer of that name (a
# parameter, a variable, or an attribute of `self`), this integer is the size. Otherwise
# the name has the size that most comments of the call give it. If no other comment of the
# call uses it, the comments and arguments of `__init__` count, and the integers of a
# configuration such as `config.n_embd` or `cfg["n_embd"]`. In another call, the same name
# may mean another size. A name that grows in a loop, as in `# [batch_size, n + 1]` beside
# a concatenation, has a new size in each iteration.
#
# ## The three results of a test
#
# **verified**: the comment was right in every call that reached it, and a different
# comment would have been wrong. Here `heads` and `d_k` are variables of the code, and
# each of the two comments confirms the size of `seq_len` in the other:

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
assert verdicts(OK) == ["verified", "verified"]

# %% [markdown]
# **wrong**: in some call, the value had another shape than the code and the other
# comments say. Only this fails by default. Here the `-1` is on the wrong axis:

# %% hide="true"
WRONG = OK.replace("-1, heads, d_k)", "heads, -1, d_k)")
assert WRONG != OK
show(WRONG)

# %% hide="true"
assert verdicts(WRONG) == ["unverified", "wrong"]

# %% [markdown]
# **unverified**: nothing contradicts the comment, but nothing confirms it, either. pytest
# lists these comments with their reasons, and counts them as `unverified`; with
# `--shapes-strict` they fail. There are several reasons:
#
# A different comment would have been right, too, because two sizes are equal in all
# examples. The message names the two. Add an example in which they differ:

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
assert verdicts(WEAK) == ["unverified"]

# %% [markdown]
# A name occurs in no other comment and in no variable, so that any other name would be
# right as well. In the example of a wrong comment, this holds for `seq_len` in the first comment,
# because the only other comment is wrong. Here nothing defines `k_len`:

# %% hide="true"
ALONE = WEAK.replace("torch.randn(3, 5), ", "torch.randn(2, 5), ").replace(
    "    q_len, k_len = len(query), len(key)\n", "    q_len = len(query)\n"
)
show(ALONE)

# %% hide="true"
assert verdicts(ALONE) == ["unverified"]

# %% [markdown]
# No example executes the line:

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
assert verdicts(UNREACHED) == ["unverified", "verified"]

# %% [markdown]
# The remaining reasons:
#
# - the line computes no tensor, or an entry is not understood;
# - a number above 4 differs, which may be that of another configuration, as in
#   `(B, 3, 224, 224)`;
# - the code defines the name only after the line, perhaps with another meaning;
# - the comment was right in the first iteration of a loop;
# - a comment on a line of its own may describe another value, such as that of the first
#   call in a chain of several.
#
# ## Correct wrong comments
#
# `pytest --shapes --shapes-fix my_model.py` replaces each wrong comment by the true
# shape, in the notation of the comment. It uses names of the call, products of two names,
# or the number if it is the same in all calls. It keeps the encoding and the line ends of
# the file, and names the comments that it could not correct, such as those of several
# lines. The comment of the quick start becomes:

# %% hide="true"
from sidenotes.fix import corrected

with TemporaryDirectory() as folder:
    path = Path(folder) / "my_model.py"
    path.write_text(MODEL.lstrip(), encoding="utf-8")
    _, changes = corrected(MODEL.lstrip(), trace(path))
print(*changes, sep="\n")
assert changes == ["13: [k_len, q_len] is now [q_len, k_len]"]

# %% [markdown]
# ## How to choose sizes
#
# Choose small prime sizes that are all different: 2, 3, 5, 7, 11. Then no two axes can
# be confused, and a product such as `heads * d_k` equals no other product. Use size 1
# for broadcast axes only: a batch of one cannot be distinguished from such an axis.
#
# Not every example must be like that. A comment is verified if every possible mistake in it
# (two entries swapped, one renamed, an operator changed) would be wrong in at least one
# call. The tests of this project change every comment of every module in all these
# ways, and require that it is not verified each time. They also find lines without a
# comment that compute a tensor of a new shape, which none of the tensors named in the
# line has.
#
# ## How reliable it is
#
# A test of this project has 12 excerpts in the notations of public repositories, among
# them nanoGPT, Llama, Swin Transformer, CLIP, fairseq and d2l. The code is ours. The
# comments are right, and stand where the authors put theirs: 76 comments are verified,
# 12 unverified, and none fails. Then each verified comment is altered in one entry, which
# is renamed, swapped with another, removed or added. 2,193 of 2,195 alterations (99.9%)
# are noticed: the comment, or another one, is no longer verified. In a clone of the
# repository, `pytest -s tests/sidenotes/test_excerpts.py` prints these figures.
#
# ## Limits
#
# - What one shape means beside a whole statement is a convention: a comment that speaks
#   of something else can be mistaken for the shape of the value. If nothing else uses
#   its names, it is unverified.
# - Only lines that the examples execute are checked: this is a test, not a proof.
# - Code outside of functions is not traced, and neither are values without a `.shape`,
#   such as lists of tensors.
# - `...` may hide an axis: `[..., d]` is right wherever `[n, d]` is.
# - Of two sizes that are equal in all examples, a comment may name the wrong one. This is
#   noticed if both have names: in comments, as parameters, in one configuration, in lines
#   such as `b, n, d = x.shape` and `m = k.size(1)`, or as attributes that `__init__` sets
#   from different parameters; and if a number equals a size that the same code names.
# - It is not noticed if the other size has no name, such as the length of the keys in
#   `query @ key.mT  # [b, n, n]`, an argument of a layer, as in `nn.Linear(width, 6)`, or
#   the value of an expression, such as `d // heads`.
# - A tensor of the right shape may hold wrong numbers.
