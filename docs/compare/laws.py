# %% [markdown]
# # Laws of attention: check your implementation
#
# `headnotes check` tests an implementation of attention, ours or yours, for properties
# that every correct one has. An output of the right shape and a loss that falls prove
# little: each bug of the [museum](museum.md) has both. But hidden keys must have no
# influence, batch items must not influence each other, and evaluation must compute the
# same as training without dropout, however the code is written.
#
# ```console
# $ pip install {{ headnotes }}
# $ headnotes check my_model.py:MyAttention
# ```
#
# The file is on the [installation page](../install.md#files). In Python:
#
# ```python
# from attention_laws import check
#
# report = check(MyAttention(d_model=512, heads=8))
# print(report)
# assert report.ok
# ```
#
# How the module is called (batch first or not, with which mask) is inferred from its
# names, from the shapes that its documentation states, and from small calls, and printed
# above the results. Give what cannot be inferred as an
# [option](../source/attention_laws/adapter.md#Options). In pytest, the fixture
# `attention_laws` fails the test and prints the results: `def
# test_mine(attention_laws): attention_laws(MyAttention(512, 8))`. It also fails if each
# law is skipped, takes `inside=True` for a model, and ignores `pyproject.toml`.
#
# In continuous integration, the exit status says what was found:
#
# - 0: no law fails, and at least one passes;
# - 1: a law fails;
# - 2: no law fails, but an option is wrong, an attention could not be called, or each
#   law was skipped;
# - 130: Ctrl-C.
#
# `--junit report.xml` writes the results, and such errors, for the CI system,
# `--github` prints annotations of GitHub Actions (on the standard error stream with
# `--json`), and `--quiet` prints nothing unless a law fails. List what is to be checked
# in `pyproject.toml`, with the options of each; `headnotes check` without a target then
# checks all of them:
#
# ```toml
# [tool.headnotes.check."my_model.py:MyAttention"]
# causal = true
# positions = "rotary"
#
# [tool.headnotes.check."my_model.py:build_model"]
# inside = true
# ```
#
# With `inside`, or `--inside` on the command line, each attention within a model is
# checked as it was built. Where a model takes token ids or images, this is inferred,
# and each report says so. A small model of token ids is also checked as a whole, with
# vectors in place of the ids: its masks, positions and caches are more than those of
# its attentions. A workflow of GitHub Actions, and a hook of
# [pre-commit](https://pre-commit.com/) that runs if the file has changed:
#
# ```yaml
# # .github/workflows/attention.yml
# on: [push, pull_request]
# jobs:
#   attention:
#     runs-on: ubuntu-latest
#     steps:
#       - uses: actions/checkout@v4
#       - uses: actions/setup-python@v5
#         with: {python-version: "3.12"}
#       - run: pip install {{ headnotes }}
#       - run: headnotes check --quiet --github
# ```
#
# ```yaml
# # .pre-commit-config.yaml
# repos:
#   - repo: local
#     hooks:
#       - id: headnotes-check
#         name: headnotes check
#         entry: headnotes check --quiet
#         language: system
#         files: ^my_model\.py$
#         pass_filenames: false
# ```
#
# A law that assumes plain attention is skipped, with the reason, if it fails and the code
# names another design, such as a gate or a residual connection. So are seven habits of
# many libraries: NaN in a fully masked row, weights that are returned after dropout, a
# fill value that raises an error in float16, a table of float32 with which PyTorch
# refuses inputs of any other dtype, squares in a norm that overflow in float16 where the
# code does not mention it, a linear bias that is rounded to the dtype of the scores, and
# positions that are counted in the dtype of a buffer, which is wrong in a module that
# was converted to bfloat16. `--only` runs a law even so. What docstrings promise is
# tested, too: on which side padding is, whether returned weights are those from before or
# after dropout, and which arguments later calls with a cache do not need.
#
# Options of the constructor that are off by default are turned on, one after the other,
# and the modes, the batch and decoding are compared again; so are options of the call,
# such as a soft cap, and the sizes of chunks. A module that stores a state between calls
# is reset before each, if it has a method such as `reset()`, and one whose memory a
# method prepares is called with it, by
# [`with_memory`](../source/attention_laws/prepared.md#with_memory). A method named `step`,
# `decode` or `forward_chunk` that takes a cache is called to decode, if `forward` does
# not take one. The masks of an image may be of its pixels, rows or columns, as of the
# frames of a video, which may also be a number (`num_frames`), and may be in front of
# the channels or behind them. Of a decoder layer, both attentions are checked: that to
# a context, and the causal one of its tokens, with the cache. A function that takes
# keys and values in pages (query, key pages, value pages, table, lengths) is checked as
# attention to sequences, by
# [`over_pages`](../source/attention_laws/pages.md#over_pages), and one that is documented
# to take one query of each sequence, without an axis for it, as attention of several, by
# [`over_queries`](../source/attention_laws/one_query.md#over_queries). A module that
# takes the newest token of each sequence and a cache is given sequences, token by token,
# by [`over_steps`](../source/attention_laws/one_query.md#over_steps); where the caller
# owns the tensors of keys and values, and counts what they hold, so is a module or a
# function, by [`over_caches`](../source/attention_laws/new_tokens.md#over_caches).
#
# ## The laws

