# %% [markdown]
# # Laws that every attention must obey
#
# Whoever writes an attention module has to answer the same question: is it right? An
# output of the right shape and a loss that falls prove little; each bug of the
# [museum](museum.md) has both. But there are sentences that hold for *every* attention,
# however it is written: what is hidden has no influence, batch items do not talk to each
# other, evaluation is training without dropout. Each of them can be tested, on ours and
# on yours.
#
# ```sh
# pip install headnotes
# headnotes check my_model.py:MyAttention
# ```
#
# ```python
# from attention_laws import check
#
# report = check(MyAttention(d_model=512, heads=8))
# print(report)
# assert report.ok
# ```
#
# How the module wants to be called, batch first or not, with which mask, is found out
# by trying and printed above the table; what cannot be found out can be
# [said](../source/attention_laws/checker.md). In a test suite, the fixture `attention_laws` fails
# with the table: `def test_mine(attention_laws): attention_laws(MyAttention(512, 8))`.
#
# ## What must hold

# %% hide="true"
from IPython.display import Markdown, display
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attention_laws import LAWS, check
from headnotes import mha
from headnotes.implementations import batch_first, causal, valid_lens

FAMILIES = {
    "masking": "What may be read",
    "algebra": "The formula",
    "order": "Order and distance",
    "modes": "How it is run",
}


def page_of(law):
    return law.test.__module__.rpartition(".")[2]


def told(law):
    """A law: its name, as a link to its source, its sentence, formula and reason."""
    name = law.name.replace("_", " ")
    link = f"**[{name}](../source/laws/{page_of(law)}.md#{law.name})**"
    formula = f"$${law.formula}$$\n\n" if law.formula else ""
    return f"{link}: {law.statement}\n\n{formula}{law.reason}"


for family, title in FAMILIES.items():
    laws = [told(law) for law in LAWS.values() if page_of(law) == family]
    display(Markdown("\n\n".join([f"### {title}", *laws])))
assert {page_of(law) for law in LAWS.values()} == FAMILIES.keys()

# %% [markdown]
# ## Who keeps them
#
# Measured when this page was built: ✓ is kept, ✗ is broken, and a dash means that the
# law asks for something which this one does not have. `causal` takes no mask, so
# nobody can hide a key from it; a function has no state to be saved.

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
        {"call": {"need_weights": False}, "imports": FROM_TORCH},
    ),
    "torch, weights": (nn.MultiheadAttention, {"imports": FROM_TORCH}),
    "SDPA": (scaled_dot_product_attention, {"imports": FROM_F}),
}
reports = {
    name: check(attention, only=LAWS, **options)
    for name, (attention, options) in SYSTEMS.items()
}
MARKS = {"kept": "✓", "broken": "✗", "not applicable": "–"}
lines = [f"| law | {' | '.join(SYSTEMS)} |", "|---" + "|:-:" * len(SYSTEMS) + "|"]
verdicts = {
    name: {finding.law.name: finding.verdict for finding in report.findings}
    for name, report in reports.items()
}
for law in LAWS:
    of_all = [verdicts[name][law] for name in SYSTEMS]
    if set(of_all) != {"not applicable"}:
        # Words do not break inside: the names stay on one line.
        name = law.replace("_", "\u00a0")
        lines.append(f"| {name} | {' | '.join(MARKS[v] for v in of_all)} |")
display(Markdown("\n".join(lines)))

for ours in ("core", "batch_first", "valid_lens", "causal"):
    assert reports[ours].ok, reports[ours]

# %% [markdown]
# `torch` is `nn.MultiheadAttention` with `need_weights=False`, `SDPA` is
# `F.scaled_dot_product_attention`. Laws that speak of what none of them has, such as a
# window or a linear bias, are left out.
#
# ## Where PyTorch breaks one
#
# Each of these programs was found and made small by the check. They stand here as it
# prints them, and fail as they stand.

# %% hide="true"
for name in ("torch, weights", "torch", "SDPA"):
    for finding in reports[name].broken:
        example = finding.counterexample
        display(
            Markdown(
                f"**{name}: {finding.law.name.replace('_', ' ')}.** {example.said}.\n\n"
                f"```python\n{example.code.strip()}\n```"
            )
        )
assert {f.law.name for f in reports["torch, weights"].broken} >= {"empty_rows"}
