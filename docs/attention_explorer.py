# %% [markdown]
# # Attention explorer: heads of a trained translator
#
# This page shows the cross-attention of a small trained Transformer, head by head, while
# it translates a date. Choose a text, and step through the decoder: each step generates
# one character, and adds one row to each map. A row is the generated character, a column
# a character of the text; the weights of a row sum to 1. [A trained translation
# model](learn/15_translation.md) explains the model, and how far to trust such maps.

# %% hide="true"
from datetime import date
from html import escape
from json import dumps, loads

import torch
from IPython.display import Markdown, display
from torch.nn.functional import cross_entropy

from headnotes.models import dates, heads
from headnotes.models.training import RECORDED, recorded

torch.set_grad_enabled(False)
torch.set_num_threads(1)
_, (model, record) = max(recorded().items())

# Held-out dates that the model translates, and texts that it gets wrong: the date that
# is right, the text, and what is special about it.
CORRECT = """
2004-05-18 | tuesday, may 18th, 2004 | English
1989-06-09 | the ninth of june 1989 | English, the day spelled out
2023-05-07 | sonntag, der 7. mai 2023 | German
2030-06-07 | 7.6.30 | German, in figures, the year with two digits
2026-08-04 | le 4 août 2026 | French
1999-05-03 | lunes, 3 de mayo de 1999 | Spanish
2013-03-14 | 14 mar 13 | Italian, shortened
"""
MISTAKES = """
2040-09-20 | donnerstag, der 20. september 2040 | German: two digits of the year change places
1998-05-03 | on may the 3rd of 1998 | an order that is not in the training
1998-05-02 | second of may 1998 | English without “the”, which is not in the training
1850-05-03 | 3 may 1850 | a year that is not in the training
1998-12-25 | christmas 1998 | a word that is not in the training
"""
FIELDS = {"year": slice(0, 4), "month": slice(5, 7), "day": slice(8, 10)}
HEADS = [(f"decoder.{layer}.cross", head) for layer in range(2) for head in range(4)]


def rows_of(table):
    return [line.split(" | ") for line in table.strip().split("\n")]


rows = rows_of(CORRECT) + rows_of(MISTAKES)
rights, texts, notes = zip(*rows, strict=True)
source, source_lens = dates.encode(texts)


def translate(model):
    """The tokens that a model generates for all texts."""
    return model.greedy(source, source_lens, max_len=12)


tokens = translate(model)
outputs = dates.decode(tokens)
for n, (right, output) in enumerate(zip(rights, outputs, strict=True)):
    is_correct = n < len(rows_of(CORRECT))
    assert is_correct == (output == right), f"{texts[n]}: {output}"
    assert not is_correct or dates.split_of(date.fromisoformat(right)) == "test"
without = [dates.decode(translate(heads.without_head(model, *head))) for head in HEADS]

inputs = torch.cat([torch.full_like(tokens[:1], dates.START), tokens[:-1]])
maps = heads.attention_maps(model, source, inputs, source_lens)
weights = torch.stack([maps[name][..., head] for name, head in HEADS])

# %% hide="true"
# What each head was measured to do: by how much the loss on the characters of each
# field rises when the head is removed, on held-out texts.
held_out = dates.encode_pairs(dates.sample("test", 200, dates.Random(1)))


def losses_of_fields(model):
    logits = model(held_out.source, held_out.target[:-1], held_out.source_lens)
    wanted = held_out.target[1:]
    loss = cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
    return {field: loss[rows].mean().item() for field, rows in FIELDS.items()}


whole = losses_of_fields(model)
costs = []
for head in HEADS:
    ablated = losses_of_fields(heads.without_head(model, *head))
    costs.append({field: ablated[field] - whole[field] for field in FIELDS})


def named(cost):
    """The fields that need a head, the one that needs it most first."""
    ranked = sorted(cost, key=lambda field: -cost[field])
    needed = [field for field in ranked if cost[field] > 0.01]
    return "every field" if needed == ranked else ", ".join(needed) or "no field"


# %% hide="true"
def example(n):
    """What the script needs of a text; weights are in thousandths."""
    part = weights[:, : len(outputs[n]) + 1, : len(texts[n]), n]
    return {
        "text": texts[n],
        "output": outputs[n],
        "right": rights[n],
        "note": notes[n],
        "without": [each[n] for each in without],
        "maps": (part * 1000).round().int().tolist(),
    }


def shown(character):
    """A character as a label: a space would be empty."""
    return "·" if character == " " else escape(character)