# %% hide="true"
from IPython.display import Markdown, display
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attention_laws import LAWS, check
from headnotes import mha
from headnotes.implementations import batch_first, causal, valid_lens

FAMILIES = {
    "masking": "Masking",
    "batch": "Batch items",
    "images": "Images",
    "algebra": "The formula",
    "weights": "Returned weights",
    "scores": "Scores",
    "heads": "Heads",
    "sinks": "Sinks",
    "gradients": "Gradients",
    "decoding": "Decoding",
    "generation": "Generation",
    "blocks": "Blocks",
    "order": "Order",
    "positions": "Positions",
    "tables": "Tables of positions",
    "lengths": "Long sequences",
    "execution": "Execution",
    "dropout": "Dropout",
    "options": "Options",
}


def module_of(law):
    return law.test.__module__.rpartition(".")[2]


def describe(law):
    """A law: its name, as a link to its source, its statement, formula and reason."""
    name = law.name.replace("_", " ")
    page = f"../source/attention_laws/{module_of(law)}.md"
    formula = f"$${law.formula}$$\n\n" if law.formula else ""
    return f"**[{name}]({page}#{law.name})**: {law.statement}\n\n{formula}{law.reason}"


for family, title in FAMILIES.items():
    laws = [describe(law) for law in LAWS.values() if module_of(law) == family]
    display(Markdown("\n\n".join([f"### {title}", *laws])))
assert {module_of(law) for law in LAWS.values()} == FAMILIES.keys()

# %% [markdown]
# ## Results
#
# The table was measured when this page was built: ✓ passes, ✗ fails, and a dash means
# that the law does not apply. `causal` has no mask argument, so the laws of padding do
# not apply to it; a function has no state that could be saved.

# %% hide="true"
FROM_TORCH = "from torch.nn import MultiheadAttention\n"
FROM_F = "from torch.nn.functional import scaled_dot_product_attention\n"
SYSTEMS = {
    "core": (mha.MultiHeadAttention, {}),
    "batch_first": (batch_first.MultiHeadAttention, {}),
    "valid_lens": (valid_lens.MultiHeadAttention, {}),
    "causal": (causal.MultiHeadAttention, {}),
    "torch": (
        nn.MultiheadAttention,
        {"call_args": {"need_weights": False}, "imports": FROM_TORCH},
    ),
    "torch, weights": (nn.MultiheadAttention, {"imports": FROM_TORCH}),
    "SDPA": (scaled_dot_product_attention, {"imports": FROM_F}),
}
reports = {
    name: check(attention, only=LAWS, **options)
    for name, (attention, options) in SYSTEMS.items()
}
MARKS = {"pass": "✓", "fail": "✗", "not applicable": "–"}
lines = [f"| law | {' | '.join(SYSTEMS)} |", "|---" + "|:-:" * len(SYSTEMS) + "|"]
statuses = {
    name: {result.law.name: result.status for result in report.results}
    for name, report in reports.items()
}
for law in LAWS:
    row = [statuses[name][law] for name in SYSTEMS]
    if set(row) != {"not applicable"}:
        # A no-break space keeps the name of a law on one line.
        name = law.replace("_", "\u00a0")
        lines.append(f"| {name} | {' | '.join(MARKS[status] for status in row)} |")
display(Markdown("\n".join(lines)))

for ours in ("core", "batch_first", "valid_lens", "causal"):
    assert reports[ours].ok, reports[ours]

# %% [markdown]
# `torch` is `nn.MultiheadAttention` with `need_weights=False`, `SDPA` is
# `F.scaled_dot_product_attention`. Laws that apply to none of them, such as those of a
# sliding window or of ALiBi, are left out.
#
# ## Laws that PyTorch violates
#
# The check found each of these counterexamples and reduced its sizes. They are complete
# programs, shown as the check prints them, and raise an `AssertionError` when run.

# %% hide="true"
for name in ("torch, weights", "torch", "SDPA"):
    for result in reports[name].failed:
        example = result.counterexample
        display(
            Markdown(
                f"**{name}: {result.law.name.replace('_', ' ')}.** {example.message}."
                f"\n\n```python\n{example.code.strip()}\n```"
            )
        )
failed = {
    name: {result.law.name for result in report.failed}
    for name, report in reports.items()
}
assert failed["torch"] == {"nonfinite_padding"}, failed
assert failed["torch, weights"] - failed["torch"] == {
    "fully_masked_rows",
    "rows_sum_to_one",
}, failed

# %% [markdown]
# ## Modules of other packages
#
# `python benchmarks/packages.py` checks attention modules of the packages that are
# installed, without options, and records the results. Two modules of timm are given as
# instances. labml-nn runs with labml 0.4.168 here, because the attention of labml-nn
# 0.5.1 raises an error with labml 0.5. The table leaves out modules that need options.
# The recorded run:

# %% hide="true"
import json
from pathlib import Path

# For each law that fails, the reason; all of them are properties of the modules.
REASONS = {
    "rows_sum_to_one": "The weights are returned after dropout, so that in training "
    "their rows do not sum to 1.",
    "fully_masked_rows": "The output of a fully masked row is NaN.",
    "dtype_and_device": "With a mask, a module in float16 returns float32, or it raises "
    "an error in half precision.",
    "distant_positions": "Positions are rounded to half precision, or the module raises "
    "an error in half precision.",
    "half_precision": "The module raises an error in half precision.",
    "large_scores": "The module raises an error in half precision.",
}

run = json.loads(Path("../../benchmarks/packages.json").read_text("utf-8"))
lines = ["| package | module | pass | skip | FAIL | s |", "|---|---|--:|--:|---|--:|"]
modules = [record for package in run["packages"] for record in package["modules"]]
failed = sorted({name for record in modules for name in record["failed"]})
for package in run["packages"]:
    classes = [record["module"].rpartition(".")[2] for record in package["modules"]]
    for record, name in zip(package["modules"], classes, strict=True):
        # The file is named only where it tells two classes apart.
        parts = 1 + (classes.count(name) > 1)
        module = ".".join(record["module"].split(".")[-parts:])
        reasons = sorted(1 + failed.index(law) for law in record["failed"])
        lines.append(
            f"| {package['name']} {package['version']} "
            f'| <code class="whole">{module}</code> | {record["passed"]} '
            f"| {record['skipped']} | {', '.join(map(str, reasons))} "
            f"| {record['seconds']:.0f} |"
        )
assert {*failed} <= REASONS.keys(), failed
lines += ["", f"torch {run['torch']}, {run['device']}, {run['date']}. The last column"]
lines.append(
    "is CPU time on one core, without imports. The numbers of the failures are"
)
lines.append(
    "those of this list; each is a property of the module, not an error of the"
)
lines.append("check:\n")
lines += [f"1. **{name.replace('_', ' ')}.** {REASONS[name]}" for name in failed]
display(Markdown("\n".join(lines)))