def table(label, example, rows):
    """A map as a table, of weights in thousandths."""
    head = "".join(f'<th scope="col">{shown(c)}</th>' for c in example["text"])
    body = ""
    for character, row in zip([*example["output"], "■"], rows, strict=True):
        cells = "".join(
            f'<td style="--w:{w / 10:.0f}">{w / 1000:.3f}</td>' for w in row
        )
        body += f'<tr><th scope="row">{character}</th>{cells}</tr>'
    # A browser paints a map before all of it has come; the columns keep their width.
    columns = f'<colgroup><col span="{len(example["text"]) + 1}"></colgroup>'
    return (
        f'<table class="xp-map" aria-label="{label}">{columns}<thead><tr><td></td>'
        f"{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def card(n, example):
    """A head: its name, what it costs to remove it, and its map."""
    name, head = HEADS[n]
    label = f"Layer {name.split('.')[1]}, head {head}"
    cost = ", ".join(f"{field} {rise:+.3f}" for field, rise in costs[n].items())
    return (
        f'<section class="xp-head"><h2>{label}: {named(costs[n])}</h2>'
        f"<p>Loss when removed: {cost}</p>"
        f'<p>This text without it: <span class="xp-without">{example["without"][n]}'
        f"</span></p>{table(label, example, example['maps'][n])}</section>"
    )


def explorer(examples):
    """The page before its script runs: complete, for the first text."""
    first, correct = examples[0], len(rows_of(CORRECT))
    options = "".join(
        f'<optgroup label="{label}">'
        + "".join(f"<option>{escape(each['text'])}</option>" for each in group)
        + "</optgroup>"
        for label, group in (
            ("Translated correctly", examples[:correct]),
            ("Mistakes", examples[correct:]),
        )
    )
    steps = len(first["output"]) + 1
    cards = "".join(card(n, first) for n in range(len(HEADS)))
    data = dumps(examples, separators=(",", ":"))
    return (
        '<div class="xp">'
        f'<script type="application/json">{data}</script><div class="xp-player">'
        f'<p class="xp-choice"><label>Text <select hidden>{options}</select></label> '
        f'<span class="xp-note">{first["note"]}</span></p>'
        f'<p class="xp-line"><span class="xp-text">{first["text"]}</span> → '
        f'<span class="xp-output">{first["output"]}</span></p>'
        '<p class="xp-steps"><button type="button" hidden>Back</button>'
        '<button type="button" hidden>Play</button>'
        '<button type="button" hidden>Next</button>'
        f'<label><input type="range" aria-label="step" min="1" max="{steps}" '
        f'value="{steps}" hidden><span class="xp-count">step {steps} of {steps}</span>'
        "</label></p>"
        '<p class="xp-cell" role="status"></p></div>'
        f'<div class="xp-heads" style="--columns:{len(first["text"])}">{cards}</div>'
        '<script defer src="assets/elements.js"></script>'
        '<script defer src="assets/explorer.js"></script></div>'
    )


display(Markdown(explorer([example(n) for n in range(len(texts))])))

# %% [markdown]
# ## What the page shows
#
# - **Heads.** The model has two decoder layers, each with a cross-attention of four heads.
#   A head is named by the fields of the date that need it: those on whose characters the
#   loss rises by more than 0.01 when the head is removed (*zero ablation*), on 200 held-out
#   texts. *No field* means that the model does without this head, as long as it has the
#   others.
# - **This text without it** is the translation of the chosen text by the model without
#   the head; characters that differ are marked.
# - **■** is the end of the target, **·** a space. Colors go from 0, dark, to 1, bright;
#   point to a cell or move the focus to it, and the exact weight is shown.
#
# A map shows which positions a head mixes, not whether the model uses the result: compare
# the maps of the heads that no field needs. And a column is a position of the encoder's
# output, which has mixed the characters. The lesson tests [what a map does not
# prove](learn/15_translation.md#what-an-attention-map-does-not-prove).
#
# ## Accuracy of three training runs
#
# The weights on this page are those of seed 1. The task was trained with three seeds, which
# change the initial weights and the batches. *Exact* is the share of held-out texts whose
# date is generated without a mistake; `python benchmarks/seeds.py` recorded it.

# %% hide="true"
seeds = loads((RECORDED / "seeds.json").read_text(encoding="utf-8"))
lines = ["| seed | held-out texts | exact |", "|--:|--:|--:|"]
for run in seeds["runs"]:
    lines.append(f"| {run['seed']} | {run['pairs']:,} | {run['exact_match']:.2%} |")
    assert run["exact_match"] > 0.99
display(Markdown("\n".join(lines)))
